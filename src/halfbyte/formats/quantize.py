"""Quantization of a tensor: largest magnitudes, scales, then every element onto its grid.

    value = element(code) * block scale * tensor decode scale

`to_grid` is the arithmetic; `quantize` wraps its result as codes. All of it is integer views, products and additions,
so that it gives the same bits inside jit on a CPU, a Hopper GPU or any other XLA device (docs/numerics.md lists what
does not).

Non-finite input: an infinity saturates, a NaN becomes the largest code of its sign (E2M1 has nothing else), and the
tensor's amax keeps what it saw, so that nothing bad is hidden: `QTensor.finite` is one scalar, and a GEMM over a tensor
with a non-finite amax gives NaN.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .bits import MAGNITUDE, copy_sign, float32_bits, float_of_bits, magnitude_bits
from .blocks import BlockFormat
from .choices import to_nearest
from .elements import (
    E2M1,
    Element,
    Rounded,
    round_midpoint,
    round_stochastic_e2m1,
    with_sign,
)
from .noise import random_bytes
from .qtensor import QTensor, carried
from .scales import Blocks, BlockScales
from .shared_bits import warn_if_shared
from .views import BlockView

FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16)
ROUNDINGS = ("rne", "stochastic", "away", "midpoint")
BY_CHANCE = ("stochastic", "midpoint")  # of these: random bytes decide
RUN = 16


class OnGrid(NamedTuple):
    """A quantized tensor before it is stored; what nobody reads of it is not computed."""

    values: jax.Array  # float32 on the element's grid
    codes: jax.Array  # uint8
    scales: BlockScales
    amax: jax.Array  # float32, one number for the tensor, or one a block
    view: BlockView
    outer: str = "tensor"

    def carrier(self) -> jax.Array:
        """values * block scale as float32: at most 6 significant bits under NVFP4, so exact in bfloat16 as well. An
        outer scale that lies inside a GEMM's sum is part of it.
        """
        spread = self.view.spread(carried(self.scales.values, self.scales.tensor_decode, self.outer))
        # [shape] -> [view.shape] -> [shape]
        return (self.values.reshape(self.view.shape) * spread).reshape(self.values.shape)


def amax_of(x: jax.Array) -> jax.Array:
    """Largest magnitude as float32; keeps infinity and NaN, and sees subnormals on every device."""
    return float_of_bits(_largest(magnitude_bits(x), tuple(range(x.ndim))))


def outer_amax(x: jax.Array, fmt: BlockFormat, *, axis: int = -1) -> jax.Array:
    """The maxima that the outer scales of x are made of, under a format with more than one: float32, one a block."""
    view = fmt.view(x.shape, block="1d", axis=axis)
    largest = _largest(magnitude_bits(x).reshape(view.shape), view.shared)
    return float_of_bits(fmt.scale.amax_bits(largest, view))


def all_finite(x: jax.Array) -> jax.Array:
    """Whether every number of x is finite: one integer maximum over the tensor."""
    return _largest(magnitude_bits(x), tuple(range(x.ndim))) < jnp.uint32(0x7F80_0000)


def _largest(magnitude: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """Maximum over `axes`, in steps: one maximum over much of a tensor is several times slower in XLA on a CPU.

    Innermost runs of 16 first; the barrier keeps the compiler from making one step of all.
    """
    last = magnitude.ndim - 1
    if last in axes and len(axes) > 1 and magnitude.shape[last] % RUN == 0:
        # [..., n] -> [..., n / 16, 16]
        runs = magnitude.reshape(*magnitude.shape[:last], magnitude.shape[last] // RUN, RUN)
        magnitude = lax.optimization_barrier(jnp.max(runs, axis=-1))
    return lax.optimization_barrier(jnp.max(magnitude, axis=axes))


def to_grid(
    x: jax.Array, fmt: BlockFormat, *, block: str = "1d", axis: int = -1, noise: jax.Array | None = None,
    amax: jax.Array | None = None, rounding: str | None = None,
) -> OnGrid:  # fmt: skip
    """x on the grid of `fmt`: by `rounding`, or to nearest even, or stochastically if uint8 `noise` of x's shape is
    given.

    `amax` overrides the tensor's own (delayed scaling).
    """
    rounding = rounding or ("rne" if noise is None else "stochastic")
    assert fmt.element is not None
    view = fmt.view(x.shape, block=block, axis=axis)
    bits = float32_bits(x).reshape(view.shape)  # blocked axes split in two
    magnitude = bits & jnp.uint32(MAGNITUDE)
    largest = _largest(magnitude, view.shared)
    amax_bits = fmt.scale.amax_bits(largest, view) if amax is None else float32_bits(amax)
    scales = fmt.scale.find(Blocks(magnitude, largest, amax_bits, view, rounding), fmt.element)
    scaled = fmt.scale.scaled(magnitude, scales, view)
    rounded = _rounded(fmt.element, scaled, rounding, None if noise is None else noise.reshape(view.shape))
    scales = fmt.scale.settle(scales, scaled, rounded.value, view, noise)
    codes = with_sign(fmt.element, rounded.code, bits)
    values = copy_sign(rounded.value, bits)
    # [view.shape] -> [shape]
    values, codes = values.reshape(x.shape), codes.reshape(x.shape)
    return OnGrid(values, codes, scales, float_of_bits(amax_bits), view, fmt.scale.outer)


def _rounded(element: Element, scaled: jax.Array, rounding: str, noise: jax.Array | None) -> Rounded:
    """Magnitudes onto the element's grid."""
    if rounding not in BY_CHANCE:
        return to_nearest(element, scaled, rounding)
    assert noise is not None, f"rounding {rounding} needs random bytes"
    return round_midpoint(element, scaled, noise) if rounding == "midpoint" else round_stochastic_e2m1(scaled, noise)


