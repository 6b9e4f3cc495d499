"""The scales of one tensor, from the maxima that the programs of an amax pass left behind."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from halfbyte.ops.kernels.ptx import FLT_MAX

AMAX, ENCODE, DECODE, MULT, GEMM = range(5)
SIZE = 8


def tensor_scale(maxima: jax.Array, *, interpret: bool = False) -> jax.Array:
    """float32 [8]: amax, S = 2688 / amax with its guards, 1 / S, S * f32(1/6), and the factor that a GEMM owes.

    The GEMM's factor is 1 / S, or NaN if amax is not finite; the rest is zero. `maxima` holds the bits of float32
    magnitudes as int32, in any shape: integer maxima keep inf and NaN. Divisions are exact (`div.rn`), also where
    XLA's are not.
    """
    count = math.prod(maxima.shape)
    padded = max(32, pl.next_power_of_2(count))

    def kernel(maxima_ref, out_ref):
        index = lax.iota(jnp.int32, padded)
        bits = maxima_ref[...] if interpret else plgpu.load(maxima_ref.at[jnp.minimum(index, count - 1)])
        amax = jnp.broadcast_to(lax.bitcast_convert_type(jnp.max(bits), jnp.float32), (SIZE,))
        s = jnp.minimum(_divide(np.float32(2688), amax, interpret), np.float32(FLT_MAX))
        s = jnp.where((amax == np.float32(0)) | (s == np.float32(0)), np.float32(1), s)
        s = jnp.where(amax != amax, amax, s)
        decode = _divide(np.float32(1), s, interpret)
        gemm = jnp.where(amax <= np.float32(FLT_MAX), decode, np.float32(np.nan))
        out = jnp.zeros((SIZE,), jnp.float32)
        entries = {AMAX: amax, ENCODE: s, DECODE: decode, MULT: s * np.float32(1 / 6), GEMM: gemm}
        for place, value in entries.items():
            out = jnp.where(lax.iota(jnp.int32, SIZE) == place, value, out)
        out_ref[...] = out

    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((SIZE,), jnp.float32),
        compiler_params=plgpu.CompilerParams(num_warps=min(16, max(1, padded // 1024)), num_stages=1),
        interpret=interpret,
        name="tensor_scale",
    )(maxima.reshape(-1))


def _divide(a: np.float32, b: jax.Array, interpret: bool) -> jax.Array:
    if interpret:
        return a / b
    return plgpu.elementwise_inline_asm(
        "div.rn.f32 $0, $1, $2;",
        args=[jnp.full(b.shape, a, jnp.float32), b],
        constraints="=f,f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(b.shape, jnp.float32)],
    )[0]


def amax_bits(amax: jax.Array) -> jax.Array:
    """The int32 that `tensor_scale` takes, from float32 maxima (for instance after a reduction over a mesh)."""
    return lax.bitcast_convert_type(jnp.abs(amax.astype(jnp.float32)), jnp.int32)
