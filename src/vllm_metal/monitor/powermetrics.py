"""Reads what `powermetrics` prints, as text or as property lists, sample by sample as it comes."""

from __future__ import annotations

import plistlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

from vllm_metal.monitor import quantity
from vllm_metal.monitor.reading import FrequencyShare, GpuReading, StateShare

SOURCE = "powermetrics"

# Far above any sample: what is longer is something else, and must not fill the memory.
_MOST_BYTES = 8 * 2**20
# What may stand before a document: NULs part them, and a file may begin with a byte order mark.
_PADDING = b"\0 \t\r\n\xef\xbb\xbf"


def readings(chunks: Iterable[bytes]) -> Iterator[GpuReading]:
    """Each sample of a stream as soon as it is whole, wherever the stream is cut.

    What is malformed, in another language or unknown leaves its field empty; a sample that tells nothing of
    the GPU is left out.
    """
    stream = iter(chunks)
    start = b""
    while not start and (chunk := next(stream, None)) is not None:
        start = chunk.lstrip(_PADDING)
    samples = _plist_samples if start.startswith(b"<") else _text_samples
    return samples(chain([start], stream))


# Text

_NUMBER = r"(\d{1,12}\.?\d{0,12}|\.\d{1,12})"
_SHARE = rf"\s*{_NUMBER}%\s*"
_FREQUENCY_SHARE = re.compile(rf"{_NUMBER} (\w*Hz)\s*:{_SHARE}")
_STATE_SHARE = re.compile(rf"(\w+)\s*:{_SHARE}")
_HEADER = "*** Sampled system activity"
_ELAPSED = re.compile(rf"\({_NUMBER}ms elapsed\)")
_QUANTITY = re.compile(rf"{_NUMBER}\s*(\S+)")
_RESIDENCY = re.compile(rf"{_NUMBER}%\s*(\(.*)?")


def _text_samples(chunks: Iterable[bytes]) -> Iterator[GpuReading]:
    machine: str | None = None
    sample: dict[str, Any] = {}
    for line in _lines(chunks):
        label, value = (part.strip() for part in line.partition(":")[::2])
        if label.startswith(_HEADER):
            yield from _reading(sample, machine)
            elapsed = _ELAPSED.search(line)
            sample = {"elapsed_s": float(elapsed[1]) / 1000} if elapsed else {}
        elif label == "Machine model":
            machine = _word(value)
        elif label in _TEXT_FIELDS:
            # The processor's section has a "GPU Power" as well, but stands before the GPU's.
            is_last = label == "GPU Power" and not sample.keys().isdisjoint(_GPU_FIELDS)
            sample |= _TEXT_FIELDS[label](value)
            if is_last:
                yield from _reading(sample, machine)
                sample = {}
    yield from _reading(sample, machine)


def _reading(sample: dict[str, Any], machine: str | None) -> Iterator[GpuReading]:
    idle_ratio = sample.pop("idle_ratio", None)
    sample.setdefault("active_ratio", quantity.idle_to_active(idle_ratio))
    reading = GpuReading(source=SOURCE, machine=machine, **sample)
    if any(getattr(reading, name) is not None for name in _TELLING_FIELDS):
        yield reading


_GPU_FIELDS = ("active_ratio", "active_frequency_mhz", "idle_ratio")
_TELLING_FIELDS = ("active_ratio", "active_frequency_mhz", "power_mw")


def _residency(text: str) -> dict[str, Any]:
    if not (parts := _RESIDENCY.fullmatch(text)):
        return {}
    known = _field("active_ratio", quantity.ratio(float(parts[1]) / 100))
    return known | _frequencies("frequencies")(parts[2] or "")


def _idle(text: str) -> dict[str, Any]:
    parts = _RESIDENCY.fullmatch(text)
    return _field("idle_ratio", quantity.ratio(float(parts[1]) / 100)) if parts else {}


def _amount(name: str, convert: Callable[[float, str], float | None]) -> Callable[[str], dict[str, Any]]:
    def read(text: str) -> dict[str, Any]:
        parts = _QUANTITY.fullmatch(text)
        return _field(name, convert(float(parts[1]), parts[2])) if parts else {}

    return read


def _frequencies(name: str) -> Callable[[str], dict[str, Any]]:
    def read(text: str) -> dict[str, Any]:
        shares = []
        for amount, unit, percent in _listed(_FREQUENCY_SHARE, text):
            mhz, ratio = quantity.frequency_mhz(float(amount), unit), quantity.ratio(float(percent) / 100)
            if mhz is None or ratio is None:
                return {}
            shares.append(FrequencyShare(mhz, ratio))
        return {name: tuple(shares)}

    return read


def _states(name: str) -> Callable[[str], dict[str, Any]]:
    def read(text: str) -> dict[str, Any]:
        shares = []
        for state, percent in _listed(_STATE_SHARE, text):
            if (ratio := quantity.ratio(float(percent) / 100)) is None:
                return {}
            shares.append(StateShare(state, ratio))
        return {name: tuple(shares)}

    return read


def _listed(item: re.Pattern[str], text: str) -> list[tuple[str, ...]]:
    """The items of `(item item …)`: all, or none where the list is cut off or holds something else."""
    if not (text.startswith("(") and text.endswith(")")):
        return []
    inner, items, position = text[1:-1].strip(), [], 0
    while position < len(inner):
        if not (found := item.match(inner, position)):
            return []
        items.append(found.groups())
        position = found.end()
    return items