def quantize(
    x: jax.Array, fmt: BlockFormat, *, block: str = "1d", rounding: str = "rne", key: jax.Array | None = None,
    axis: int = -1, amax: jax.Array | None = None,
) -> QTensor:  # fmt: skip
    """`x` in `fmt`, blocks along the last axis ("1d") or in square tiles of the last two ("2d").

    Rounds to nearest even, or with `rounding="stochastic"` (E2M1 formats) by random bytes drawn from `key`. Saturates.
    x is float32, bfloat16 or float16, with any leading dims. `axis=-2` blocks along the next to last axis instead: the
    columnwise operand of a token-major tensor, untransposed. One key for different tensors (under vmap or shard_map)
    is a SharedBitsWarning.
    """
    check_arguments(x, fmt, rounding=rounding, key=key)
    noise = None
    if key is not None and (rounding in BY_CHANCE or fmt.scale.stochastic):
        noise = random_bytes(warn_if_shared(key, x), x.shape)
    grid = to_grid(x, fmt, block=block, axis=axis, noise=noise, amax=amax, rounding=rounding)
    return store(grid, fmt, block=block, axis=axis)


def store(grid: OnGrid, fmt: BlockFormat, *, block: str, axis: int = -1) -> QTensor:
    """The QTensor of a tensor on its grid."""
    assert fmt.element is not None
    dtype = fmt.scale_dtype
    scales = None if dtype is None else lax.bitcast_convert_type(grid.scales.codes, dtype)
    return QTensor(grid.codes, scales, grid.amax, grid.scales.tensor_decode, fmt, block, axis)


def check_arguments(x: jax.Array, fmt: BlockFormat, *, rounding: str, key: jax.Array | None) -> None:
    """Raises where `quantize` cannot serve; shapes are checked where blocks are cut."""
    if not fmt.quantized:
        raise ValueError(
            f"{fmt.name} is not a quantized format; cast with astype, or choose one of NVFP4, MXFP4, MXFP8, FP8"
        )
    if x.dtype not in FLOATS:
        raise TypeError(f"quantize takes float32, bfloat16 or float16, got {x.dtype}; convert with astype first")
    if x.ndim == 0:
        raise ValueError("quantize needs at least one axis to block, got a scalar; reshape it to a vector")
    if rounding not in ROUNDINGS:
        raise ValueError(f"rounding must be one of {ROUNDINGS}, got {rounding!r}")
    if (rounding in BY_CHANCE or fmt.scale.stochastic) and key is None:
        raise ValueError(
            f'rounding="{rounding}" of {fmt.name} needs a key; pass key=jax.random.key(...), folded with step, layer '
            "and site"
        )
    if reason := unrounded(fmt, rounding):
        raise ValueError(
            f'{rounding} rounding is that of E2M1 formats (NVFP4, MXFP4), for {reason}; use rounding="rne"'
        )


def unrounded(fmt: BlockFormat, rounding: str) -> str | None:
    """What elements a rounding exists for, and which these are; None if these can be rounded so."""
    if rounding == "stochastic" and fmt.element != E2M1:
        return f"E2M1 elements only, got format {fmt.name}"
    if rounding in ("away", "midpoint") and (fmt.element is None or fmt.element.stored_bits != 4):
        return f"4-bit elements only, got format {fmt.name}"
    return None
