"""Defects that the field has met, planted in the operand that a GEMM reads. The detectors know nothing of them.

Each is a context: inside it, programs traced anew have the defect. They replace what the function that makes an operand
gets from the quantizer (codes, scales), or the key of a layer, and nothing that the detectors read.
"""

import contextlib
from unittest import mock

import jax
import jax.numpy as jnp

from halfbyte.formats import E2M1, NVFP4
from halfbyte.models import context
from halfbyte.ops import operand, passes

GRID = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@contextlib.contextmanager
def planted(change):
    """`change(grid, x, policy, noise)` of every NVFP4 operand on its grid, wherever operands are made."""
    make, quantize = operand.quantize_operand, operand.to_grid
    now = []

    def made(x, policy, *, axis, key, **placed):
        now.append(policy)
        try:
            return make(x, policy, axis=axis, key=key, **placed)
        finally:
            now.pop()

    def on_grid(x, fmt, *, block="1d", axis=-1, noise=None, amax=None):
        grid = quantize(x, fmt, block=block, axis=axis, noise=noise, amax=amax)
        return change(grid, x, now[-1], noise) if fmt == NVFP4 else grid

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(operand, "to_grid", on_grid))
        for module in (operand, passes):
            stack.enter_context(mock.patch.object(module, "quantize_operand", made))
        yield


def gain_088():
    """Weight gradients 12% too small: torchao's column scales, blocked across experts."""

    def change(grid, x, policy, noise):
        factor = 0.88 if policy.hadamard and policy.stochastic else 1.0
        scales = grid.scales._replace(tensor_decode=grid.scales.tensor_decode * jnp.float32(factor))
        return grid._replace(scales=scales)

    return planted(change)


def zero_rounding():
    """Stochastic rounding that returns zero: Transformer Engine on one chip."""

    def change(grid, x, policy, noise):
        if not policy.stochastic:
            return grid
        return grid._replace(values=jnp.zeros_like(grid.values), codes=jnp.zeros_like(grid.codes))

    return planted(change)


def missing_tensor_scale():
    """Block scales of the numbers themselves: a gradient of 1e-6 has none that E4M3 can hold."""
    return planted(lambda grid, x, policy, noise: requantized(grid, x, noise, encode=1.0))


def floor_scales():
    """Block scales rounded down: the largest element of most blocks saturates."""
    return planted(lambda grid, x, policy, noise: requantized(grid, x, noise, round_scale=floor_e4m3))


def crossing_blocks():
    """Blocks of tokens that cross two sequences: a block's scale is that of half of it and half of the next one."""

    def change(grid, x, policy, noise):
        return requantized(grid, x, noise, shift=8) if policy.hadamard else grid

    return planted(change)


def same_bits():
    """The same random bits in every layer: unbiased in each GEMM."""
    return mock.patch.object(context, "layer_key", lambda key, layer: key)


DEFECTS = {
    "gain 0.88 on weight gradients": gain_088,
    "blocks across sequences": crossing_blocks,
    "stochastic rounding returns zero": zero_rounding,
    "same bits in every layer": same_bits,
    "floor scales": floor_scales,
    "no tensor scale": missing_tensor_scale,
}


def nearest_e4m3(x):
    return x.astype(jnp.float8_e4m3fn).astype(jnp.float32)


def floor_e4m3(x):
    near = nearest_e4m3(x)
    code = jax.lax.bitcast_convert_type(near.astype(jnp.float8_e4m3fn), jnp.uint8)
    below = jax.lax.bitcast_convert_type(jnp.maximum(code, 1) - jnp.uint8(1), jnp.float8_e4m3fn).astype(jnp.float32)
    return jnp.where(near > x, below, near)


def requantized(grid, x, noise, *, encode=None, round_scale=nearest_e4m3, shift=0):
    """NVFP4 in plain float32, with its scales made wrong as asked: close to the real one in all else."""
    v = x.astype(jnp.float32)
    top = jnp.float32(encode) if encode is not None else 1.0 / grid.scales.tensor_decode
    view = grid.view
    parts = v.reshape(view.shape)
    seen = jnp.roll(v, -shift, -2).reshape(view.shape) if shift else parts
    block = jnp.max(jnp.abs(seen), axis=view.shared)
    scale = round_scale(jnp.minimum(block * top / 6, 448.0))
    spread = view.spread(scale)
    scaled = parts * jnp.where(spread > 0, top / jnp.maximum(spread, 1e-30), 0.0)
    share = None if noise is None else noise.reshape(view.shape).astype(jnp.float32) / 256
    values, index = onto_grid(jnp.clip(scaled, -6, 6), share)
    codes = index.astype(jnp.uint8) | jnp.where(v.reshape(view.shape) < 0, jnp.uint8(8), jnp.uint8(0))
    bits = jax.lax.bitcast_convert_type(scale.astype(jnp.float8_e4m3fn), jnp.uint8)
    scales = grid.scales._replace(codes=bits, values=scale, tensor_decode=1.0 / top * jnp.ones((), jnp.float32))
    return grid._replace(values=values.reshape(x.shape), codes=codes.reshape(x.shape), scales=scales)


def onto_grid(v, draw):
    """(values, indices of the grid): nearest, or up with the probability of the distance if `draw` is given."""
    assert E2M1.max == GRID[-1]
    grid = jnp.array(GRID, jnp.float32)
    size = jnp.abs(v)
    upper = jnp.clip(jnp.searchsorted(grid, size, side="left"), 1, 7)
    low, high = grid[upper - 1], grid[upper]
    rises = (size - low) / (high - low) > (0.5 if draw is None else draw)
    return jnp.sign(v) * jnp.where(rises, high, low), jnp.where(rises, upper, upper - 1)
