"""What the application and its requests carry."""

from __future__ import annotations

from aiohttp import web

from vllm_metal.api.openapi import Operation
from vllm_metal.config import Config
from vllm_metal.server.machine_watch import MachineWatch
from vllm_metal.server.model_manager import ModelManager
from vllm_metal.server.response_store import ResponseStore
from vllm_metal.server.tally import Tally
from vllm_metal.service.installation import Installation

CONFIG = web.AppKey("config", Config)
MACHINE_WATCH = web.AppKey("machine_watch", MachineWatch)
MANAGER = web.AppKey("manager", ModelManager)
RESPONSES = web.AppKey("responses", ResponseStore)
INSTALLATION = web.AppKey("installation", Installation)
OPERATIONS: web.AppKey[tuple[Operation, ...]] = web.AppKey("operations", tuple)

#: Routes that watchdogs ask: open without a key, and too many for the log.
PROBES = frozenset({"/health", "/ready", "/ping"})

RATE_LIMIT: web.RequestKey[dict[str, str]] = web.RequestKey("rate_limit", dict)
REQUEST_ID = web.RequestKey("request_id", str)
DEADLINE = web.RequestKey("deadline", float)
#: What has been generated for it, for the log.
TALLY = web.RequestKey("tally", Tally)
