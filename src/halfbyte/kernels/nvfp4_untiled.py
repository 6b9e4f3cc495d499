"""Quantize passes without tiles, which compute their own addresses: operands as codes, carriers of widths that no tile
divides, and those of SwiGLU's backward pass, which exceed a tile's registers.

Codes are what block-scaled tensor cores read: packed E2M1 with the contraction last, and E4M3 scales. `row_access.py`
loads and stores rows, `packed_codes.py` encodes and stores codes, `nvfp4_arithmetic.py` computes carriers.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from halfbyte.formats import TwoLevelScale
from halfbyte.formats.random_bits import ROUNDS
from halfbyte.kernels import nvfp4_arithmetic as q
from halfbyte.kernels import packed_codes
from halfbyte.kernels.block_scales import KernelQuantizer
from halfbyte.kernels.lane_ops import Address, LaneMemoryOps, LaneOps, RandomWords, TokenRows, Word, Words
from halfbyte.kernels.mosaic_launch import LaunchConfig, StackSlice, launch_flat
from halfbyte.kernels.packed_codes import ScaleLayout, store_row_codes, store_transposed_codes
from halfbyte.kernels.row_access import (
    TOKEN_BLOCK,
    WARPS,
    LanePosition,
    lane_position,
    load_rows,
    prefetch_next_program,
    program_grid,
    round_up,
    store_rows,
)
from halfbyte.kernels.tensor_scale_kernel import quantizer_entries

FOUR_COLUMNS_LAUNCH = LaunchConfig(4)


@dataclasses.dataclass(frozen=True)
class ScaleVectorArg:
    """Array number `array`: one vector for all tokens, or a table of `num_vectors`, one for each of so many equal parts
    of the tokens; `entry` returns the address for the tokens at a position."""

    array: int
    num_vectors: int = 1
    size: int = 0

    def entry(self, m: LaneMemoryOps, number: int, at: LanePosition) -> Address:
        if self.num_vectors == 1:
            return m.address(self.array, number, 4)
        return m.address(
            self.array, m.imad(m.u32_div_const(at.token, at.tokens // self.num_vectors), self.size, number), 4
        )


def untiled_random_state(
    m: LaneMemoryOps, key: ScaleVectorArg, origin: ScaleVectorArg | None, window: Any, at: LanePosition
) -> tuple[list[Word], int]:
    """Returns the state and stride for `nvfp4_arithmetic.random_words`; `window` is the part of the whole array."""
    k0, k1 = m.load(key.entry(m, 0, at), 2)
    row, column, stride = m.shr(at.token, 2), at.column, at.width
    if window is not None and origin is not None:
        begin = [m.load(origin.entry(m, i, at))[0] for i in range(3)]
        sequence, position = m.u32_div_const(at.token, window.local_seq), m.u32_mod_const(at.token, window.local_seq)
        token = m.iadd(m.imad(m.iadd(begin[0], sequence), window.seq, begin[1]), position)
        row, column, stride = m.shr(token, 2), m.iadd(column, begin[2]), window.width
    if window is None or window.words_per_row <= 2**32:
        return [k0, k1, m.imad(row, stride, column)], stride
    wide = [_key_for_high_counter(m, k0, k1, m.iadd(row, group), column, stride) for group in range(TOKEN_BLOCK // 4)]
    return [word for state in wide for word in state], stride


def _key_for_high_counter(m: LaneMemoryOps, k0: Word, k1: Word, row: Word, column: Word, stride: int) -> list[Word]:
    """Key words and low halves of counters whose high halves go into the key, as `random_bits.key_for_high_counter`
    does.
    """
    if stride % m.columns:
        raise ValueError(f"more than 2**32 random words need a width that is a multiple of {m.columns}, got {stride}")
    low = m.imad(row, stride, 0)
    counter = m.iadd(low, column)
    high = m.iadd(m.multiply_high(row, stride), m.predicate_to_u32(m.less(counter, low)))
    keys = []
    for key, constant in zip((k0, k1), ROUNDS, strict=False):
        mixed = m.xor(
            q.counter_hash_word(m, high, constant, constant),
            q.counter_hash_word(m, m.and_(high, 0), constant, constant),
        )
        keys.append(m.xor(key, mixed))
    return [*keys, counter]


@dataclasses.dataclass(frozen=True)
class KernelArrays:
    """Indices of a kernel's arrays: sources, then for each job its scale, key and origin, then its outputs."""

    sources: Sequence[jax.Array | StackSlice]
    inputs: list[jax.Array] = dataclasses.field(default_factory=list)
    output_shapes: list[jax.ShapeDtypeStruct] = dataclasses.field(default_factory=list)

    def add_input(self, array: jax.Array | None) -> int | None:
        if array is None:
            return None
        self.inputs.append(array)
        return len(self.sources) + len(self.inputs) - 1

    def vector(self, array: jax.Array | None) -> ScaleVectorArg | None:
        number = self.add_input(array)
        if array is None or number is None:
            return None
        return ScaleVectorArg(number) if array.ndim == 1 else ScaleVectorArg(number, *array.shape)

    def add_outputs(self, outputs: Sequence[jax.ShapeDtypeStruct]) -> int:
        """The first of these outputs, counted among the outputs alone."""
        self.output_shapes.extend(outputs)
        return len(self.output_shapes) - len(outputs)

    @property
    def outputs_begin(self) -> int:
        return len(self.sources) + len(self.inputs)


