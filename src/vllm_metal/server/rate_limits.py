"""How much each API key may ask for: requests a minute, and requests at once."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from dataclasses import dataclass

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from vllm_metal.errors import RateLimited
from vllm_metal.server import security
from vllm_metal.server.keys import PROBES, RATE_LIMIT
from vllm_metal.settings import ServerConfig


@dataclass(slots=True)
class _Use:
    """What one key has done: `spent` requests that a steady rate has not made up for yet."""

    spent: float = 0.0
    as_of_s: float = 0.0
    num_running: int = 0


def limit_rates(server: ServerConfig) -> Middleware:
    """For requests that make work. Without API keys all clients share one allowance."""
    per_minute, at_once = server.max_requests_per_minute, server.max_concurrent_requests
    # Bounded by the number of keys: others have been turned away before.
    uses: defaultdict[str, _Use] = defaultdict(_Use)

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.method != "POST" or request.path in PROBES or not (per_minute or at_once):
            return await handler(request)
        use = uses[security.api_key(request) if server.api_keys else ""]
        if at_once and use.num_running >= at_once:
            raise RateLimited(f"this key may run no more than {at_once} requests at once")
        if per_minute:
            request[RATE_LIMIT] = _spend(use, per_minute)
        use.num_running += 1
        try:
            return await handler(request)
        finally:
            use.num_running -= 1

    return middleware


def _spend(use: _Use, per_minute: int) -> dict[str, str]:
    """Count one request more; gives the headers that OpenAI's clients know. Raises RateLimited."""
    now_s = time.monotonic()
    request_s = 60 / per_minute
    use.spent = max(0.0, use.spent - (now_s - use.as_of_s) / request_s)
    use.as_of_s = now_s
    if use.spent + 1 > per_minute:
        raise RateLimited(
            f"this key may send no more than {per_minute} requests a minute",
            retry_after_s=math.ceil((use.spent + 1 - per_minute) * request_s),
        )
    use.spent += 1
    return {
        "x-ratelimit-limit-requests": str(per_minute),
        "x-ratelimit-remaining-requests": str(int(per_minute - use.spent)),
        "x-ratelimit-reset-requests": f"{math.ceil(use.spent * request_s)}s",
    }
