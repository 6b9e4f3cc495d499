"""Quantize passes that find their own addresses: operands as codes, carriers of widths that no tile divides, and those
of SwiGLU's backward pass, which are more than a tile's registers hold.

Codes are what block-scaled tensor cores read: packed E2M1 with the contraction last, and E4M3 scales. How arrays are
read and written is in `rows.py` and `transfer.py`, the arithmetic of codes in `nibbles.py`, that of carriers in
`arithmetic.py`.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from halfbyte.formats import TwoLevel
from halfbyte.formats.noise import ROUNDS
from halfbyte.kernels import arithmetic as q
from halfbyte.kernels import nibbles
from halfbyte.kernels.blocks import Quantizer
from halfbyte.kernels.launch import Lanes, launch
from halfbyte.kernels.machine import Address, Machine, MemoryMachine, Noise, TokenRows, Word, Words
from halfbyte.kernels.place import BLOCK, WARPS, Place, place, prefetch, programs, whole
from halfbyte.kernels.rows import load_rows, store_rows
from halfbyte.kernels.scale import entries
from halfbyte.kernels.scale_order import ScaleOrder
from halfbyte.kernels.stacks import Layer
from halfbyte.kernels.transfer import store_codes, store_turned_codes

FOUR = Lanes(4)


@dataclasses.dataclass(frozen=True)
class Vector:
    """Array number `array`: one vector for all tokens, or a table of `parts` vectors, one for each of so many equal
    parts of the tokens; `entry` is that of the tokens at a place."""

    array: int
    parts: int = 1
    size: int = 0

    def entry(self, m: MemoryMachine, number: int, at: Place) -> Address:
        if self.parts == 1:
            return m.address(self.array, number, 4)
        return m.address(self.array, m.imad(m.divide(at.token, at.tokens // self.parts), self.size, number), 4)


def random_state(
    m: MemoryMachine, key: Vector, origin: Vector | None, window: Any, at: Place
) -> tuple[list[Word], int]:
    """What `arithmetic.random_words` takes, and its stride: for the whole array of which `window` places this part."""
    k0, k1 = m.load(key.entry(m, 0, at), 2)
    row, column, stride = m.shr(at.token, 2), at.column, at.width
    if window is not None and origin is not None:
        begin = [m.load(origin.entry(m, i, at))[0] for i in range(3)]
        sequence, position = m.divide(at.token, window.local_seq), m.remainder(at.token, window.local_seq)
        token = m.iadd(m.imad(m.iadd(begin[0], sequence), window.seq, begin[1]), position)
        row, column, stride = m.shr(token, 2), m.iadd(column, begin[2]), window.width
    if window is None or window.words <= 2**32:
        return [k0, k1, m.imad(row, stride, column)], stride
    wide = [_wide(m, k0, k1, m.iadd(row, group), column, stride) for group in range(BLOCK // 4)]
    return [word for state in wide for word in state], stride


def _wide(m: MemoryMachine, k0: Word, k1: Word, row: Word, column: Word, stride: int) -> list[Word]:
    """Key words and low halves of counters whose high halves go into the key, as `formats.noise.wide_key` has it."""
    if stride % m.columns:
        raise ValueError(f"more than 2**32 random words need a width that is a multiple of {m.columns}, got {stride}")
    low = m.imad(row, stride, 0)
    counter = m.iadd(low, column)
    high = m.iadd(m.multiply_high(row, stride), m.flag(m.less(counter, low)))
    keys = []
    for key, constant in zip((k0, k1), ROUNDS, strict=False):
        mixed = m.xor(q.random_word(m, high, constant, constant), q.random_word(m, m.and_(high, 0), constant, constant))
        keys.append(m.xor(key, mixed))
    return [*keys, counter]


@dataclasses.dataclass(frozen=True)
class Arrays:
    """The numbers of a kernel's arrays: sources, then for each job its scale, key and origin, then its outputs."""

    sources: Sequence[jax.Array | Layer]
    given: list[jax.Array] = dataclasses.field(default_factory=list)
    made: list[jax.ShapeDtypeStruct] = dataclasses.field(default_factory=list)

    def take(self, array: jax.Array | None) -> int | None:
        if array is None:
            return None
        self.given.append(array)
        return len(self.sources) + len(self.given) - 1

    def vector(self, array: jax.Array | None) -> Vector | None:
        number = self.take(array)
        if array is None or number is None:
            return None
        return Vector(number) if array.ndim == 1 else Vector(number, *array.shape)

    def make(self, outputs: Sequence[jax.ShapeDtypeStruct]) -> int:
        """The first of these outputs, counted among the outputs alone."""
        self.made.extend(outputs)
        return len(self.made) - len(outputs)

    @property
    def outputs_begin(self) -> int:
        return len(self.sources) + len(self.given)


