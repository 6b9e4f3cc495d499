"""The 2D quantization of a float32 weight [k, n], once a step: one scale for each 16x16 tile, nearest.

One bf16 carrier serves FPROP and DGRAD, because W and its transpose share codes and scales.
"""

import jax
import jax.numpy as jnp

from halfbyte.ops.kernels import arithmetic as q
from halfbyte.ops.kernels import layout
from halfbyte.ops.kernels.layout import BLOCK, Tiling
from halfbyte.ops.kernels.scale import DECODE, MULT
from halfbyte.ops.kernels.tile import evaluate

WEIGHT_TILING = Tiling(4, 4)


def weight_maxima(w: jax.Array, *, tiling: Tiling = WEIGHT_TILING, interpret: bool = False) -> jax.Array:
    """Partial maxima of |w| as int32 bits, one a program; `tensor_scale` finishes them."""
    layout.check(w)

    def body(m, rows, _):
        return [[m.bits(q.amax_float(m, rows))] * m.columns]

    def kernel(_, arrays, __, ___, tops):
        tiles = [arrays[0][r] for r in range(BLOCK)]
        (tile,) = evaluate(body, tiles, [], outputs=[jnp.int32], columns=tiling.columns, interpret=interpret)
        tops[0][0, 0] = jnp.max(tile)

    return layout.call(kernel, [w], [], outputs=[], maxima=1, tiling=tiling, interpret=interpret, name="weight_maxima")[
        0
    ]


def quantize_weight(
    w: jax.Array, scale: jax.Array, *, tiling: Tiling = WEIGHT_TILING, interpret: bool = False
) -> jax.Array:
    """bf16 carrier [k, n] of float32 w under the scales of `tensor_scale`."""
    layout.check(w)

    def body(m, rows, given):
        return q.quantize_square(m, rows, *given)

    def kernel(_, arrays, refs, out_refs, __):
        tiles = [arrays[0][r] for r in range(BLOCK)]
        given = [refs[0][MULT], refs[0][DECODE]]
        outputs = [jnp.bfloat16] * BLOCK
        made = evaluate(body, tiles, given, outputs=outputs, columns=tiling.columns, interpret=interpret)
        for r, tile in enumerate(made):
            out_refs[0][r] = tile

    outputs = [(BLOCK, jnp.bfloat16)]
    return layout.call(
        kernel, [w], [scale], outputs=outputs, tiling=tiling, interpret=interpret, name="quantize_weight"
    )[0]
