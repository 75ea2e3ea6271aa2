"""The checks of `metal doctor`, in the order in which they are told."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from vllm_metal.monitor import active_probe, daemon_checks, gpu_checks, host_checks, service_checks
from vllm_metal.monitor.finding import Finding
from vllm_metal.monitor.surroundings import Surroundings

Check = Callable[[Surroundings], Iterable[Finding]]

CHECKS: tuple[Check, ...] = (
    host_checks.python,
    host_checks.macos,
    service_checks.versions,
    service_checks.venv,
    host_checks.configuration,
    host_checks.device,
    gpu_checks.gpu,
    host_checks.memory,
    host_checks.wired_limit,
    host_checks.disk,
    gpu_checks.model,
    service_checks.service,
    daemon_checks.daemon,
    service_checks.model_folders,
    active_probe.under_load,
)

#: Those that give the server work.
PROBES: tuple[Check, ...] = (active_probe.under_load,)


def examine(surroundings: Surroundings, checks: Iterable[Check] = CHECKS) -> Iterator[Finding]:
    """What each check finds, as it finds it; one that fails costs only itself."""
    for check in checks:
        try:
            yield from check(surroundings)
        except Exception as exc:
            name = check.__name__.replace("_", " ")
            yield Finding(
                "warning",
                name,
                f"this check failed: {type(exc).__name__}: {exc}",
                why="what it looks at may be out of order, or the check itself",
                hint="report this as a bug of vllm-metal",
            )