def quantize_made(
    arrays: Sequence[jax.Array | Layer],
    make: Callable[[Machine, TokenRows], Sequence[TokenRows]],
    jobs: Sequence[tuple[Any, int]],
    *,
    lanes: Lanes,
    owed: jax.Array | None = None,
    order: Sequence[int] | None = None,
    name: str,
) -> tuple[jax.Array, ...]:
    """The operands of `jobs`: a `Rowwise` or `Columnwise`, and which of the tensors whose 16 rows are returned by
    `make(machine, rows of all arrays)`. `owed`, float32, one an array, multiplies what is read. They are made in
    `order`, which decides how many registers are alive.
    """
    tokens, width = arrays[0].shape
    if arrays[0].dtype != jnp.bfloat16:
        raise TypeError(f"the quantize passes read bfloat16, got {arrays[0].dtype}; convert with astype first")
    known = Arrays(arrays)
    places, factors_at = [_given(known, side) for side, _ in jobs], known.take(owed)
    firsts = [known.make(outputs_of(side, tokens, width)) for side, _ in jobs]
    grid = programs(tokens, width, lanes.columns, tiled=any(s.codes is ScaleOrder.TILED for s, _ in jobs))
    if len(jobs) > 1 and width % lanes.columns and jobs[0][0].codes is None:
        lanes = Lanes(lanes.columns)  # rows that begin anywhere: no lane of a full multiprocessor has the registers

    def body(m: MemoryMachine) -> None:
        at = place(m, tokens, width, grid)
        loaded = _load_all(m, len(arrays), at, 2, factors_at)
        if len(jobs) > 1 and lanes.groups > 1:  # a pass over one operand waits for memory alone
            prefetch(m, len(arrays), tokens, width, grid, 2)
        tensors = make(m, loaded)
        for i in order or range(len(jobs)):
            (side, which), (scale, key, origin, owed_at), first = jobs[i], places[i], firsts[i]
            random = None if key is None else _random(m, key, origin, side.window, at)
            how = quantizer(m, side.rule, side.rounding, scale, at)
            rows = q.multiply_rows(m, tensors[which], _factors(m, owed_at, 1))
            _quantize(m, side, at, rows, how, random, known.outputs_begin + first)

    run = functools.partial(launch, body, [*arrays, *known.given], known.made, programs=grid[0] * grid[1])
    return tuple(run(lanes=lanes, name=name))


def _load_all(m: MemoryMachine, count: int, at: Place, size: int, factors_at: int | None) -> list[list[Word]]:
    """The rows of the first `count` arrays, times the factors of array number `factors_at` if there is one."""
    rows = [row for i in range(count) for row in load_rows(m, i, at, size)]
    if factors_at is None:
        return rows
    factors = _factors(m, factors_at, count)
    return q.multiply_rows(m, rows, factors) if size == 2 else q.multiply_floats(m, rows, factors)


def _factors(m: MemoryMachine, at: int | None, count: int) -> list[Word]:
    """The float32 numbers of array number `at`; none without one."""
    return [] if at is None else [m.real(m.load(m.address(at, i, 4))[0]) for i in range(count)]


