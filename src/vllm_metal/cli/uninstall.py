"""`metal uninstall`: the way back. Standard library only, as it must run without a venv."""

from __future__ import annotations

import argparse
from pathlib import Path

from vllm_metal import paths
from vllm_metal.cli import consent, printer
from vllm_metal.hub import shared_cache
from vllm_metal.hub.disk import format_bytes, used_bytes
from vllm_metal.service import launchd, uninstall, venv
from vllm_metal.service.uninstall import Plan

HELP = "Remove the service, the venv, caches and logs, and tell what stays."


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--purge", action="store_true", help="Remove the configuration and models too.")
    parser.add_argument("-y", "--yes", action="store_true", help="Do not ask.")


def run(arguments: argparse.Namespace) -> None:
    plan = uninstall.plan(purge=arguments.purge)
    _tell(plan)
    if not plan.is_empty:
        if not (arguments.yes or consent.agrees("metal uninstall")):
            printer.note("nothing was removed")
            return
        uninstall.carry_out(plan, lambda: printer.note("waiting for `metal setup` to end"))
        printer.note("removed")
    printer.note("`brew uninstall vllm-metal` removes the program itself, if Homebrew installed it")


def _tell(plan: Plan) -> None:
    printer.note("nothing is there to remove" if plan.is_empty else "to be removed:")
    if plan.has_service:
        printer.note(f"  the service `{launchd.LABEL}`")
    if plan.has_venv:
        printer.note(f"  {paths.venv()}  {_size(*venv.contents(paths.venv()))}")
    for path in plan.removed:
        printer.note(f"  {path}  {_size(path)}")
    models = shared_cache.models()
    if plan.kept or models:
        printer.note("to be left:")
    for kept in plan.kept:
        printer.note(f"  {kept.path}  {_size(kept.path)}: {kept.reason}")
    if models:
        printer.note(f"  {shared_cache.folder()}: other programs may use its models")
    for name, folder in models.items():
        printer.note(f"    {name}  {_size(folder)}")


def _size(*parts: Path) -> str:
    return format_bytes(sum(map(used_bytes, parts)))
