"""GET / and /openapi.json: what the server can do, for people and for programs."""

from __future__ import annotations

from html import escape

from aiohttp import web

from vllm_metal import __version__
from vllm_metal.api.openapi import document
from vllm_metal.server import bodies
from vllm_metal.server.keys import CONFIG, MANAGER, OPERATIONS

_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>vllm-metal</title>
<style>
:root {{ color-scheme: light dark }}
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 46rem; margin: 3rem auto; padding: 0 1rem }}
pre {{ overflow-x: auto; padding: 1rem; border: 1px solid #8888; border-radius: 6px }}
td {{ padding: .1rem 1rem .1rem 0; vertical-align: top }}
</style>
<h1>vllm-metal {version}</h1>
<p>{state} Served: {names}.</p>
<p>Point any client of OpenAI's API at <code>{url}/v1</code>, or ask by hand:</p>
<pre>curl {url}/v1/chat/completions \\
  -H 'Content-Type: application/json' \\{authorization}
  -d '{{"messages": [{{"role": "user", "content": "Hello"}}]}}'</pre>
<table>{rows}</table>
<p><a href="openapi.json">openapi.json</a> describes every field.</p>
</html>
"""
_AUTHORIZATION = "\n  -H 'Authorization: Bearer KEY' \\"

#: The page needs nothing but itself.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; frame-ancestors 'none'"


async def index(request: web.Request) -> web.Response:
    manager = request.app[MANAGER]
    rows = (
        f"<tr><td><code>{each.method.upper()} {escape(each.path)}</code><td>{escape(each.summary)}"
        for each in request.app[OPERATIONS]
    )
    health = manager.readiness()
    page = _PAGE.format(
        version=__version__,
        state="Ready." if health.status == "ok" else f"Not ready: {escape(health.stage)}.",
        names=", ".join(f"<code>{escape(name)}</code>" for name in manager.roster.served_names),
        url=escape(f"{request.scheme}://{request.host}"),
        authorization=_AUTHORIZATION if request.app[CONFIG].server.api_keys else "",
        rows="".join(rows),
    )
    return web.Response(
        text=page, content_type="text/html", charset="utf-8", headers={"Content-Security-Policy": _POLICY}
    )


async def openapi(request: web.Request) -> web.Response:
    operations = request.app[OPERATIONS]
    with_keys = bool(request.app[CONFIG].server.api_keys)
    return bodies.reply(document(operations, version=__version__, with_keys=with_keys))
