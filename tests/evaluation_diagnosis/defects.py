"""Defects that the field has met, planted in the operand that a GEMM reads. The detectors know nothing of them.

Each is a context: inside it, programs traced anew have the defect. They replace what the function that makes an operand
gets from the quantizer (codes, scales), how keys are derived, or what a GEMM returns, and nothing that the detectors
read.
"""

import contextlib
from unittest import mock

import jax
import jax.numpy as jnp

from halfbyte.formats import E2M1, NVFP4, amax_of
from halfbyte.models import model_context
from halfbyte.ops import operand, quantize_passes
from halfbyte.ops.backends import emulated, fp8, native, reference
from halfbyte.recipes import prng_keys
from halfbyte.train import train_step

GRID = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@contextlib.contextmanager
def planted(change):
    """`change(grid, x, policy, noise)` of every NVFP4 operand on its grid, wherever operands are made."""
    make, quantize = operand.quantize_operand, operand.quantize_to_grid
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
        stack.enter_context(mock.patch.object(operand, "quantize_to_grid", on_grid))
        for module in (operand, quantize_passes):
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
    return mock.patch.object(model_context, "layer_key", lambda key, layer: key)


def same_bits_of_roles():
    """dgrad and wgrad round dy with the same bits: the derivation of keys, which run and reference share, names both
    streams alike. No number differs from the reference."""
    name = prng_keys._stable_integer
    return mock.patch.object(prng_keys, "_stable_integer", lambda text: name(text.replace("wgrad_dy", "dgrad_dy")))


def same_key_every_step():
    """The train step takes the key of step 0 in every step."""
    return mock.patch.object(train_step, "step_key", lambda seed, step: prng_keys.step_key(seed, 0))


def same_key_every_microbatch():
    """The train step takes the key of its first microbatch in every microbatch."""
    return mock.patch.object(train_step, "fold_in_microbatch", lambda key, index: jax.random.fold_in(key, 0))


def large_results(times=1.005):
    """Results of all GEMMs 0.5% too large: each element is within the tolerance of two roundings to bfloat16."""

    def scaled(alpha):
        def factor(left, right):
            made = alpha(left, right)
            return jnp.float32(times) if made is None else made * jnp.float32(times)

        return factor

    return _patched([(module, "gemm_alpha", scaled) for module in (emulated, fp8, native, reference)])


def mixed_rows():
    """Each row of a weight has 30% of its neighbour: a wrong offset in a load."""

    def mixing(make):
        return lambda x, policy, **placed: make(_mixed(x) if policy.block == "2d" else x, policy, **placed)

    return _patched([(module, "quantize_operand", mixing) for module in (operand, quantize_passes)])


def _mixed(w):
    return w + 0.3 * jnp.roll(w, 1, -2)


def neighbours_scale():
    """A weight's tiles are multiplied by the scale of the tile beside them."""

    def change(grid, x, policy, noise):
        if policy.block != "2d":
            return grid
        turned = {name: jnp.roll(getattr(grid.scales, name), 1, -1) for name in ("values", "codes")}
        return grid._replace(scales=grid.scales._replace(**turned))

    return planted(change)


def wide_blocks():
    """Weight gradients in blocks of 32 tokens under one scale."""

    def pairs(scale):
        return nearest_e4m3(jnp.repeat(jnp.maximum(scale[..., 0::2, :], scale[..., 1::2, :]), 2, axis=-2))

    return planted(lambda grid, x, p, noise: requantized(grid, x, noise, round_scale=pairs) if p.hadamard else grid)


def nearest_rounding():
    """Gradients are rounded to nearest where the recipe asks for stochastic rounding."""
    return _patched([(operand, "_random_bytes", lambda noise: lambda key, shape, cut: jnp.full(shape, 128, jnp.uint8))])


def stale_amax(times=lambda: 8):
    """A tensor's scale is that of an amax eight times its own: no number changes, but range is lost."""

    def late(quantize):
        def on_grid(x, fmt, *, amax=None, **blocked):
            return quantize(x, fmt, amax=times() * (amax_of(x) if amax is None else amax), **blocked)

        return on_grid

    return _patched([(operand, "quantize_to_grid", late)])


def no_hadamard():
    """The Hadamard transforms are left out: they cancel in the product."""
    return _patched([(operand, "hadamard_transform", lambda transform: lambda x, axis=-1: x)])


def bf16_scales():
    """Block scales that are not rounded to E4M3: less noise than the recipe has."""

    def bf16(scale):
        return scale.astype(jnp.bfloat16).astype(jnp.float32)

    return planted(lambda grid, x, policy, noise: requantized(grid, x, noise, round_scale=bf16))


def unquantized_columns():
    """Sixteen columns of every weight are left as they are: in what the GEMMs read, and in what is packed for them."""

    def left(make):
        def weight(self, w, wanted, *, packed=True):
            made = quantize_passes.quantize_reference(w, wanted)
            exact = jnp.where(jnp.arange(w.shape[-1])[None] < 16, w / made.decode_scale, made.array)
            return operand.BlockDequantized(exact, made.decode_scale, wanted.policy)

        return weight

    return _patched([(quantize_passes.QuantizePasses, "quantize_weight", left)])


def carrier_unlike_codes():
    """Sixteen columns of every weight's carrier are left as they are; its codes are right."""

    def change(grid, x, policy, noise):
        if policy.block != "2d":
            return grid
        spread = jnp.broadcast_to(grid.view.broadcast_scales(grid.scales.values), grid.view.shape).reshape(x.shape)
        exact = x.astype(jnp.float32) / grid.scales.tensor_decode / jnp.maximum(spread, 1e-30)
        return grid._replace(values=jnp.where(jnp.arange(x.shape[-1])[None] < 16, exact, grid.values))

    return planted(change)


@contextlib.contextmanager
def _patched(changes):
    """(module, name, function of what is there) of each name."""
    with contextlib.ExitStack() as stack:
        for module, name, change in changes:
            stack.enter_context(mock.patch.object(module, name, change(getattr(module, name))))
        yield


DEFECTS = {
    "gain 0.88 on weight gradients": gain_088,
    "blocks across sequences": crossing_blocks,
    "stochastic rounding returns zero": zero_rounding,
    "same bits in every layer": same_bits,
    "floor scales": floor_scales,
    "no tensor scale": missing_tensor_scale,
    "weights with 30% of the neighbour row": mixed_rows,
    "the neighbour's tile scale": neighbours_scale,
    "weight gradients in blocks of 32": wide_blocks,
    "nearest instead of stochastic": nearest_rounding,
    "amax times 8": stale_amax,
    "Hadamard left out": no_hadamard,
    "scales in bf16": bf16_scales,
    "16 columns left unquantized": unquantized_columns,
    "dgrad and wgrad share bits": same_bits_of_roles,
    "same key in every step": same_key_every_step,
    "results 0.5% too large": large_results,
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
    block = jnp.max(jnp.abs(seen), axis=view.reduce_axes)
    scale = round_scale(jnp.minimum(block * top / 6, 448.0))
    spread = view.broadcast_scales(scale)
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