def quantize_untiled(
    arrays: Sequence[jax.Array | StackSlice],
    make: Callable[[LaneOps, TokenRows], Sequence[TokenRows]],
    jobs: Sequence[tuple[Any, int]],
    *,
    lanes: LaunchConfig,
    deferred_alpha: jax.Array | None = None,
    order: Sequence[int] | None = None,
    name: str,
) -> tuple[jax.Array, ...]:
    """Returns the operands of `jobs`: a `RowwiseOperand` or `ColumnwiseOperand`, and the index of its tensor among
    those whose 16 rows `make(lane_ops, rows of all arrays)` returns. `deferred_alpha`, float32, one per array,
    multiplies the arrays. Operands are computed in `order`, which decides how many registers are alive.
    """
    tokens, width = arrays[0].shape
    if arrays[0].dtype != jnp.bfloat16:
        raise TypeError(f"the quantize passes read bfloat16, got {arrays[0].dtype}; convert with astype first")
    known = KernelArrays(arrays)
    places, factors_at = [_operand_array_ids(known, side) for side, _ in jobs], known.add_input(deferred_alpha)
    firsts = [known.add_outputs(operand_outputs(side, tokens, width)) for side, _ in jobs]
    grid = program_grid(
        tokens, width, lanes.columns, tiled=any(s.code_scale_layout is ScaleLayout.TILED for s, _ in jobs)
    )
    if len(jobs) > 1 and width % lanes.columns and jobs[0][0].code_scale_layout is None:
        lanes = LaunchConfig(
            lanes.columns
        )  # rows that begin anywhere: no lane of a full multiprocessor has the registers

    def body(m: LaneMemoryOps) -> None:
        at = lane_position(m, tokens, width, grid)
        loaded = _load_all(m, len(arrays), at, 2, factors_at)
        if len(jobs) > 1 and lanes.programs_per_sm > 1:  # a pass over one operand waits for memory alone
            prefetch_next_program(m, len(arrays), tokens, width, grid, 2)
        tensors = make(m, loaded)
        for i in order or range(len(jobs)):
            (side, which), (scale, key, origin, alpha_at), first = jobs[i], places[i], firsts[i]
            random = None if key is None else _random(m, key, origin, side.window, at)
            quantizer = load_quantizer(m, side.rule, side.rounding, scale, at)
            rows = q.apply_deferred_alpha_bf16(m, tensors[which], _factors(m, alpha_at, 1))
            _quantize(m, side, at, rows, quantizer, random, known.outputs_begin + first)

    run = functools.partial(
        launch_flat, body, [*arrays, *known.inputs], known.output_shapes, programs=grid[0] * grid[1]
    )
    return tuple(run(lanes=lanes, name=name))


def _load_all(m: LaneMemoryOps, count: int, at: LanePosition, size: int, factors_at: int | None) -> list[list[Word]]:
    """The rows of the first `count` arrays, times the factors of array number `factors_at` if there is one."""
    rows = [row for i in range(count) for row in load_rows(m, i, at, size)]
    if factors_at is None:
        return rows
    factors = _factors(m, factors_at, count)
    return q.apply_deferred_alpha_bf16(m, rows, factors) if size == 2 else q.apply_deferred_alpha_f32(m, rows, factors)


