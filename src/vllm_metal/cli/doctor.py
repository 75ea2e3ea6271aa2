"""`metal doctor`: what keeps this machine from serving models well."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vllm_metal.cli import printer

if TYPE_CHECKING:
    from vllm_metal.monitor.finding import Finding


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    probe: Annotated[
        bool, typer.Option("--probe/--no-probe", help="Have the server generate for a few seconds.")
    ] = True,
    power: Annotated[
        bool,
        typer.Option("--power", help="Ask `sudo -n powermetrics` meanwhile for states, frequency and power."),
    ] = False,
    bundle: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a zip file for a bug report, without keys and prompts."),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="Configuration file to use.")] = None,
) -> None:
    """Check this machine, the configuration and the daemon.

    Exits with 1 if there is a problem.
    """
    from vllm_metal.monitor import doctor as checks
    from vllm_metal.monitor.surroundings import gather

    surroundings = gather(config, with_power=power)
    wanted = [check for check in checks.CHECKS if probe or check not in checks.PROBES]
    found = []
    for finding in checks.examine(surroundings, wanted):
        found.append(finding)
        if not as_json:
            _show(finding)
    if as_json:
        _print_json(found)
    elif counts := _counts(found):
        printer.note(f"\n{counts}")
    if bundle is not None:
        from vllm_metal.monitor import bundle as bundles

        bundles.write(bundle, surroundings, found)
        printer.note(f"wrote `{bundle}`: look through it before you send it")
    if any(finding.level == "problem" for finding in found):
        raise typer.Exit(1)


def _show(finding: Finding) -> None:
    printer.out(f"{finding.level:<9}{finding.subject:<18}{finding.message}")
    if finding.why:
        printer.out(f"{'':27}{finding.why}")
    if finding.hint:
        printer.out(f"{'':27}hint: {finding.hint}")


def _print_json(found: list[Finding]) -> None:
    import dataclasses
    import json

    printer.out(json.dumps([dataclasses.asdict(finding) for finding in found], indent=2))


def _counts(found: list[Finding]) -> str:
    levels = [finding.level for finding in found]
    counts = {"problem": levels.count("problem"), "warning": levels.count("warning")}
    return ", ".join(f"{count} {name}{'s' * (count > 1)}" for name, count in counts.items() if count)
