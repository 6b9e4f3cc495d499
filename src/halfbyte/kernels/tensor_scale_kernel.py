"""Scale vector of a tensor, from the partial amaxes of an amax pass; one launch serves several tensors.

Divisions are `div.rn`: a compiler's own may not be correctly rounded, and codes depend on the last bit of a scale.
"""

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
)  # the value that amax is mapped to, or, under `QuartetScale`, the two divisors of amax


def amax_target(rule: TwoLevelScale) -> AmaxTarget:
    """Returns the value that a tensor's amax is mapped to; under `QuartetScale` the two divisors of amax."""
    return (
        (rule.scale_top, rule.scaled_amax_target(E2M1))
        if isinstance(rule, QuartetScale)
        else rule.tensor_amax_target(E2M1)
    )


def compute_tensor_scale(maxima: jax.Array, *, top: AmaxTarget = NVFP4_TOP) -> jax.Array:
    """Returns the scale vector, float32 [8]: amax, guarded S = top / amax, 1 / S, error lift, GEMM alpha, zeros.

    Args:
        maxima: Partial amaxes, the bits of float32 magnitudes as int32, in any shape. An integer maximum keeps inf and
            NaN.
        top: 2688 for NVFP4, 1536 for four over six, the largest element for FP8. A pair (a, b) puts d = (amax / a) / b
            in the entry of 1 / S (1 where amax is zero or not finite), and the divisor in the entry of S: d, or
            infinity where d is zero.

    The GEMM's alpha is 1 / S, or NaN if amax is not finite. Divisions are correctly rounded (`div.rn`), also where
    XLA's are not.
    """
    return compute_tensor_scales(maxima, top=top)[0]


@triton_launch.jit_per_shape("top", "tops")
def compute_tensor_scales(
    *partial_amaxes: jax.Array, top: AmaxTarget = NVFP4_TOP, tops: tuple[AmaxTarget, ...] = ()
) -> tuple[jax.Array, ...]:
    """Returns `compute_tensor_scale` of several tensors in one launch, under one `top` or under `tops`, one each."""
    return _launch(partial_amaxes, tops or [top] * len(partial_amaxes))[: len(partial_amaxes)]


def quantizer_entries(rule: TwoLevelScale) -> tuple[int, ...]:
    """Returns the entries of a scale vector that kernels read under a rule, in the order of `KernelQuantizer`."""
    has_error_in_domain = rule.has_candidates and rule.error_metric != "expected"
    return (ENCODE, DECODE, AMAX, LIFT) if has_error_in_domain else (ENCODE, DECODE)


@triton_launch.jit_per_shape("tops")
def compute_scales_and_alphas(
    *partial_amaxes: jax.Array, tops: tuple[AmaxTarget, ...]
) -> list[tuple[jax.Array, jax.Array]]:
    """Returns for each tensor `compute_tensor_scale` under its own top, and its GEMM alpha as a scalar of its own.

    The scalar is for GEMMs that read one from memory. One launch.
    """
    results, n = _launch(partial_amaxes, tops), len(partial_amaxes)
    return [(vector, alpha.reshape(())) for vector, alpha in zip(results[:n], results[n:], strict=True)]


