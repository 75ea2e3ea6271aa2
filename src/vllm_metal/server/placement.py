"""Which loaded models give way to one that waits. Decides; does nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vllm_metal.engine.memory_budget import MemoryBudget, ModelNeed
from vllm_metal.server.resident_model import ResidentModel


def make_room(
    wanting: ResidentModel, loaded: Sequence[ResidentModel], budget: MemoryBudget, now: float
) -> list[ResidentModel]:
    """Those that must go before `wanting` can be loaded, none of them pinned.

    Raises InsufficientMemory where not even all of them are enough.
    """
    pinned = [model for model in loaded if model.is_pinned]
    budget.require(wanting.name, needs([wanting])[0], needs(pinned))
    staying, going = list(loaded), list[ResidentModel]()
    for model in sorted(
        (model for model in loaded if not model.is_pinned), key=lambda model: _rank(model, now)
    ):
        if budget.fits(needs([*staying, wanting])):
            break
        staying.remove(model)
        going.append(model)
    # A large one that had to go may have made room for small ones before it.
    for model in reversed(going[:-1]):
        if budget.fits(needs([*staying, model, wanting])):
            staying.append(model)
            going.remove(model)
    return going


def needs(models: Iterable[ResidentModel]) -> list[ModelNeed]:
    """Of models that are measured."""
    return [model.need for model in models if model.need is not None]


def _rank(model: ResidentModel, now: float) -> tuple[float, bool, float]:
    """First those that may go now: idle ones, the least recently used before others, then busy ones, the
    longest loaded before others. Then those that may go soonest.
    """
    is_busy = model.num_users > 0
    return max(model.may_give_way_at, now), is_busy, model.loaded_at if is_busy else model.last_used_at
