"""`metal serve`: the daemon, in the foreground."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
from typer.models import OptionInfo

from vllm_metal.cli import printer
from vllm_metal.errors import ConfigError, MetalError
from vllm_metal.settings import SETTINGS

logger = logging.getLogger(__name__)

# For closing, beyond what draining takes and after a second Ctrl-C.
_CLOSING_S = 2.0


def _option(key: str) -> OptionInfo:
    """The option of a setting: what the setting says of itself."""
    setting = SETTINGS[key]
    many = "; may be repeated" if setting.kind in (tuple, dict) else ""
    option: OptionInfo = typer.Option(
        help=f"{setting.doc}{many}.",
        metavar="NAME=PATH" if setting.kind is dict else None,
        rich_help_panel=setting.section.title(),
    )
    return option


#: The setting that each parameter of `serve` is for.
SETTING_OF = {each.option.lstrip("-").replace("-", "_").lower(): key for key, each in SETTINGS.items()}


def serve(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            help="`org/name\\[@revision]`, a folder, a `.gguf` file, or a short name as `metal list --known` "
            "shows them; else the configured one.",
        ),
    ] = None,
    host: Annotated[str | None, _option("server.host")] = None,
    port: Annotated[int | None, _option("server.port")] = None,
    api_key: Annotated[list[str] | None, _option("server.api_keys")] = None,
    uds: Annotated[str | None, _option("server.uds")] = None,
    ssl_certfile: Annotated[str | None, _option("server.ssl_certfile")] = None,
    ssl_keyfile: Annotated[str | None, _option("server.ssl_keyfile")] = None,
    ssl_ca_certs: Annotated[str | None, _option("server.ssl_ca_certs")] = None,
    ssl_cert_reqs: Annotated[int | None, _option("server.ssl_cert_reqs")] = None,
    served_model_name: Annotated[list[str] | None, _option("models.served_names")] = None,
    revision: Annotated[str | None, _option("models.revision")] = None,
    tokenizer: Annotated[str | None, _option("models.tokenizer")] = None,
    chat_template: Annotated[str | None, _option("models.chat_template")] = None,
    tool_call_parser: Annotated[str | None, _option("models.tool_call_parser")] = None,
    reasoning_parser: Annotated[str | None, _option("models.reasoning_parser")] = None,
    _enable_auto_tool_choice: Annotated[
        bool,
        typer.Option(
            "--enable-auto-tool-choice", help="Nothing: vLLM asks for it, and here it is always on."
        ),
    ] = False,
    _enable_lora: Annotated[
        bool, typer.Option("--enable-lora", help="Nothing: vLLM asks for it, and here adapters need no more.")
    ] = False,
    lora_modules: Annotated[list[str] | None, _option("models.adapters")] = None,
    dtype: Annotated[str | None, _option("engine.dtype")] = None,
    device: Annotated[str | None, _option("engine.device")] = None,
    max_model_len: Annotated[int | None, _option("engine.max_model_len")] = None,
    max_output_tokens: Annotated[int | None, _option("engine.max_output_tokens")] = None,
    max_num_seqs: Annotated[int | None, _option("engine.max_num_seqs")] = None,
    max_num_batched_tokens: Annotated[int | None, _option("engine.max_num_batched_tokens")] = None,
    gpu_memory_utilization: Annotated[float | None, _option("engine.gpu_memory_utilization")] = None,
    seed: Annotated[int | None, _option("engine.seed")] = None,
    log_level: Annotated[str | None, _option("log.level")] = None,
    config: Annotated[Path | None, typer.Option(metavar="PATH", help="Read this configuration file.")] = None,
) -> None:
    """Serve a model on http://localhost:8000 with OpenAI's API.

    Every option is also a key of the configuration file; see `metal config show`.
    """
    given = locals()
    flags = {key: given[parameter] for parameter, key in SETTING_OF.items() if parameter in given}
    from vllm_metal.service import launchd

    if launchd.is_parent():
        launchd.truncate_stdio()
    try:
        exit_code = _run(config, flags)
    except MetalError as exc:
        if not launchd.is_parent():
            raise
        launchd.write_reason(exc)
        # Before logging was set up there is standard error alone.
        if logging.root.handlers:
            logger.error("%s", exc.message)
        if not isinstance(exc, ConfigError):
            raise
        # Exit 0, or launchd would start us again every few seconds with the same result.
        printer.error(exc)
        exit_code = 0
    raise typer.Exit(exit_code)


def _run(path: Path | None, flags: Mapping[str, object]) -> int:
    from vllm_metal import config as configuration
    from vllm_metal import log
    from vllm_metal.service import launchd, open_files

    config = configuration.load(path=path, flags=flags)
    log.setup(config.log.level, config.log.file or (str(launchd.log_file()) if launchd.is_parent() else ""))
    open_files.raise_limit()

    import asyncio

    from vllm_metal.cli.progress import pull_progress
    from vllm_metal.server import run
    from vllm_metal.server.model_manager import ModelManager

    async def main() -> int:
        manager = ModelManager(config, persistent=launchd.is_parent(), show_progress=pull_progress)

        def listening(urls: list[str]) -> None:
            if launchd.is_parent():
                launchd.clear_reason()
            printer.note(f"listening on {' and '.join(urls)}")

        def say_ready(urls: list[str]) -> None:
            path = "" if config.server.uds else "/v1"
            printer.note(f"serving `{manager.roster.served_names[0]}` on {urls[0]}{path}")

        def bound_stopping(exit_code: int) -> None:
            drain_s = config.server.drain_timeout if exit_code == run.STOPPED else 0.0
            _exit_within(drain_s + _CLOSING_S, exit_code)

        return await run.serve(
            config, manager, on_listening=listening, on_ready=say_ready, on_stopping=bound_stopping
        )

    return asyncio.run(main())


def _exit_within(seconds: float, exit_code: int) -> None:
    """Nothing may hold up the end for longer: neither a load nor a download can be told to stop."""
    timer = threading.Timer(seconds, os._exit, (exit_code,))
    timer.daemon = True
    timer.start()