def _launch(partial_amaxes: Sequence[jax.Array], tops: Sequence[AmaxTarget]) -> tuple[jax.Array, ...]:
    """Returns the scale vectors of all tensors, then their GEMM alphas [1]."""
    counts = [math.prod(m.shape) for m in partial_amaxes]
    n = len(counts)

    def kernel(*refs):
        for amax_ref, out_ref, alpha_ref, count, top in zip(
            refs[:n], refs[n : 2 * n], refs[2 * n :], counts, tops, strict=True
        ):
            amax = lax.bitcast_convert_type(jnp.max(_load_amaxes(amax_ref, count)), jnp.float32)
            entries = _entries(jnp.broadcast_to(amax, (SCALE_VECTOR_SIZE,)), top)
            out = jnp.zeros((SCALE_VECTOR_SIZE,), jnp.float32)
            for index, value in entries.items():
                out = jnp.where(lax.iota(jnp.int32, SCALE_VECTOR_SIZE) == index, value, out)
            out_ref[...] = out
            bits = jnp.max(
                lax.bitcast_convert_type(entries[GEMM_ALPHA_INDEX], jnp.int32)
            )  # all entries are equal; an integer maximum keeps NaN
            alpha_ref[0] = lax.bitcast_convert_type(bits, jnp.float32)

    warps = min(16, max(1, pl.next_power_of_2(max(counts)) // 512))
    results = pl.pallas_call(
        kernel,
        out_shape=[jax.ShapeDtypeStruct((SCALE_VECTOR_SIZE,), jnp.float32)] * n
        + [jax.ShapeDtypeStruct((1,), jnp.float32)] * n,
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=1),
        interpret=is_interpreting(),
        name="tensor_scales",
    )(*(m.reshape(-1) for m in partial_amaxes))
    return tuple(results)


def _load_amaxes(ref: Any, count: int) -> jax.Array:
    """Loads all partial amaxes. Triton tiles are powers of two, so the last amax is repeated to pad them."""
    padded = pl.next_power_of_2(count)
    if is_interpreting() or padded == count:
        return ref[...]
    return plgpu.load(ref.at[jnp.minimum(lax.iota(jnp.int32, padded), count - 1)])


def _entries(amax: jax.Array, top: AmaxTarget) -> dict[int, jax.Array]:
    """Returns {index in the scale vector: value}, each value broadcast to the vector's shape."""
    if isinstance(top, tuple):
        d = _divide(_divide(amax, np.float32(top[0])), np.float32(top[1]))
        d = jnp.where((amax == np.float32(0)) | ~(amax <= np.float32(FLT_MAX)), np.float32(1), d)
        return scale_vector(amax, jnp.where(d == np.float32(0), np.float32(np.inf), d), d)
    s = jnp.minimum(_divide(np.float32(top), amax), np.float32(FLT_MAX))
    finite = amax <= np.float32(FLT_MAX)
    s = jnp.where((amax == np.float32(0)) | (s == np.float32(0)) | ~finite, np.float32(1), s)
    return scale_vector(amax, s, _divide(np.float32(1), s))


def scale_vector(amax: jax.Array, encode: jax.Array, decode: jax.Array) -> dict[int, jax.Array]:
    """Returns {index in a scale vector: value} for these amaxes and scales; the other entries are zero."""
    gemm_alpha = jnp.where(amax <= np.float32(FLT_MAX), decode, np.float32(np.nan))
    return {AMAX: amax, ENCODE: encode, DECODE: decode, LIFT: error_lift(amax), GEMM_ALPHA_INDEX: gemm_alpha}


def _divide(a: jax.Array | np.float32, b: jax.Array | np.float32) -> jax.Array:
    """Returns a / b, correctly rounded; one of them is an array [8], the other may be a scalar."""
    out_type = jax.ShapeDtypeStruct((SCALE_VECTOR_SIZE,), jnp.float32)
    operands = [jnp.full(out_type.shape, x, out_type.dtype) if isinstance(x, np.float32) else x for x in (a, b)]
    if is_interpreting():
        return jax.pure_callback(_divide_numpy, out_type, *operands)
    return plgpu.elementwise_inline_asm(
        "div.rn.f32 $0, $1, $2;", args=operands, constraints="=f,f,f", pack=1, result_shape_dtypes=[out_type]
    )[0]


def _divide_numpy(a: jax.Array, b: jax.Array) -> np.ndarray:
    with np.errstate(all="ignore"):
        return np.asarray(np.asarray(a) / np.asarray(b), np.float32)


def amax_to_bits(amax: jax.Array) -> jax.Array:
    """Returns float32 amaxes as the int32 that `compute_tensor_scale` takes, for example after an all-reduce."""
    return lax.bitcast_convert_type(jnp.abs(amax.astype(jnp.float32)), jnp.int32)