def _pressure(text: str) -> dict[str, Any]:
    return _field("thermal_pressure", _word(text))


def _field(name: str, value: object) -> dict[str, Any]:
    return {} if value is None else {name: value}


#: Macs before macOS 14 have no "HW" and "SW" in their labels.
_TEXT_FIELDS: Mapping[str, Callable[[str], dict[str, Any]]] = {
    "GPU HW active frequency": _amount("active_frequency_mhz", quantity.frequency_mhz),
    "GPU active frequency": _amount("active_frequency_mhz", quantity.frequency_mhz),
    "GPU HW active residency": _residency,
    "GPU active residency": _residency,
    "GPU idle residency": _idle,
    "GPU requested frequency": _frequencies("requested_frequencies"),
    "GPU SW requested state": _states("requested"),
    "GPU SW state": _states("granted"),
    "GPU Power": _amount("power_mw", quantity.power_mw),
    "Combined Power (CPU + GPU + ANE)": _amount("combined_power_mw", quantity.power_mw),
    "Current pressure level": _pressure,
}


def _lines(chunks: Iterable[bytes]) -> Iterator[str]:
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        yield from (line.decode(errors="replace") for line in lines)
        rest = rest if len(rest) < _MOST_BYTES else b""
    yield rest.decode(errors="replace")


# Property lists


def _plist_samples(chunks: Iterable[bytes]) -> Iterator[GpuReading]:
    for document in _documents(chunks):
        try:
            sample = plistlib.loads(document, fmt=plistlib.FMT_XML)
        # plistlib lets through whatever its parts raise, from ExpatError to AttributeError.
        except Exception:
            continue
        if isinstance(sample, dict) and isinstance(gpu := sample.get("gpu"), dict):
            yield from _plist_reading(sample, gpu)


def _documents(chunks: Iterable[bytes]) -> Iterator[bytes]:
    end = b"</plist>"
    rest = b""
    for chunk in chunks:
        *documents, rest = (rest + chunk).split(end)
        yield from (document.lstrip(_PADDING) + end for document in documents)
        rest = rest if len(rest) < _MOST_BYTES else b""


def _plist_reading(sample: Mapping[str, Any], gpu: Mapping[str, Any]) -> Iterator[GpuReading]:
    elapsed_s = _seconds(sample.get("elapsed_ns"))
    processor = sample.get("processor")
    processor = processor if isinstance(processor, dict) else {}
    idle_ratio = quantity.ratio(gpu.get("idle_ratio"))
    if idle_ratio is None and elapsed_s and (idle_s := _seconds(gpu.get("idle_ns"))) is not None:
        idle_ratio = quantity.ratio(idle_s / elapsed_s)
    fields = {
        "active_ratio": quantity.idle_to_active(idle_ratio),
        "active_frequency_mhz": quantity.bare_frequency_mhz(gpu.get("freq_hz")),
        "frequencies": _plist_frequencies(gpu.get("dvfm_states")),
        "requested_frequencies": _plist_frequencies(gpu.get("requested_freq")),
        "requested": _plist_states(gpu.get("sw_requested_state"), "sw_req_state"),
        "granted": _plist_states(gpu.get("sw_state"), "sw_state"),
        "power_mw": _plist_power_mw(processor, gpu, elapsed_s),
        "combined_power_mw": quantity.number(processor.get("combined_power")),
        "thermal_pressure": _word(sample.get("thermal_pressure")),
        "elapsed_s": elapsed_s,
    }
    return _reading(fields, _word(sample.get("hw_model")))


def _plist_power_mw(
    processor: Mapping[str, Any], gpu: Mapping[str, Any], elapsed_s: float | None
) -> float | None:
    if (power_mw := quantity.number(processor.get("gpu_power"))) is not None:
        return power_mw
    # An energy is mJ over the sample.
    energy_mj = quantity.number(gpu.get("gpu_energy"))
    return energy_mj / elapsed_s if energy_mj is not None and elapsed_s else None


def _plist_frequencies(states: object) -> tuple[FrequencyShare, ...]:
    shares = (
        (quantity.bare_frequency_mhz(each.get("freq")), quantity.ratio(each.get("used_ratio")))
        for each in _dicts(states)
    )
    return tuple(FrequencyShare(mhz, ratio) for mhz, ratio in shares if mhz is not None and ratio is not None)


def _plist_states(states: object, key: str) -> tuple[StateShare, ...]:
    shares = ((_word(each.get(key)), quantity.ratio(each.get("used_ratio"))) for each in _dicts(states))
    return tuple(StateShare(name, ratio) for name, ratio in shares if name is not None and ratio is not None)


def _dicts(value: object) -> list[dict[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _seconds(nanoseconds: object) -> float | None:
    amount = quantity.number(nanoseconds)
    return None if amount is None else amount / 1e9


def _word(value: object) -> str | None:
    """A name such as `Mac16,6`, `SW_P2` or `Nominal`; it is shown on terminals, so nothing else."""
    return value if isinstance(value, str) and re.fullmatch(r"[\w,]{1,40}", value, re.ASCII) else None
