"""From layers' names in PEFT's files, which are those of transformers' model, to their paths in mlx-lm's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

#: A layer of the text model, wherever that lies in a larger one; vision towers have layers, too.
_LAYER = re.compile(r"(?:(?:model|language_model|text_model|transformer)\.)*(\w+\.\d+\..+)")


def paths_in(model: Any, shapes: Mapping[str, tuple[int, int]]) -> dict[str, str | None]:
    """The paths of layers whose names and shapes of weights are given.

    None where the model changes weights as it takes them in, so that what is added to them would be wrong. A
    name that means nothing to the model is given back as it is.
    """
    modules = {path for path, _ in model.named_modules()}
    paths: dict[str, str | None] = {name: _path(name, modules) for name in shapes}
    ones = {f"{path}.weight": _filled(1.0, shapes[name]) for name, path in paths.items() if path in modules}
    weights = _taken_in(model, ones)
    for name, path in paths.items():
        weight = f"{path}.weight"
        if weight in ones and not (weight in weights and _is_ones(weights[weight], shapes[name])):
            paths[name] = None
    return paths


def _path(name: str, modules: set[str]) -> str:
    if name not in modules and (layer := _LAYER.fullmatch(name)):
        alike = [path for path in modules if f".{path}".endswith(f".{layer[1]}")]
        if len(alike) == 1:
            return alike[0]
    return name


def _taken_in(model: Any, weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """What a model of this kind makes of a file with `weights`, and zeros for all the others."""
    zeros = {}
    for key, array in tree_flatten(model.parameters()):
        # Transformers keeps the last two axes of convolutions the other way round.
        is_convolution = array.ndim == 3 and "conv" in key
        zeros[key] = _filled(0.0, array.swapaxes(1, 2).shape if is_convolution else array.shape)
    # Not the model itself, which may change by what it takes in. The other's weights are never computed.
    with suppress(Exception):
        taken_in: dict[str, mx.array] = type(model)(model.args).sanitize(zeros | weights)
        return taken_in
    return weights


def _filled(value: float, shape: tuple[int, ...]) -> mx.array:
    return mx.broadcast_to(mx.array(value), shape)


def _is_ones(array: mx.array, shape: tuple[int, ...]) -> bool:
    # What a model changes is a whole tensor or its rows.
    return array.shape == shape and bool((array[:, 0] == 1).all())
