"""Renders one chat template, as a program of its own that can be killed: it reads and writes JSON.

It imports nothing of ours, which would cost it seconds.
"""

from __future__ import annotations

import json
import math
import resource
import sys

from transformers.utils.chat_template_utils import render_jinja_template

#: Seconds of CPU time, for templates of models take milliseconds.
_CPU_S = 2
_MAX_CHARACTERS = 16_000_000


def main() -> None:
    asked = json.load(sys.stdin)
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit_s = math.ceil(used.ru_utime + used.ru_stime) + _CPU_S
    resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s))
    try:
        [text], _ = render_jinja_template([asked["messages"]], **asked["options"])
    except Exception as exc:
        json.dump({"error": str(exc)[:1000] or type(exc).__name__}, sys.stdout)
        return
    if len(text) > _MAX_CHARACTERS:
        json.dump({"error": f"it gave more than {_MAX_CHARACTERS} characters"}, sys.stdout)
    else:
        json.dump({"text": text}, sys.stdout)


if __name__ == "__main__":
    main()
