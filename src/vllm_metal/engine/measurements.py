"""How long requests wait and run, and how large they and the steps are. On the engine thread."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from vllm_metal.engine.histogram import Distribution, Histogram
from vllm_metal.engine.outputs import FinishReason
from vllm_metal.engine.request import Request

_FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0),
    *(80.0, 160.0, 640.0, 2560.0),
)
_TOKEN_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0),
    80.0,
)
_REQUEST_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0),
    *(960.0, 1920.0, 7680.0),
)
_REQUEST_TOKENS = tuple(digit * 10.0**exponent for exponent in range(8) for digit in (1, 2, 5))
_STEP_TOKENS = tuple(2.0**exponent for exponent in (0, *range(3, 15)))

#: The names and bounds that vLLM gives them.
BOUNDS: Mapping[str, tuple[float, ...]] = {
    "time_to_first_token_seconds": _FIRST_TOKEN_S,
    "inter_token_latency_seconds": _TOKEN_S,
    "request_time_per_output_token_seconds": _TOKEN_S,
    "e2e_request_latency_seconds": _REQUEST_S,
    "request_queue_time_seconds": _REQUEST_S,
    "request_prefill_time_seconds": _REQUEST_S,
    "request_decode_time_seconds": _REQUEST_S,
    "request_prompt_tokens": _REQUEST_TOKENS,
    "request_generation_tokens": _REQUEST_TOKENS,
    "iteration_tokens_total": _STEP_TOKENS,
}


class Measurements:
    """Times are `time.perf_counter`'s. `finished` counts requests; `busy_s` is what steps took in all.

    Of a request that is given up, what counts are the tokens that it got, and that it ended.
    """

    def __init__(self) -> None:
        self.finished = dict.fromkeys(FinishReason, 0)
        self.busy_s = 0.0
        self._histograms = {name: Histogram(bounds) for name, bounds in BOUNDS.items()}

    def started(self, requests: Iterable[Request], now_s: float) -> None:
        """`requests` are in a step that is launched: some for the first time."""
        for request in requests:
            if request.started_s is None:
                request.started_s = now_s

    def stepped(self, num_tokens: int, duration_s: float) -> None:
        self.busy_s += duration_s
        self._histograms["iteration_tokens_total"].observe(num_tokens)

    def got_token(self, request: Request, now_s: float) -> None:
        if request.first_token_s is None:
            request.first_token_s = now_s
            self._histograms["time_to_first_token_seconds"].observe(now_s - request.arrived_s)
        else:
            self._histograms["inter_token_latency_seconds"].observe(now_s - request.last_token_s)
        request.last_token_s = now_s

    def ended(self, request: Request, reason: FinishReason) -> None:
        self.finished[reason] += 1
        first_s, last_s, started_s = request.first_token_s, request.last_token_s, request.started_s
        if reason not in (FinishReason.STOP, FinishReason.LENGTH) or first_s is None or started_s is None:
            return
        num_gaps = max(1, request.num_output_tokens - 1)
        for name, value in (
            ("request_time_per_output_token_seconds", (last_s - first_s) / num_gaps),
            ("e2e_request_latency_seconds", last_s - request.arrived_s),
            ("request_queue_time_seconds", started_s - request.arrived_s),
            ("request_prefill_time_seconds", first_s - started_s),
            ("request_decode_time_seconds", last_s - first_s),
            ("request_prompt_tokens", request.num_prompt_tokens),
            ("request_generation_tokens", request.num_output_tokens),
        ):
            self._histograms[name].observe(value)

    def distributions(self) -> dict[str, Distribution]:
        return {name: histogram.distribution() for name, histogram in self._histograms.items()}
