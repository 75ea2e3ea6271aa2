"""`powermetrics` with the rights of root, which it needs, and never a question for a password."""

from __future__ import annotations

from vllm_metal.errors import MetalError
from vllm_metal.monitor import command, powermetrics
from vllm_metal.monitor.reading import GpuReading

_HINT = (
    "run `sudo -v` and then this again, or pipe: "
    "`sudo powermetrics --samplers gpu_power -i 1000 | metal top --from -`"
)


def read(interval_s: float) -> GpuReading | None:
    """Watch for `interval_s`. Raises MetalError where sudo or powermetrics refuses."""
    done = command.run(
        *("sudo", "-n", "powermetrics", "--samplers", "gpu_power,thermal"),
        *("-i", str(round(interval_s * 1000)), "-n", "1"),
        timeout_s=interval_s + command.TIMEOUT_S,
    )
    if done.exit_code == 0:
        return next(powermetrics.readings([done.stdout.encode()]), None)
    if done.exit_code is None:
        raise MetalError("`powermetrics` is not here, or does not end", hint="it is a tool of macOS")
    words = " ".join(done.stderr.split())
    said = "".join(letter for letter in words if letter.isprintable())[:200] or f"exit code {done.exit_code}"
    raise MetalError(f"`sudo -n powermetrics` was refused: {said}", hint=_HINT)
