"""Takes the blocks of GGUF's quantized types apart: codes, and a scale and a bias for each group of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources

import mlx.core as mx


@dataclass(frozen=True, slots=True)
class Groups:
    """A weight is `scale * code + bias`. Codes are uint8 [N, group size], the others float32 [N, 1]."""

    codes: mx.array
    scales: mx.array
    biases: mx.array


@dataclass(frozen=True, slots=True)
class BlockType:
    """`bits` are those that MLX holds a weight in; `is_exact` if its groups of 32 can hold the very codes.

    The others are quantized again, with two bits more than they have: a quarter of their own step, which adds
    three percent to the error that they come with.
    """

    decode: Callable[[mx.array], Groups]
    bits: int
    is_exact: bool = True


def _q4_0(blocks: mx.array) -> Groups:
    scales = _halves(blocks[:, :2])
    return _groups(_fields(blocks[:, 2:], 4, run=16), scales, -8 * scales)


def _q4_1(blocks: mx.array) -> Groups:
    return _groups(_fields(blocks[:, 4:], 4, run=16), _halves(blocks[:, :2]), _halves(blocks[:, 2:4]))


def _q5_0(blocks: mx.array) -> Groups:
    scales = _halves(blocks[:, :2])
    codes = _fields(blocks[:, 6:], 4, run=16) | (_fields(blocks[:, 2:6], 1, run=1) << 4)
    return _groups(codes, scales, -16 * scales)


def _q5_1(blocks: mx.array) -> Groups:
    codes = _fields(blocks[:, 8:], 4, run=16) | (_fields(blocks[:, 4:8], 1, run=1) << 4)
    return _groups(codes, _halves(blocks[:, :2]), _halves(blocks[:, 2:4]))


def _q8_0(blocks: mx.array) -> Groups:
    scales = _halves(blocks[:, :2])
    # int8 becomes uint8 with an offset of 128.
    return _groups(blocks[:, 2:] ^ 0x80, scales, -128 * scales)


def _q2_k(blocks: mx.array) -> Groups:
    factors = blocks[:, :16]
    scales = _halves(blocks[:, 80:82]) * (factors & 0x0F)
    minima = _halves(blocks[:, 82:84]) * (factors >> 4)
    return _groups(_fields(blocks[:, 16:80], 2, run=32), scales, -minima)


def _q3_k(blocks: mx.array) -> Groups:
    factors = _fields(blocks[:, 96:104], 4, run=8) | (_fields(blocks[:, 104:108], 2, run=4) << 4)
    scales = _halves(blocks[:, 108:110]) * (factors.astype(mx.float32) - 32)
    codes = _fields(blocks[:, 32:96], 2, run=32) | (_fields(blocks[:, :32], 1, run=32) << 2)
    return _groups(codes, scales, -4 * scales)


def _q4_k(blocks: mx.array) -> Groups:
    return _groups(_fields(blocks[:, 16:], 4, run=32), *_scales_and_biases(blocks))


def _q5_k(blocks: mx.array) -> Groups:
    codes = _fields(blocks[:, 48:], 4, run=32) | (_fields(blocks[:, 16:48], 1, run=32) << 4)
    return _groups(codes, *_scales_and_biases(blocks))


def _scales_and_biases(blocks: mx.array) -> tuple[mx.array, mx.array]:
    """Of Q4_K and Q5_K, whose factors have 6 bits: eight for the scales, eight for the minima."""
    first, second, rest = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = mx.concatenate([first & 0x3F, (rest & 0x0F) | ((first >> 6) << 4)], axis=1)
    minima = mx.concatenate([second & 0x3F, (rest >> 4) | ((second >> 6) << 4)], axis=1)
    return _halves(blocks[:, :2]) * scales, -_halves(blocks[:, 2:4]) * minima


def _q6_k(blocks: mx.array) -> Groups:
    codes = _fields(blocks[:, :128], 4, run=64) | (_fields(blocks[:, 128:192], 2, run=32) << 4)
    scales = _halves(blocks[:, 208:210]) * blocks[:, 192:208].view(mx.int8)
    return _groups(codes, scales, -32 * scales)


_IQ4_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def _iq4(codes: mx.array, scales: mx.array) -> Groups:
    lowest = _IQ4_LEVELS[0]
    return _groups(
        mx.array([level - lowest for level in _IQ4_LEVELS], mx.uint8)[codes], scales, lowest * scales
    )


def _iq4_nl(blocks: mx.array) -> Groups:
    return _iq4(_fields(blocks[:, 2:], 4, run=16), _halves(blocks[:, :2]))


def _iq4_xs(blocks: mx.array) -> Groups:
    factors = _fields(blocks[:, 4:8], 4, run=1) | (_fields(blocks[:, 2:4], 2, run=1) << 4)
    return _iq4(_fields(blocks[:, 8:], 4, run=16), _halves(blocks[:, :2]) * (factors.astype(mx.float32) - 32))


def _iq3_xxs(blocks: mx.array) -> Groups:
    words = blocks[:, 66:].view(mx.uint32)
    magnitudes = _codebook("iq3_xxs")[blocks[:, 2:66]]
    scales = _halves(blocks[:, :2]) * (0.25 + 0.5 * (words >> 28))
    # The magnitudes are 4, 12, 20 and so on; the last of them is 62, which takes the place of 60 here.
    return _signed(magnitudes, _packed_signs(words), levels=8, step=8 * scales)


def _iq3_s(blocks: mx.array) -> Groups:
    indices = _with_high_bits(blocks[:, 2:66], _fields(blocks[:, 66:74], 1, run=1))
    factors = _fields(blocks[:, 106:110], 4, run=1).astype(mx.float32)
    scales = _halves(blocks[:, :2]) * (1 + 2 * factors)
    signs = _fields(blocks[:, 74:106], 1, run=1)
    return _signed(_codebook("iq3_s")[indices], signs, levels=8, step=2 * scales)


# The magnitudes of the two-bit types are 8, 25 and 43: within 3 % of 8.6, 25.8 and 43.
_IQ2_STEP = 17.2


def _iq2_xxs(blocks: mx.array) -> Groups:
    parts = blocks[:, 2:].reshape(-1, 8, 8)
    words = parts[..., 4:].view(mx.uint32).squeeze(-1)
    scales = _halves(blocks[:, :2]) * (0.125 + 0.25 * (words >> 28))
    magnitudes = _codebook("iq2_xxs")[parts[..., :4]]
    return _signed(magnitudes, _packed_signs(words), levels=3, step=_IQ2_STEP * scales)


def _iq2_xs(blocks: mx.array) -> Groups:
    words = blocks[:, 2:66].view(mx.uint16)
    scales = _iq2_scales(blocks, blocks[:, 66:])
    return _signed(
        _codebook("iq2_xs")[words & 511], _with_parity(words >> 9), levels=3, step=_IQ2_STEP * scales
    )


def _iq2_s(blocks: mx.array) -> Groups:
    indices = _with_high_bits(blocks[:, 2:34], _fields(blocks[:, 66:74], 2, run=1))
    scales = _iq2_scales(blocks, blocks[:, 74:])
    signs = _fields(blocks[:, 34:66], 1, run=1)
    return _signed(_codebook("iq2_s")[indices], signs, levels=3, step=_IQ2_STEP * scales)


def _iq2_scales(blocks: mx.array, factors: mx.array) -> mx.array:
    return _halves(blocks[:, :2]) * (0.125 + 0.25 * _fields(factors, 4, run=1))


_IQ1_DELTA = 0.125


def _iq1_s(blocks: mx.array) -> Groups:
    words = blocks[:, 34:].view(mx.uint16)
    high_bits = (words[..., None] >> mx.array([0, 3, 6, 9], mx.uint16)) & 7
    scales = _halves(blocks[:, :2]) * (2 * ((words >> 12) & 7).astype(mx.float32) + 1)
    codes = _codebook("iq1")[_with_high_bits(blocks[:, 2:34], high_bits)]
    return _groups(codes, scales, scales * _iq1_offset(words >> 15))


def _iq1_m(blocks: mx.array) -> Groups:
    words = blocks[:, 48:].view(mx.uint16)
    nibbles = (words & 0xF000) >> mx.array([12, 8, 4, 0], mx.uint16)
    unit = _halves((nibbles[:, :1] | nibbles[:, 1:2] | nibbles[:, 2:3] | nibbles[:, 3:]).view(mx.uint8))
    factors = ((words[..., None] >> mx.array([0, 3, 6, 9], mx.uint16)) & 7).reshape(-1, 16)
    scales = mx.repeat(unit * (2 * factors.astype(mx.float32) + 1), 2, axis=1)
    high = _fields(blocks[:, 32:48], 4, run=1)
    codes = _codebook("iq1")[_with_high_bits(blocks[:, :32], high & 7)]
    return _groups(codes, scales, scales * _iq1_offset(high >> 3))


def _iq1_offset(is_below: mx.array) -> mx.array:
    return mx.where(is_below, -1 - _IQ1_DELTA, -1 + _IQ1_DELTA)


def _tq1_0(blocks: mx.array) -> Groups:
    """A byte is a fraction with five digits of base 3: multiplied by 3, the next one comes to the top."""
    digits = []
    for part, run, count in ((blocks[:, :32], 32, 5), (blocks[:, 32:48], 16, 5), (blocks[:, 48:52], 4, 4)):
        powers = mx.array([3**index for index in range(count)], mx.uint8)[:, None]
        digits.append((part.reshape(-1, 1, run) * powers).reshape(len(blocks), -1))
    codes = ((mx.concatenate(digits, axis=1).astype(mx.uint16) * 3) >> 8).astype(mx.uint8)
    return _ternary(codes, _halves(blocks[:, 52:]))


def _tq2_0(blocks: mx.array) -> Groups:
    return _ternary(_fields(blocks[:, :64], 2, run=32), _halves(blocks[:, 64:]))


def _ternary(codes: mx.array, scales: mx.array) -> Groups:
    scales = mx.repeat(scales, codes.shape[1] // 32, axis=1)
    return _groups(codes, scales, -scales)


def _mxfp4(blocks: mx.array) -> Groups:
    # Twice the values of a float with 4 bits, counted from the lowest.
    levels = mx.array([12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0], mx.uint8)
    scales = mx.power(2.0, blocks[:, :1].astype(mx.float32) - 128)
    return _groups(levels[_fields(blocks[:, 1:], 4, run=16)], scales, -12 * scales)


#: What the loader reads, by name. Sizes are in `hub.gguf_header`.
BLOCK_TYPES = {
    "Q4_0": BlockType(_q4_0, 4),
    "Q4_1": BlockType(_q4_1, 4),
    "Q5_0": BlockType(_q5_0, 5),
    "Q5_1": BlockType(_q5_1, 5),
    "Q8_0": BlockType(_q8_0, 8),
    "Q2_K": BlockType(_q2_k, 4, is_exact=False),
    "Q3_K": BlockType(_q3_k, 5, is_exact=False),
    "Q4_K": BlockType(_q4_k, 4),
    "Q5_K": BlockType(_q5_k, 5),
    "Q6_K": BlockType(_q6_k, 8, is_exact=False),
    "IQ1_S": BlockType(_iq1_s, 2),
    "IQ1_M": BlockType(_iq1_m, 4, is_exact=False),
    "IQ2_XXS": BlockType(_iq2_xxs, 3),
    "IQ2_XS": BlockType(_iq2_xs, 4, is_exact=False),
    "IQ2_S": BlockType(_iq2_s, 4, is_exact=False),
    "IQ3_XXS": BlockType(_iq3_xxs, 4),
    "IQ3_S": BlockType(_iq3_s, 4),
    "IQ4_NL": BlockType(_iq4_nl, 6, is_exact=False),
    "IQ4_XS": BlockType(_iq4_xs, 6, is_exact=False),
    "TQ1_0": BlockType(_tq1_0, 2),
    "TQ2_0": BlockType(_tq2_0, 2),
    "MXFP4": BlockType(_mxfp4, 5),
}


def _groups(codes: mx.array, scales: mx.array, biases: mx.array) -> Groups:
    return Groups(codes.reshape(scales.size, -1), scales.reshape(-1, 1), biases.reshape(-1, 1))


def _fields(packed: mx.array, width: int, *, run: int) -> mx.array:
    """uint8 [N, fields] of `width` bits, lowest first: of `run` bytes all first fields, all second ones, …"""
    shifts = mx.arange(0, 8, width, dtype=mx.uint8)[:, None]
    fields = (packed.reshape(len(packed), -1, 1, run) >> shifts) & ((1 << width) - 1)
    return fields.reshape(len(packed), -1)


def _halves(packed: mx.array) -> mx.array:
    return packed.view(mx.float16).astype(mx.float32)


def _with_high_bits(low: mx.array, high: mx.array) -> mx.array:
    return low.astype(mx.uint16) | (high.reshape(low.shape).astype(mx.uint16) << 8)


def _packed_signs(words: mx.array) -> mx.array:
    """Of 32 weights: four times 7 bits of a word."""
    return _with_parity((words[..., None] >> mx.array([0, 7, 14, 21], mx.uint32)) & 0x7F)


def _with_parity(sevens: mx.array) -> mx.array:
    """The signs of 8 weights: 7 bits, and one that makes the number of minuses even."""
    signs = (sevens[..., None] >> mx.arange(7, dtype=sevens.dtype)) & 1
    return mx.concatenate([signs, signs.sum(axis=-1, keepdims=True) & 1], axis=-1)


def _signed(magnitudes: mx.array, signs: mx.array, *, levels: int, step: mx.array) -> Groups:
    """Magnitude m, of 0 to `levels` - 1, stands for plus or minus m + ½ steps."""
    is_negative = signs.reshape(magnitudes.shape).astype(mx.bool_)
    codes = mx.where(is_negative, levels - 1 - magnitudes, levels + magnitudes)
    return _groups(codes, step, (0.5 - levels) * step)


def _codebook(name: str) -> mx.array:
    """uint8 [entries, weights]: which magnitude each weight of an entry has, lowest first."""
    with resources.as_file(resources.files(__package__) / "gguf_codebooks.safetensors") as path:
        codebooks: dict[str, mx.array] = mx.load(str(path))  # type: ignore[assignment]
        return codebooks[name]
