"""Scale vector of a tensor, from the partial amaxes of an amax pass."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from halfbyte.formats import E2M1, E4M3, QuartetScale, TwoLevelScale
from halfbyte.formats.scale_candidates import error_lift
from halfbyte.io.lazy_import import lazy_module
from halfbyte.kernels import triton_launch
from halfbyte.kernels.mosaic_launch import is_interpreting
from halfbyte.kernels.ptx_lanes import FLT_MAX

plgpu = lazy_module("jax.experimental.pallas.triton")
AMAX, ENCODE, DECODE, LIFT, GEMM_ALPHA_INDEX = range(5)
SCALE_VECTOR_SIZE = 8
NVFP4_TOP = E2M1.max * E4M3.max
AmaxTarget = (
    float | tuple[float, float]
)  # what amax is mapped to, or, under `QuartetScale`, the two numbers that divide it


def amax_target(rule: TwoLevelScale) -> AmaxTarget:
    """What makes a tensor's scales of its amax."""
    return (
        (rule.scale_top, rule.scaled_amax_target(E2M1))
        if isinstance(rule, QuartetScale)
        else rule.tensor_amax_target(E2M1)
    )


def compute_tensor_scale(maxima: jax.Array, *, top: AmaxTarget = NVFP4_TOP) -> jax.Array:
    """float32 [8]: amax, S = top / amax with its guards, 1 / S, the lift of errors, alpha of a GEMM.

    `top` is 2688 for NVFP4, 1536 for four over six, the element's largest value for FP8. Two numbers (a, b) give
    d = (amax / a) / b in the place of 1 / S, 1 where amax is zero or not finite, and in that of S what is divided by:
    d, infinity where that is zero. The GEMM's factor is 1 / S, or
    NaN if amax is not finite; the rest is zero. `maxima` holds the bits of float32 magnitudes as int32, in any shape:
    integer maxima keep inf and NaN. Divisions are exact (`div.rn`), also where XLA's are not.
    """
    return compute_tensor_scales(maxima, top=top)[0]


@triton_launch.jit_per_shape("top", "tops")
def compute_tensor_scales(
    *maxima: jax.Array, top: AmaxTarget = NVFP4_TOP, tops: tuple[AmaxTarget, ...] = ()
) -> tuple[jax.Array, ...]:
    """`compute_tensor_scale` of several tensors in one launch, all under one top, or under `tops`, one each."""
    return _launch(maxima, tops or [top] * len(maxima))[: len(maxima)]


def quantizer_entries(rule: TwoLevelScale) -> tuple[int, ...]:
    """What a kernel reads of a scale vector under a rule, in the order of `KernelQuantizer`."""
    measured = rule.has_candidates and rule.error_metric != "expected"
    return (ENCODE, DECODE, AMAX, LIFT) if measured else (ENCODE, DECODE)


@triton_launch.jit_per_shape("tops")
def compute_scales_and_alphas(*maxima: jax.Array, tops: tuple[AmaxTarget, ...]) -> list[tuple[jax.Array, jax.Array]]:
    """Of each tensor `compute_tensor_scale` under its own top, and its last entry as a scalar of its own, for a GEMM
    that reads a scalar from memory; in one launch.
    """
    made, n = _launch(maxima, tops), len(maxima)
    return [(vector, factor.reshape(())) for vector, factor in zip(made[:n], made[n:], strict=True)]


