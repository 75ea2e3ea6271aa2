"""Looks at the machine for whoever asks: on a thread, and not more often than figures change."""

from __future__ import annotations

import asyncio
import logging

from vllm_metal.monitor import machine
from vllm_metal.monitor.machine import Machine

logger = logging.getLogger(__name__)

_FRESH_S = 2.0
#: A tool of the system's that hangs must not hold up a scrape.
_PATIENCE_S = 2.0


class MachineWatch:
    def __init__(self) -> None:
        self._latest = Machine()
        self._looking: asyncio.Task[None] | None = None
        self._looked_at = float("-inf")

    async def look(self, *, with_mlx: bool) -> Machine:
        """The newest look that can be had now. `with_mlx` as in `machine.look`."""
        if self._looking is None and asyncio.get_running_loop().time() - self._looked_at > _FRESH_S:
            self._looking = asyncio.create_task(self._take(with_mlx))
        if self._looking is not None:
            await asyncio.wait([self._looking], timeout=_PATIENCE_S)
        return self._latest

    async def _take(self, with_mlx: bool) -> None:
        try:
            self._latest = await asyncio.to_thread(machine.look, with_mlx=with_mlx)
        # The figures that are left are worth a scrape all the same.
        except Exception:
            logger.exception("the machine could not be looked at")
        finally:
            self._looked_at = asyncio.get_running_loop().time()
            self._looking = None
