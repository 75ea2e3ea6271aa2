"""What the application and its requests carry."""

from __future__ import annotations

from aiohttp import web

from vllm_metal.api.usage import Usage
from vllm_metal.config import ServerConfig
from vllm_metal.server.model_manager import ModelManager
from vllm_metal.service.installation import Installation

MANAGER = web.AppKey("manager", ModelManager)
INSTALLATION = web.AppKey("installation", Installation)
SERVER = web.AppKey("server", ServerConfig)

#: Routes that watchdogs ask: open without a key, and too many for the log.
PROBES = frozenset({"/health", "/ping"})

USAGE = web.RequestKey("usage", Usage)
