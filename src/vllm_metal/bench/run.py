"""Drives a load against a server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from vllm_metal.bench.client import StreamingClient, Target
from vllm_metal.bench.load import Load, Prompt
from vllm_metal.bench.record import RequestRecord


async def warm_up(load: Load, target: Target) -> None:
    """Send the requests that are not counted."""
    async with StreamingClient(target) as client:
        await _send(client, load.warmup_prompts(), load.max_concurrency, lambda _: None)


async def run(
    load: Load,
    target: Target,
    records: list[RequestRecord],
    on_finished: Callable[[], None] = lambda: None,
) -> None:
    """Append a record for each request that finishes, so that those of a cancelled run are kept."""

    def finish(record: RequestRecord) -> None:
        records.append(record)
        on_finished()

    async with StreamingClient(target) as client:
        await _send(client, load.prompts(), load.max_concurrency, finish)


async def _send(
    client: StreamingClient,
    prompts: Sequence[Prompt],
    max_concurrency: int | None,
    finish: Callable[[RequestRecord], None],
) -> None:
    slots = asyncio.Semaphore(max_concurrency or len(prompts) or 1)

    async def send(prompt: Prompt) -> None:
        async with slots:
            record = RequestRecord(prompt.max_tokens)
            await client.stream(prompt, record)
        finish(record)

    now = asyncio.get_running_loop().time
    begin_s = now()
    async with asyncio.TaskGroup() as group:
        for prompt in prompts:
            if (wait_s := begin_s + prompt.send_at_s - now()) > 0:
                await asyncio.sleep(wait_s)
            group.create_task(send(prompt))
