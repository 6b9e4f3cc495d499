"""The quantization of a weight [k, n], float32 or bf16, once a step, to nearest, ties as `rounding` says.

Under one scale for each 16x16 tile one bf16 carrier serves FPROP and DGRAD, because W and its transpose share codes and
scales; a weight that travels is packed instead. Blocks of 16 along an axis are of one of the two: along k (axis -2) of
FPROP, along n (-1) of DGRAD. With `owed`, float32 [1], what is quantized is w owed, a float32 product: w may be a
carrier, and owed its tensor's decode scale.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from halfbyte.formats import TwoLevel
from halfbyte.formats.scales import TWO_LEVEL
from halfbyte.kernels import arithmetic as q
from halfbyte.kernels import codes, layout
from halfbyte.kernels.blocks import Quantizer
from halfbyte.kernels.layout import BLOCK, Results, Tiling
from halfbyte.kernels.machine import Machine, TokenRows, Word
from halfbyte.kernels.scale import entries
from halfbyte.kernels.stacks import Layer, array_of
from halfbyte.kernels.tile import evaluate

WEIGHT_TILING = Tiling(4, 4)
WEIGHTS = ("float32", "bfloat16")  # the dtypes of a weight that kernels read
Make = Callable[[Machine, TokenRows, Quantizer], TokenRows]  # of 16 rows of float32


@layout.once("tiling")
def weight_maxima(w: jax.Array | Layer, *, owed: jax.Array | None = None, tiling: Tiling = WEIGHT_TILING) -> jax.Array:
    """Partial maxima of |w| as int32 bits, one a program; `tensor_scale` finishes them."""
    layout.check(w)
    if not layout.divides(w.shape[1]):
        wide = [array_of(w).astype(jnp.float32)]
        run = functools.partial(codes.find_maxima, wide, lambda m, rows: [q.amax_float(m, _real(m, rows))], 1)
        return run(owed=owed, name="weight_maxima")[0]

    def body(m, rows, factors):
        return [[m.bits(q.amax_float(m, q.multiply_floats(m, rows, factors)))] * m.columns]

    def kernel(_, arrays, refs, __, tops):
        tiles = [arrays[0][r].astype(jnp.float32) for r in range(BLOCK)]
        factors = [ref[0] for ref in refs]
        (tile,) = evaluate(body, tiles, factors, outputs=[jnp.int32], columns=tiling.columns)
        tops[0][0, 0] = jnp.max(tile)

    scalars = [] if owed is None else [owed]
    return layout.call(kernel, [w], scalars, makes=Results(maxima=1), tiling=tiling, name="weight_maxima")[0]


def _real(m: Machine, rows: TokenRows) -> list[list[Word]]:
    return [[m.real(x) for x in row] for row in rows]


@layout.once("axis", "rule", "rounding", "tiling")
def quantize_weight(
    w: jax.Array | Layer,
    scale: jax.Array,
    *,
    axis: int | None = None,
    rule: TwoLevel = TWO_LEVEL,
    rounding: str = "rne",
    owed: jax.Array | None = None,
    tiling: Tiling = WEIGHT_TILING,
) -> jax.Array:
    """bf16 carrier [k, n] of w under the scales of `tensor_scale`: in tiles, or in blocks along an axis."""
    made = _MADE[axis]
    name = "quantize_weight" + {None: "", -1: "_rows", -2: "_columns"}[axis]
    scalars = [scale] if owed is None else [scale, owed]
    return _quantize(w, scalars, [(BLOCK, jnp.bfloat16)], made, (rule, rounding), tiling, name=name)[0]


_MADE: dict[int | None, Make] = {  # by the axis of blocks
    None: functools.partial(q.quantize_square, packed=False),
    -1: lambda m, rows, how: q.quantize_rows(m, q.float_pairs(rows), how),
    -2: lambda m, rows, how: q.quantize_columns(m, q.float_pairs(rows), how, hadamard=False, packed=False),
}


@layout.once()
def pack_weight(w: jax.Array | Layer, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(uint8 codes [k / 2, n], two rows a byte; E4M3 scales [k / 16, n / 16]) of w."""
    outputs = [(BLOCK // 2, jnp.int8), (1, jnp.int8)]
    square = functools.partial(q.quantize_square, packed=True)
    packed, scales = _quantize(w, [scale], outputs, square, (TWO_LEVEL, "rne"), WEIGHT_TILING, name="pack_weight")
    # [k / 16, n] -> [k / 16, n / 16]: the kernel repeats a tile's scale in each of its columns
    return lax.bitcast_convert_type(packed, jnp.uint8), lax.bitcast_convert_type(scales[:, ::BLOCK], jnp.uint8)


def _quantize(
    w: jax.Array | Layer,
    scalars: Sequence[jax.Array],
    outputs: Sequence[tuple[int, DTypeLike]],
    made: Make,
    how: tuple[TwoLevel, str],
    tiling: Tiling,
    *,
    name: str,
) -> list[jax.Array]:
    """What is `made` of w under `scalars`: its scales, and what is owed to it, if anything is; by a rule and a
    rounding.
    """
    rule, rounding = how
    layout.check(w)
    if not layout.divides(w.shape[1]):
        return codes.weight_rows(
            array_of(w).astype(jnp.float32), scalars, outputs, made, rule, name=name, rounding=rounding
        )
    read = len(entries(rule))

    def body(m, rows, given):
        return made(m, q.multiply_floats(m, rows, given[read:]), Quantizer(rule, rounding, *given[:read]))

    def kernel(_, arrays, refs, out_refs, __):
        tiles = [arrays[0][r].astype(jnp.float32) for r in range(BLOCK)]
        given = [refs[0][entry] for entry in entries(rule)] + [ref[0] for ref in refs[1:]]
        dtypes = [dtype for count, dtype in outputs for _ in range(count)]
        tiles = evaluate(body, tiles, given, outputs=dtypes, columns=tiling.columns)
        places = [(ref, r) for ref, (count, _) in zip(out_refs, outputs, strict=True) for r in range(count)]
        for (ref, r), tile in zip(places, tiles, strict=True):
            ref[r] = tile

    return layout.call(kernel, [w], scalars, makes=Results(outputs), tiling=tiling, name=name)