def _factors(m: LaneMemoryOps, at: int | None, count: int) -> list[Word]:
    """Returns the float32 numbers of array number `at`; none if it is None."""
    return [] if at is None else [m.as_f32(m.load(m.address(at, i, 4))[0]) for i in range(count)]


def _quantize(
    m: LaneMemoryOps,
    side: Any,
    at: LanePosition,
    rows: TokenRows,
    quantizer: KernelQuantizer,
    random: RandomWords,
    output: int,
) -> None:
    """Computes one operand and stores it, from output number `output` on."""
    if side.code_scale_layout is not None and side.along_tokens:
        transposed = packed_codes.quantize_columns_to_codes(m, rows, quantizer, random, hadamard=side.hadamard)
        store_transposed_codes(m, output, output + 1, at, side.code_scale_layout, transposed)
    elif side.code_scale_layout is not None:
        store_row_codes(
            m,
            output,
            output + 1,
            at,
            side.code_scale_layout,
            packed_codes.quantize_rows_to_codes(m, rows, quantizer, random),
        )
    elif side.along_tokens:
        made = q.quantize_columns_to_bf16(m, rows, quantizer, random, hadamard=side.hadamard, packed=side.packed)
        store_rows(
            m, output, at, made[:TOKEN_BLOCK] if not side.packed else made[: TOKEN_BLOCK // 2], 1 if side.packed else 2
        )
        if side.packed:
            store_rows(m, output + 1, at, made[TOKEN_BLOCK // 2 :], 1)
    else:
        store_rows(m, output, at, q.quantize_rows_to_bf16(m, rows, quantizer, random), 2)


def load_quantizer(
    m: LaneMemoryOps, rule: TwoLevelScale, rounding: str, scale: ScaleVectorArg, at: LanePosition
) -> KernelQuantizer:
    """Returns the quantizer with its entries of the scale vector."""
    numbers = [m.as_f32(m.load(scale.entry(m, entry, at))[0]) for entry in quantizer_entries(rule)]
    return KernelQuantizer(rule, rounding, *numbers)


def _random(
    m: LaneMemoryOps, key: ScaleVectorArg, origin: ScaleVectorArg | None, window: Any, at: LanePosition
) -> list[list[Word]]:
    state, stride = untiled_random_state(m, key, origin, window, at)
    return q.random_words(m, state, tokens=TOKEN_BLOCK, stride=stride)


def _operand_array_ids(known: KernelArrays, side: Any) -> tuple[Any, ...]:
    """Returns the array indices of an operand's scale, key, origin and deferred alpha."""
    key, window = side.key, side.window
    origin = None if key is None or window is None else window.origin
    return known.vector(side.scale), known.vector(key), known.vector(origin), known.add_input(side.deferred_alpha)


def wants_codes(sides: Sequence[Any]) -> bool:
    """Returns whether these operands are codes; all of a call are, or none."""
    kinds = {side.code_scale_layout is not None for side in sides}
    if len(kinds) > 1:
        raise ValueError("a pass writes carriers or codes: give `codes` to all of its operands, or to none")
    return kinds == {True}


def operand_outputs(side: Any, tokens: int, width: int) -> list[jax.ShapeDtypeStruct]:
    """Returns the outputs of one operand."""
    if side.code_scale_layout is None:
        rows = side.outputs(TOKEN_BLOCK)  # of 16 tokens
        dtypes = [jnp.uint8 if dtype == jnp.int8 else dtype for _, dtype in rows]
        return [
            jax.ShapeDtypeStruct((tokens * n // TOKEN_BLOCK, width), d) for (n, _), d in zip(rows, dtypes, strict=True)
        ]
    blocks, groups = round_up(width) // TOKEN_BLOCK, round_up(tokens) // TOKEN_BLOCK
    if side.along_tokens:
        shapes = [(width, 8 * groups), side.code_scale_layout.shape(width, groups)]
    else:
        shapes = [(tokens, 8 * blocks), side.code_scale_layout.shape(tokens, blocks)]
    return [jax.ShapeDtypeStruct(shape, jnp.uint8) for shape in shapes]


def untiled_partial_amax(
    arrays: Sequence[jax.Array | StackSlice],
    tops: Callable[[LaneOps, TokenRows], Words],
    count: int,
    *,
    columns: int = 4,
    deferred_alpha: jax.Array | None = None,
    name: str,
) -> tuple[jax.Array, ...]:
    """Returns int32 bits, one per warp, of the `count` amaxes that `tops(lane_ops, rows of all arrays)` returns for
    each lane. `deferred_alpha` as for `quantize_untiled`.
    """
    tokens, width = arrays[0].shape
    size = arrays[0].dtype.itemsize
    grid = program_grid(tokens, width, columns)
    known = KernelArrays(arrays)
    factors_at = known.add_input(deferred_alpha)

    def body(m: LaneMemoryOps) -> None:
        at = lane_position(m, tokens, width, grid)
        amaxes = tops(m, _load_all(m, len(arrays), at, size, factors_at))
        store_amaxes(m, known.outputs_begin, amaxes)

    programs_all = grid[0] * grid[1]
    outputs = [jax.ShapeDtypeStruct((programs_all * WARPS,), jnp.int32)] * count
    run = functools.partial(launch_flat, body, [*arrays, *known.inputs], outputs, programs=programs_all)
    return tuple(run(lanes=LaunchConfig(columns), name=name))


def store_amaxes(m: LaneMemoryOps, first: int, amaxes: Words) -> None:
    """Stores the bits of each amax over the lanes of a warp, from array number `first` on."""
    lane, warp = m.and_(m.thread_id(), 31), m.shr(m.thread_id(), 5)
    for i, top in enumerate(amaxes):
        bits = m.as_u32(top)
        for bit in (16, 8, 4, 2, 1):
            bits = m.as_u32(m.fmax_nan(m.as_f32(bits), m.as_f32(m.shuffle_xor(bits, bit))))
        m.store(m.address(first + i, m.imad(m.program_id(), WARPS, warp), 4), [bits], where=m.less(lane, 1))


def unpack_untiled(codes: jax.Array, scales: jax.Array) -> jax.Array:
    """The bf16 carrier [tokens, columns] of codes [tokens / 2, columns] and scales [tokens / 16, columns]."""
    tokens, width = 2 * codes.shape[0], codes.shape[1]
    grid = program_grid(tokens, width, 4)

    def body(m: LaneMemoryOps) -> None:
        at = lane_position(m, tokens, width, grid)
        code_rows, scale_rows = load_rows(m, 0, at, 1, rows=TOKEN_BLOCK // 2), load_rows(m, 1, at, 1, rows=1)
        store_rows(m, 2, at, q.unpack_columns(m, code_rows, scale_rows[0]), 2)

    outputs = [jax.ShapeDtypeStruct((tokens, width), jnp.bfloat16)]
    run = functools.partial(launch_flat, body, [codes, scales], outputs, programs=grid[0] * grid[1])
    return run(lanes=FOUR_COLUMNS_LAUNCH, name="unpack")[0]


def quantize_weight_rows(
    w: jax.Array,
    scalars: Sequence[jax.Array],
    outputs: Sequence[tuple[int, DTypeLike]],
    transform: Callable[[LaneOps, TokenRows, KernelQuantizer], TokenRows],
    rule: TwoLevelScale,
    *,
    name: str,
    rounding: str = "rne",
) -> list[jax.Array]:
    """Applies `transform` to each 16 rows of float32 w [k, n] with `scalars`: its scale vector, and its deferred alpha
    if there is one. `outputs` are (rows per 16, dtype) each.
    """
    k, n = w.shape
    grid = program_grid(k, n, 4)
    arrays = [w, *scalars]
    alpha_at = 2 if len(scalars) > 1 else None

    def body(m: LaneMemoryOps) -> None:
        at = lane_position(m, k, n, grid)
        read = [[m.as_f32(x) for x in row] for row in _load_all(m, 1, at, 4, alpha_at)]
        rows = transform(m, read, load_quantizer(m, rule, rounding, ScaleVectorArg(1), at))
        for i, (count, dtype) in enumerate(outputs):
            first = sum(rows for rows, _ in outputs[:i])
            store_rows(m, len(arrays) + i, at, rows[first : first + count], jnp.dtype(dtype).itemsize)

    shapes = [jax.ShapeDtypeStruct((round_up(k) * count // TOKEN_BLOCK, n), dtype) for count, dtype in outputs]
    return launch_flat(body, arrays, shapes, programs=grid[0] * grid[1], lanes=FOUR_COLUMNS_LAUNCH, name=name)