def _quantize(
    m: MemoryMachine, side: Any, at: Place, rows: TokenRows, how: Quantizer, random: Noise, output: int
) -> None:
    """Makes one operand and writes it, from output number `output` on."""
    if side.codes is not None and side.along_tokens:
        turned = nibbles.quantize_columns(m, rows, how, random, hadamard=side.hadamard)
        store_turned_codes(m, output, output + 1, at, side.codes, turned)
    elif side.codes is not None:
        store_codes(m, output, output + 1, at, side.codes, nibbles.quantize_rows(m, rows, how, random))
    elif side.along_tokens:
        made = q.quantize_columns(m, rows, how, random, hadamard=side.hadamard, packed=side.packed)
        store_rows(m, output, at, made[:BLOCK] if not side.packed else made[: BLOCK // 2], 1 if side.packed else 2)
        if side.packed:
            store_rows(m, output + 1, at, made[BLOCK // 2 :], 1)
    else:
        store_rows(m, output, at, q.quantize_rows(m, rows, how, random), 2)


def quantizer(m: MemoryMachine, rule: TwoLevel, rounding: str, scale: Vector, at: Place) -> Quantizer:
    """With what it reads of the scale vector."""
    numbers = [m.real(m.load(scale.entry(m, entry, at))[0]) for entry in entries(rule)]
    return Quantizer(rule, rounding, *numbers)


def _random(m: MemoryMachine, key: Vector, origin: Vector | None, window: Any, at: Place) -> list[list[Word]]:
    state, stride = random_state(m, key, origin, window, at)
    return q.random_words(m, state, tokens=BLOCK, stride=stride)


def _given(known: Arrays, side: Any) -> tuple[Any, ...]:
    """The numbers of an operand's scale, key and origin, and of what is owed to it."""
    key, window = side.key, side.window
    origin = None if key is None or window is None else window.origin
    return known.vector(side.scale), known.vector(key), known.vector(origin), known.take(side.owed)


def asked(sides: Sequence[Any]) -> bool:
    """Whether these operands are wanted as codes; all of a call are, or none."""
    kinds = {side.codes is not None for side in sides}
    if len(kinds) > 1:
        raise ValueError("a pass writes carriers or codes: give `codes` to all of its operands, or to none")
    return kinds == {True}


def outputs_of(side: Any, tokens: int, width: int) -> list[jax.ShapeDtypeStruct]:
    """What is written of one operand."""
    if side.codes is None:
        rows = side.outputs(BLOCK)  # of 16 tokens
        dtypes = [jnp.uint8 if dtype == jnp.int8 else dtype for _, dtype in rows]
        return [jax.ShapeDtypeStruct((tokens * n // BLOCK, width), d) for (n, _), d in zip(rows, dtypes, strict=True)]
    blocks, groups = whole(width) // BLOCK, whole(tokens) // BLOCK
    if side.along_tokens:
        shapes = [(width, 8 * groups), side.codes.shape(width, groups)]
    else:
        shapes = [(tokens, 8 * blocks), side.codes.shape(tokens, blocks)]
    return [jax.ShapeDtypeStruct(shape, jnp.uint8) for shape in shapes]


def find_maxima(
    arrays: Sequence[jax.Array | Layer],
    tops: Callable[[Machine, TokenRows], Words],
    count: int,
    *,
    columns: int = 4,
    owed: jax.Array | None = None,
    name: str,
) -> tuple[jax.Array, ...]:
    """int32 bits, one a warp, of the `count` maxima that `tops(machine, rows of all arrays)` finds in each lane. `owed`
    as for `quantize_made`.
    """
    tokens, width = arrays[0].shape
    size = arrays[0].dtype.itemsize
    grid = programs(tokens, width, columns)
    known = Arrays(arrays)
    factors_at = known.take(owed)

    def body(m: MemoryMachine) -> None:
        at = place(m, tokens, width, grid)
        found = tops(m, _load_all(m, len(arrays), at, size, factors_at))
        store_maxima(m, known.outputs_begin, found)

    programs_all = grid[0] * grid[1]
    outputs = [jax.ShapeDtypeStruct((programs_all * WARPS,), jnp.int32)] * count
    run = functools.partial(launch, body, [*arrays, *known.given], outputs, programs=programs_all)
    return tuple(run(lanes=Lanes(columns), name=name))


def store_maxima(m: MemoryMachine, first: int, found: Words) -> None:
    """Writes the bits of each of `found`'s maxima over the lanes of a warp, from array number `first` on."""
    lane, warp = m.and_(m.thread(), 31), m.shr(m.thread(), 5)
    for i, top in enumerate(found):
        bits = m.bits(top)
        for bit in (16, 8, 4, 2, 1):
            bits = m.bits(m.fmax_nan(m.real(bits), m.real(m.swap(bits, bit))))
        m.store(m.address(first + i, m.imad(m.program(), WARPS, warp), 4), [bits], where=m.less(lane, 1))


def unpack(codes: jax.Array, scales: jax.Array) -> jax.Array:
    """The bf16 carrier [tokens, columns] of codes [tokens / 2, columns] and scales [tokens / 16, columns]."""
    tokens, width = 2 * codes.shape[0], codes.shape[1]
    grid = programs(tokens, width, 4)

    def body(m: MemoryMachine) -> None:
        at = place(m, tokens, width, grid)
        code_rows, scale_rows = load_rows(m, 0, at, 1, rows=BLOCK // 2), load_rows(m, 1, at, 1, rows=1)
        store_rows(m, 2, at, q.unpack_columns(m, code_rows, scale_rows[0]), 2)

    outputs = [jax.ShapeDtypeStruct((tokens, width), jnp.bfloat16)]
    run = functools.partial(launch, body, [codes, scales], outputs, programs=grid[0] * grid[1])
    return run(lanes=FOUR, name="unpack")[0]


def weight_rows(
    w: jax.Array,
    scalars: Sequence[jax.Array],
    outputs: Sequence[tuple[int, DTypeLike]],
    made: Callable[[Machine, TokenRows, Quantizer], TokenRows],
    rule: TwoLevel,
    *,
    name: str,
    rounding: str = "rne",
) -> list[jax.Array]:
    """What is `made` of each 16 rows of float32 w [k, n] with `scalars`, its scale vector and what is owed to it, if
    anything is: (rows of 16, dtype) for each output.
    """
    k, n = w.shape
    grid = programs(k, n, 4)
    arrays = [w, *scalars]
    owed_at = 2 if len(scalars) > 1 else None

    def body(m: MemoryMachine) -> None:
        at = place(m, k, n, grid)
        read = [[m.real(x) for x in row] for row in _load_all(m, 1, at, 4, owed_at)]
        rows = made(m, read, quantizer(m, rule, rounding, Vector(1), at))
        for i, (count, dtype) in enumerate(outputs):
            first = sum(rows for rows, _ in outputs[:i])
            store_rows(m, len(arrays) + i, at, rows[first : first + count], jnp.dtype(dtype).itemsize)

    shapes = [jax.ShapeDtypeStruct((whole(k) * count // BLOCK, n), dtype) for count, dtype in outputs]
    return launch(body, arrays, shapes, programs=grid[0] * grid[1], lanes=FOUR, name=name)
