"""How a model of any kind comes onto the device, on its engine's thread, and off again if that fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from vllm_metal.engine.device_turns import DeviceTurns, Turn
from vllm_metal.engine.mlx import blas, device


@contextmanager
def loading(device_name: str, turns: DeviceTurns) -> Iterator[Turn]:
    """Gives the turn that the loaded model keeps, on the device that `engine.device` names.

    What fails meanwhile leaves neither a turn nor MLX's streams behind. Raises ConfigError if there is no
    such device.
    """
    device.select(device_name)
    device.prepare()
    if device.is_cpu():
        blas.warn_if_slow()
    turn = turns.join()
    try:
        yield turn
    except BaseException:
        turn.leave()
        device.leave_thread()
        raise