def _launch(maxima: Sequence[jax.Array], tops: Sequence[AmaxTarget]) -> tuple[jax.Array, ...]:
    """The scale vectors of all tensors, then their GEMM factors [1]."""
    counts = [math.prod(m.shape) for m in maxima]
    n = len(counts)

    def kernel(*refs):
        for maxima_ref, out_ref, factor_ref, count, top in zip(
            refs[:n], refs[n : 2 * n], refs[2 * n :], counts, tops, strict=True
        ):
            amax = lax.bitcast_convert_type(jnp.max(_load_amaxes(maxima_ref, count)), jnp.float32)
            entries = _entries(jnp.broadcast_to(amax, (SCALE_VECTOR_SIZE,)), top)
            out = jnp.zeros((SCALE_VECTOR_SIZE,), jnp.float32)
            for place, value in entries.items():
                out = jnp.where(lax.iota(jnp.int32, SCALE_VECTOR_SIZE) == place, value, out)
            out_ref[...] = out
            bits = jnp.max(
                lax.bitcast_convert_type(entries[GEMM_ALPHA_INDEX], jnp.int32)
            )  # equal in all places; keeps NaN
            factor_ref[0] = lax.bitcast_convert_type(bits, jnp.float32)

    warps = min(16, max(1, pl.next_power_of_2(max(counts)) // 512))
    results = pl.pallas_call(
        kernel,
        out_shape=[jax.ShapeDtypeStruct((SCALE_VECTOR_SIZE,), jnp.float32)] * n
        + [jax.ShapeDtypeStruct((1,), jnp.float32)] * n,
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=1),
        interpret=is_interpreting(),
        name="tensor_scales",
    )(*(m.reshape(-1) for m in maxima))
    return tuple(results)


def _load_amaxes(ref: Any, count: int) -> jax.Array:
    """All maxima; Triton tiles are powers of two, so the last one is repeated as often as it takes."""
    padded = pl.next_power_of_2(count)
    if is_interpreting() or padded == count:
        return ref[...]
    return plgpu.load(ref.at[jnp.minimum(lax.iota(jnp.int32, padded), count - 1)])


def _entries(amax: jax.Array, top: AmaxTarget) -> dict[int, jax.Array]:
    """Place in the scale vector -> its value, each repeated over the vector."""
    if isinstance(top, tuple):
        d = _divide(_divide(amax, np.float32(top[0])), np.float32(top[1]))
        d = jnp.where((amax == np.float32(0)) | ~(amax <= np.float32(FLT_MAX)), np.float32(1), d)
        return scale_vector(amax, jnp.where(d == np.float32(0), np.float32(np.inf), d), d)
    s = jnp.minimum(_divide(np.float32(top), amax), np.float32(FLT_MAX))
    finite = amax <= np.float32(FLT_MAX)
    s = jnp.where((amax == np.float32(0)) | (s == np.float32(0)) | ~finite, np.float32(1), s)
    return scale_vector(amax, s, _divide(np.float32(1), s))


def scale_vector(amax: jax.Array, encode: jax.Array, decode: jax.Array) -> dict[int, jax.Array]:
    """Place in a scale vector -> its value, of tensors with these maxima and scales; the other places hold zero."""
    gemm_alpha = jnp.where(amax <= np.float32(FLT_MAX), decode, np.float32(np.nan))
    return {AMAX: amax, ENCODE: encode, DECODE: decode, LIFT: error_lift(amax), GEMM_ALPHA_INDEX: gemm_alpha}


def _divide(a: jax.Array | np.float32, b: jax.Array | np.float32) -> jax.Array:
    """a / b; one of them is an array [8], the other may be a number."""
    made = jax.ShapeDtypeStruct((SCALE_VECTOR_SIZE,), jnp.float32)
    both = [jnp.full(made.shape, x, made.dtype) if isinstance(x, np.float32) else x for x in (a, b)]
    if is_interpreting():
        return jax.pure_callback(_divide_numpy, made, *both)
    return plgpu.elementwise_inline_asm(
        "div.rn.f32 $0, $1, $2;", args=both, constraints="=f,f,f", pack=1, result_shape_dtypes=[made]
    )[0]


def _divide_numpy(a: jax.Array, b: jax.Array) -> np.ndarray:
    with np.errstate(all="ignore"):
        return np.asarray(np.asarray(a) / np.asarray(b), np.float32)


def amax_to_bits(amax: jax.Array) -> jax.Array:
    """The int32 that `compute_tensor_scale` takes, from float32 maxima (for instance after a reduction over a mesh)."""
    return lax.bitcast_convert_type(jnp.abs(amax.astype(jnp.float32)), jnp.int32)
