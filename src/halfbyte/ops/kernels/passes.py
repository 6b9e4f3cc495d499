"""Quantize passes over a token-major bf16 array [tokens, columns], as Pallas Triton kernels.

`maxima` reads once and leaves the amax of the array and of its Hadamard transform along tokens. `quantize` reads once
and writes the rowwise operand (blocks of 16 columns), the columnwise one (blocks of 16 tokens, with or without the
transform), or both. Carriers are `code * block_scale` in bf16, exact; the columnwise carrier stays token-major, since
WGRAD contracts over tokens either way. Residuals are packed: two tokens a byte, the even one in the low nibble.

Random bits: element (t, n) takes byte t % 4 of the word of counter (t // 4) * columns + n.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from halfbyte.ops.kernels import arithmetic as q
from halfbyte.ops.kernels import layout
from halfbyte.ops.kernels.layout import BLOCK, Tiling
from halfbyte.ops.kernels.scale import DECODE, MULT
from halfbyte.ops.kernels.tile import evaluate

AMAX_TILING = Tiling(4, 4)
ROW_TILING = Tiling(8, 4)
BOTH_TILING = Tiling(4, 4)
UNPACK_TILING = Tiling(4, 4)
ROW_TOKENS = 8  # tokens a program of the rowwise-only pass


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rowwise:
    """The rowwise operand: `scale` from `tensor_scale`; stochastic if `key` (uint32 [2]) is given."""

    scale: jax.Array
    key: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Columnwise:
    """The columnwise operand, as `Rowwise`; `packed` asks for code bytes and scale bytes instead of the carrier."""

    scale: jax.Array
    key: jax.Array | None = None
    hadamard: bool = dataclasses.field(default=True, metadata={"static": True})
    packed: bool = dataclasses.field(default=False, metadata={"static": True})


def maxima(
    x: jax.Array, *, hadamard: bool = True, tiling: Tiling = AMAX_TILING, interpret: bool = False
) -> tuple[jax.Array, ...]:
    """Partial maxima of |x|, and of the transform's bf16 result if `hadamard`: int32 bits, one a program.

    `tensor_scale` finishes them. Integer and NaN-keeping maxima: inf and NaN survive.
    """
    layout.check(x)

    def body(m, rows, _):
        pairs = range(len(rows[0]))
        word = q.magnitudes(m, [w for row in rows for w in row])
        plain = m.max_u16x2(word, m.shl(word, 16))
        out = [[m.and_(plain, 0xFFFF0000)] * m.columns]
        if hadamard:
            tops = [q.hadamard_amax(m, [row[k] for row in rows]) for k in pairs]
            top = tops[0]
            for other in tops[1:]:
                top = m.fmax_nan(top, other)
            out.append([m.and_(m.pack_round(0.0, top), 0xFFFF0000)] * m.columns)
        return out

    def kernel(_, arrays, __, ___, tops):
        tiles = evaluate(
            body,
            [arrays[0][r] for r in range(BLOCK)],
            [],
            outputs=[jnp.int32] * len(tops),
            columns=tiling.columns,
            interpret=interpret,
        )
        for ref, tile in zip(tops, tiles, strict=True):
            ref[0, 0] = jnp.max(tile)

    count = 2 if hadamard else 1
    return tuple(
        layout.call(kernel, [x], [], outputs=[], maxima=count, tiling=tiling, interpret=interpret, name="maxima")
    )


def quantize(
    x: jax.Array,
    *,
    rows: Rowwise | None = None,
    columns: Columnwise | None = None,
    tiling: Tiling | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, ...]:
    """The operands asked for, in one read of x: the row carrier, then the column carrier or (codes, scales).

    Carriers are bf16 [tokens, columns]; packed codes uint8 [tokens / 2, columns], scales uint8 [tokens / 16, columns].
    """
    layout.check(x)
    if rows is None and columns is None:
        raise ValueError("quantize was asked for no operand: give rows, columns or both")
    tokens = BLOCK if columns is not None else ROW_TOKENS
    tiling = tiling or (BOTH_TILING if columns is not None else ROW_TILING)
    outputs: list[tuple[int, object]] = [] if rows is None else [(tokens, jnp.bfloat16)]
    if columns is not None:
        outputs += [(8, jnp.int8), (1, jnp.int8)] if columns.packed else [(BLOCK, jnp.bfloat16)]
    sides = [side for side in (rows, columns) if side is not None]
    scalars = [side.scale for side in sides] + [side.key for side in sides if side.key is not None]

    def body(m, words, given):
        given = list(given)
        index = given.pop() if any(side.key is not None for side in sides) else None
        mults = [(given.pop(0), given.pop(0)) for _ in sides]
        results = []
        for side, (mult, dec) in zip(sides, mults, strict=True):
            random = None
            if side.key is not None:
                k0, k1 = given.pop(0), given.pop(0)
                random = q.random_words(m, index, k0, k1, tokens=tokens, stride=x.shape[1])
            if isinstance(side, Columnwise):
                flags = {"hadamard": side.hadamard, "packed": side.packed}
                results += q.quantize_columns(m, words, mult, dec, random, **flags)
            else:
                results += q.quantize_rows(m, words, mult, dec, random)
        return results

    def kernel(program, arrays, refs, out_refs, _):
        scales, keys = refs[: len(sides)], refs[len(sides) :]
        given = [value for ref in scales for value in (ref[MULT], ref[DECODE])]
        given += [_as_int(ref[i]) for ref in keys for i in range(2)]
        tiles = [arrays[0][r] for r in range(tokens)]
        if keys:
            given.append(counters(program, tiles[0].shape, tokens, x.shape[1]))
        made = evaluate(
            body,
            tiles,
            given,
            outputs=[d for count, d in outputs for _ in range(count)],
            columns=tiling.columns,
            interpret=interpret,
        )
        places = [(ref, r) for ref, (count, _) in zip(out_refs, outputs, strict=True) for r in range(count)]
        for (ref, r), tile in zip(places, made, strict=True):
            ref[r] = tile

    made = layout.call(
        kernel,
        [x],
        scalars,
        outputs=outputs,
        rows=tokens,
        tiling=tiling,
        interpret=interpret,
        name=_name(rows, columns),
    )
    return tuple(lax.bitcast_convert_type(a, jnp.uint8) if a.dtype == jnp.int8 else a for a in made)


def _name(rows: Rowwise | None, columns: Columnwise | None) -> str:
    parts = ["quantize"]
    if rows is not None:
        parts.append("rows" if rows.key is None else "rows_stochastic")
    if columns is not None:
        parts.append("columns" if columns.key is None else "columns_stochastic")
        parts += ["hadamard"] * columns.hadamard + ["packed"] * columns.packed
    return "_".join(parts)


def _as_int(word: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(word, jnp.int32)


def counters(program: tuple[jax.Array, jax.Array], shape: tuple[int, ...], tokens: int, width: int) -> jax.Array:
    """int32 tile: the counter of each column for the first four tokens of the program."""
    i, j = program
    column = lax.broadcasted_iota(jnp.int32, shape, 0) * BLOCK + lax.broadcasted_iota(jnp.int32, shape, 1)
    first = i * np.int32(tokens // 4 * width) + j * np.int32(shape[0] * BLOCK)
    return column + first


def unpack(
    codes: jax.Array, scales: jax.Array, *, tiling: Tiling = UNPACK_TILING, interpret: bool = False
) -> jax.Array:
    """The bf16 carrier [tokens, columns] of a packed columnwise operand."""
    if codes.shape[0] != 8 * scales.shape[0] or codes.shape[1] != scales.shape[1]:
        raise ValueError(f"packed codes {codes.shape} need scales [tokens / 16, columns], got {scales.shape}")

    def body(m, words, _):
        return q.unpack_columns(m, words[:8], words[8])

    def kernel(_, arrays, __, out_refs, ___):
        tiles = [arrays[0][r] for r in range(8)] + [arrays[1][0]]
        made = evaluate(body, tiles, [], outputs=[jnp.bfloat16] * BLOCK, columns=tiling.columns, interpret=interpret)
        for r, tile in enumerate(made):
            out_refs[0][r] = tile

    packed = [lax.bitcast_convert_type(a, jnp.int8) for a in (codes, scales)]
    out = [(BLOCK, jnp.bfloat16)]
    return layout.call(kernel, packed, [], outputs=out, rows=8, tiling=tiling, interpret=interpret, name="unpack")[0]
