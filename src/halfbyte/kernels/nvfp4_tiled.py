"""Quantize passes over a token-major bf16 array [tokens, columns], as Pallas Triton kernels.

`maxima` reads once and leaves the amax of the array and of its Hadamard transform along tokens. `quantize` reads once
and writes the rowwise operand (blocks of 16 columns), the columnwise one (blocks of 16 tokens, with or without the
transform), or both. Carriers are `code * block_scale` in bf16, exact; the columnwise carrier stays token-major, since
WGRAD contracts over tokens either way. Residuals are packed: two tokens a byte, the even one in the low nibble.

Random bits: element (t, n) takes byte t % 4 of the word of counter (t // 4) * columns + n, where t, n and columns are
those of the whole array: a `Window` says where on a mesh this part of it lies.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from halfbyte.formats import TwoLevel
from halfbyte.formats.noise import multiply_high_low, wide_key
from halfbyte.formats.scales import TWO_LEVEL
from halfbyte.kernels import arithmetic as q
from halfbyte.kernels import codes, layout
from halfbyte.kernels.blocks import Quantizer
from halfbyte.kernels.codes import unpack as _unpack_any_width
from halfbyte.kernels.launch import Lanes
from halfbyte.kernels.layout import BLOCK, Results, Tiling
from halfbyte.kernels.machine import Machine, TokenRows, Word
from halfbyte.kernels.scale import entries
from halfbyte.kernels.scale_order import ScaleOrder
from halfbyte.kernels.stacks import Layer, array_of
from halfbyte.kernels.tile import evaluate

AMAX_TILING = Tiling(4, 4)
ROW_TILING = Tiling(8, 4)
BOTH_TILING = Tiling(4, 4)
UNPACK_TILING = Tiling(4, 4)
ROW_TOKENS = 8  # tokens a program of the rowwise-only pass
CODES = Lanes(4, 4)
BOTH_CODES = Lanes(2, 8)  # nearest: fewer registers, more warps; the faster the narrower the array
BOTH_CARRIERS = Lanes(4, 2)  # 255 registers a lane, of which a full multiprocessor leaves 128


STATIC = {"static": True}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Window:
    """Where an array [tokens, columns] lies in the whole one [sequences, seq, width], of which it has `local_seq`
    positions of each of its sequences: `origin`, int32 [3], is where it begins.
    """

    origin: jax.Array
    local_seq: int = dataclasses.field(metadata=STATIC)
    seq: int = dataclasses.field(metadata=STATIC)
    width: int = dataclasses.field(metadata=STATIC)
    words: int = dataclasses.field(metadata=STATIC)  # random words of the whole array

    @classmethod
    def of(cls, shape: tuple[int, ...], offset: Sequence[jax.Array | int], whole: tuple[int, ...]) -> "Window":
        """For a part of `shape` [sequences, positions, columns] (or without the first) of an array of shape `whole`."""
        if len(shape) == 2:
            shape, offset, whole = (1, *shape), (0, *offset), (1, *whole)
        origin = jnp.stack([jnp.asarray(o, jnp.int32) for o in offset])
        return cls(origin, shape[1], whole[1], whole[2], whole[0] * whole[1] // 4 * whole[2])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rowwise:
    """The rowwise operand: `scale` from `tensor_scale`; by chance if `key` (uint32 [2]) is given, as `rounding` says;
    with `codes` as packed codes and scales in that order, not as a carrier. `rule` is the scale rule of its format.
    """

    scale: jax.Array
    key: jax.Array | Layer | None = None
    window: Window | None = None
    codes: ScaleOrder | None = dataclasses.field(default=None, metadata=STATIC)
    rule: TwoLevel = dataclasses.field(default=TWO_LEVEL, metadata=STATIC)
    rounding: str = dataclasses.field(default="stochastic", metadata=STATIC)
    along_tokens = False
    owed = None

    def outputs(self, tokens: int) -> list[tuple[int, DTypeLike]]:
        """(rows, dtype) of each output, for `tokens` token rows."""
        return [(tokens, jnp.bfloat16)]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Columnwise:
    """The columnwise operand, as `Rowwise`; `packed` asks for code bytes and scale bytes instead of the carrier, as
    they lie, `codes` for those that a GEMM reads, transposed. With `owed`, float32 [1], it is that of bf16(x owed): x
    may be a carrier, and owed its tensor's decode scale.
    """

    scale: jax.Array
    key: jax.Array | Layer | None = None
    window: Window | None = None
    hadamard: bool = dataclasses.field(default=True, metadata=STATIC)
    packed: bool = dataclasses.field(default=False, metadata=STATIC)
    codes: ScaleOrder | None = dataclasses.field(default=None, metadata=STATIC)
    rule: TwoLevel = dataclasses.field(default=TWO_LEVEL, metadata=STATIC)
    rounding: str = dataclasses.field(default="stochastic", metadata=STATIC)
    owed: jax.Array | None = None
    along_tokens = True

    def outputs(self, tokens: int) -> list[tuple[int, DTypeLike]]:
        """(rows, dtype) of each output, for `tokens` token rows; bytes are signed while Triton handles them."""
        return [(tokens // 2, jnp.int8), (tokens // BLOCK, jnp.int8)] if self.packed else [(tokens, jnp.bfloat16)]


@layout.once("hadamard", "tiling")
def maxima(
    x: jax.Array, *, owed: jax.Array | None = None, hadamard: bool = True, tiling: Tiling = AMAX_TILING
) -> tuple[jax.Array, ...]:
    """Partial maxima of |x|, and of the transform's bf16 result if `hadamard`: int32 bits, one a program.

    `tensor_scale` finishes them. Integer and NaN-keeping maxima: inf and NaN survive. With `owed`, float32 [1], those
    of bf16(x owed).
    """
    return find_maxima([x], Made(lambda m, words: [words], 1), hadamard=hadamard, tiling=tiling, owed=owed)


@dataclasses.dataclass(frozen=True)
class Made:
    """The first `count` of the tensors whose token rows `rows(machine, token rows of all arrays)` returns."""

    rows: Callable[[Machine, TokenRows], Sequence[TokenRows]]
    count: int


def find_maxima(
    arrays: Sequence[jax.Array | Layer],
    made: Made,
    *,
    hadamard: bool,
    tiling: Tiling,
    owed: jax.Array | None = None,
    into: Sequence[Layer] = (),
    name: str = "maxima",
) -> tuple[jax.Array, ...]:
    """`maxima` of each tensor that is `made` of the arrays. `owed`, float32, one an array, multiplies what is read. The
    first arrays are also written `into` layers, as they are; their stacks come last.
    """
    layout.check(*arrays)
    total = made.count * (2 if hadamard else 1)

    def body(m, words, factors):
        tensors = made.rows(m, q.multiply_rows(m, words, factors))[: made.count]
        return [top for rows in tensors for top in tops_of(m, rows, hadamard)]

    if not layout.divides(arrays[0].shape[1]):

        def first(m, rows):
            return [top[0] for top in body(m, rows, ())]

        by_hand = functools.partial(codes.find_maxima, arrays, first, total, owed=owed)
        stacks = [layer.filled(array_of(array)) for layer, array in zip(into, arrays, strict=False)]
        return *by_hand(columns=tiling.columns, name=name), *stacks

    def kernel(_, refs, scalar_refs, stacks, tops):
        tiles = [ref[r] for ref in refs for r in range(BLOCK)]
        for i, ref in enumerate(stacks):
            for r in range(BLOCK):
                ref[r] = tiles[i * BLOCK + r]
        factors = [ref[i] for ref in scalar_refs for i in range(len(arrays))]
        outputs = [jnp.int32] * len(tops)
        found = evaluate(body, tiles, factors, outputs=outputs, columns=tiling.columns)
        for ref, tile in zip(tops, found, strict=True):
            ref[0, 0] = jnp.max(tile)

    scalars = [] if owed is None else [owed]
    makes = Results(maxima=total, into=into)
    return tuple(layout.call(kernel, arrays, scalars, makes=makes, tiling=tiling, name=name))


def tops_of(m: Machine, rows: TokenRows, hadamard: bool) -> list[list[Word]]:
    """The lane's amax, and that of the transform: bits of float32, one equal word for each of the lane's columns."""
    word = q.magnitudes(m, [w for row in rows for w in row])
    out = [[m.and_(m.max_u16x2(word, m.shl(word, 16)), 0xFFFF0000)] * m.columns]
    if hadamard:
        tops = [q.hadamard_amax(m, [row[k] for row in rows]) for k in range(len(rows[0]))]
        out.append([m.and_(m.pack_round(0.0, functools.reduce(m.fmax_nan, tops)), 0xFFFF0000)] * m.columns)
    return out


@layout.once("tiling")
def quantize(
    x: jax.Array,
    *,
    rows: Rowwise | None = None,
    columns: Columnwise | None = None,
    tiling: Tiling | None = None,
) -> tuple[jax.Array, ...]:
    """The operands asked for, in one read of x: the row carrier, then the column carrier or (codes, scales).

    Carriers are bf16 [tokens, columns]; packed codes uint8 [tokens / 2, columns], scales uint8 [tokens / 16, columns].
    With `codes`: for rows uint8 [tokens, columns / 2] and scales [tokens, columns / 16], for columns uint8 [columns,
    tokens / 2] and [columns, tokens / 16], or tiled scales.
    """
    sides = [side for side in (rows, columns) if side is not None]
    if not sides:
        raise ValueError("quantize was asked for no operand: give rows, columns or both")
    if codes.asked(sides) or not layout.divides(x.shape[1]):
        layout.check(x)
        jobs = [(side, 0) for side in sides]
        run = functools.partial(codes.quantize_made, [x], lambda m, rows: [rows], jobs)
        return run(lanes=_lanes(sides), name=name_of(*sides))
    alone = columns is None
    return quantize_made(
        [x],
        lambda tiles: [tiles],
        [(side, 0) for side in sides],
        tokens=ROW_TOKENS if alone else BLOCK,
        tiling=tiling or (ROW_TILING if alone and x.shape[1] % (32 * ROW_TILING.columns) == 0 else BOTH_TILING),
        name=name_of(*sides),
    )


def quantize_made(
    arrays: Sequence[jax.Array | Layer],
    make: Callable[[list[jax.Array]], Sequence[list[jax.Array]]],
    jobs: Sequence[tuple[Rowwise | Columnwise, int]],
    *,
    tokens: int = BLOCK,
    tiling: Tiling,
    name: str,
) -> tuple[jax.Array, ...]:
    """The operands of `jobs`: (operand, which of the tensors that `make` returns for the tiles of the arrays); each is
    stored before the next begins, which keeps few registers alive.
    """
    layout.check(arrays[0])
    width = arrays[0].shape[1]
    shapes = [side.outputs(tokens) for side, _ in jobs]
    keyed = [i for i, (side, _) in enumerate(jobs) if side.key is not None]
    placed = [i for i in keyed if jobs[i][0].window is not None]
    scalars = [side.scale for side, _ in jobs] + [side.key for side, _ in jobs if side.key is not None]
    scalars += [side.window.origin for side, _ in jobs if side.key is not None and side.window is not None]
    owing, given = [i for i, (side, _) in enumerate(jobs) if side.owed is not None], len(scalars)
    scalars += [side.owed for side, _ in jobs if side.owed is not None]

    def kernel(program, refs, scalar_refs, out_refs, _):
        tensors = make([ref[r] for ref in refs for r in range(tokens)])
        keys = dict(zip(keyed, scalar_refs[len(jobs) :], strict=False))
        origins = dict(zip(placed, scalar_refs[len(jobs) + len(keyed) : given], strict=True))
        owed = dict(zip(owing, scalar_refs[given:], strict=True))
        for i, (side, which) in enumerate(jobs):
            refs_of = (scalar_refs[i], keys.get(i), origins.get(i), owed.get(i))
            made = _quantize_tiles(side, tensors[which], refs_of, program, width, tiling)
            first = sum(len(s) for s in shapes[:i])
            places = [
                (ref, r) for ref, (count, _) in zip(out_refs[first:], shapes[i], strict=False) for r in range(count)
            ]
            for (ref, r), tile in zip(places, made, strict=True):
                ref[r] = tile

    makes = Results([output for shape in shapes for output in shape])
    made = layout.call(kernel, arrays, scalars, makes=makes, rows=tokens, tiling=tiling, name=name)
    return tuple(lax.bitcast_convert_type(a, jnp.uint8) if a.dtype == jnp.int8 else a for a in made)


def _quantize_tiles(
    side: Rowwise | Columnwise,
    tiles: Sequence[jax.Array],
    refs: Sequence[Any],
    program: tuple[jax.Array, jax.Array],
    width: int,
    tiling: Tiling,
) -> list[jax.Array]:
    """The output tiles of one operand of one program. `refs` are those of its scale, its key, its origin and what is
    owed to the tiles.
    """
    tokens = len(tiles)
    scale, key, origin, owed = refs
    given = [scale[entry] for entry in entries(side.rule)]
    read = len(given)
    if key is not None:
        given += random_state((key[0], key[1]), origin, side.window, program, tiles[0].shape, tokens, width)
    drawn = len(given)
    given += [] if owed is None else [owed[0]]

    def body(m, words, given):
        how, seed, random = Quantizer(side.rule, side.rounding, *given[:read]), given[read:drawn], None
        words = q.multiply_rows(m, words, given[drawn:])
        if seed:
            random = q.random_words(m, seed, tokens=tokens, stride=side.window.width if side.window else width)
        if isinstance(side, Columnwise):
            flags = {"hadamard": side.hadamard, "packed": side.packed}
            return q.quantize_columns(m, words, how, random, **flags)
        return q.quantize_rows(m, words, how, random)

    outputs = [dtype for count, dtype in side.outputs(tokens) for _ in range(count)]
    return evaluate(body, tiles, given, outputs=outputs, columns=tiling.columns)


def _lanes(sides: Sequence[Rowwise | Columnwise]) -> Lanes:
    if len(sides) == 1:
        return CODES
    if not codes.asked(sides):
        return BOTH_CARRIERS
    return CODES if any(side.key is not None for side in sides) else BOTH_CODES


def name_of(*sides: Rowwise | Columnwise) -> str:
    parts = ["quantize"]
    for side in sides:
        name = "columns" if isinstance(side, Columnwise) else "rows"
        parts.append(name if side.key is None else f"{name}_stochastic")
        if isinstance(side, Columnwise):
            parts += ["hadamard"] * side.hadamard + ["packed"] * side.packed
        parts += [side.rule.measure] if side.rule.chooses else []
        parts += [] if side.codes is None else ["codes"]
    return "_".join(parts)


def _as_int(word: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(word, jnp.int32)


def random_state(
    key: tuple[jax.Array, jax.Array],
    origin: Any,
    window: Window | None,
    program: tuple[jax.Array, jax.Array],
    shape: tuple[int, ...],
    tokens: int,
    width: int,
) -> list[jax.Array]:
    """Two key words and the counter of each column, int32 scalars and tiles, for the first four tokens of the program;
    for each four tokens, if counters have more than 32 bits.
    """
    i, j = program
    column = lax.broadcasted_iota(jnp.int32, shape, 0) * BLOCK + lax.broadcasted_iota(jnp.int32, shape, 1)
    column = column + j * np.int32(shape[0] * BLOCK)
    row, stride = i * np.int32(tokens // 4), width
    if window is not None:
        first = i * np.int32(tokens)
        sequence, position = first // np.int32(window.local_seq), first % np.int32(window.local_seq)
        token = (origin[0] + sequence) * np.int32(window.seq) + origin[1] + position
        row, column, stride = token // np.int32(4), column + origin[2], window.width
    if window is None or window.words <= 2**32:
        return [_as_int(key[0]), _as_int(key[1]), row * np.int32(stride) + column]
    return [word for group in range(tokens // 4) for word in _wide(key, row + np.int32(group), column, stride)]


def _wide(key: tuple[jax.Array, jax.Array], row: jax.Array, column: jax.Array, stride: int) -> list[jax.Array]:
    """Key words and low halves of the counters row * stride + column, whose high halves go into the key. A lane's
    columns never lie on both sides of a multiple of 2**32, because the stride is a multiple of 16.
    """
    high, low = multiply_high_low(stride, _as_uint(row))
    counter = low + _as_uint(column)
    keys = [wide_key(high + jnp.uint32(carry), *key) for carry in (0, 1)]
    carried = counter < low
    chosen = [jnp.where(carried, after, before) for before, after in zip(*keys, strict=True)]
    return [*map(_as_int, chosen), _as_int(counter)]


def _as_uint(word: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(word, jnp.uint32)


@layout.once("tiling")
def unpack(codes: jax.Array, scales: jax.Array, *, tiling: Tiling = UNPACK_TILING) -> jax.Array:
    """The bf16 carrier [tokens, columns] of a packed columnwise operand."""
    if codes.shape[0] != 8 * scales.shape[0] or codes.shape[1] != scales.shape[1]:
        raise ValueError(f"packed codes {codes.shape} need scales [tokens / 16, columns], got {scales.shape}")

    if not layout.divides(codes.shape[1]):
        return _unpack_any_width(codes, scales)

    def body(m, words, _):
        return q.unpack_columns(m, words[:8], words[8])

    def kernel(_, arrays, __, out_refs, ___):
        tiles = [arrays[0][r] for r in range(8)] + [arrays[1][0]]
        made = evaluate(body, tiles, [], outputs=[jnp.bfloat16] * BLOCK, columns=tiling.columns)
        for r, tile in enumerate(made):
            out_refs[0][r] = tile

    packed = [lax.bitcast_convert_type(a, jnp.int8) for a in (codes, scales)]
    out = Results([(BLOCK, jnp.bfloat16)])
    return layout.call(kernel, packed, [], makes=out, rows=8, tiling=tiling, name="unpack")[0]
