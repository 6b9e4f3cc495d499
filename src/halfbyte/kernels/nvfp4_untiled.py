"""Untiled quantize passes, which compute their own addresses: packed codes, block-dequantized operands of widths that
no tile divides, and those of SwiGLU's backward pass, which exceed a tile's registers.

Codes are what block-scaled tensor cores read: packed E2M1, K-major, and E4M3 scales. `row_access.py` loads and stores
rows, `packed_codes.py` encodes and stores codes, `nvfp4_arithmetic.py` computes block-dequantized rows.
`mosaic_launch.py` states why these passes are untiled.
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
    """Array number `array`: one vector for all tokens, or a table of `num_vectors`, one per equal part of the tokens.

    `entry` returns the address of an entry of the vector for the tokens at a position.
    """

    array: int
    num_vectors: int = 1
    size: int = 0

    def entry(self, m: LaneMemoryOps, entry: int, pos: LanePosition) -> Address:
        if self.num_vectors == 1:
            return m.address(self.array, entry, 4)
        return m.address(
            self.array, m.imad(m.u32_div_const(pos.token, pos.tokens // self.num_vectors), self.size, entry), 4
        )


def untiled_random_state(
    m: LaneMemoryOps, key: ScaleVectorArg, origin: ScaleVectorArg | None, window: Any, pos: LanePosition
) -> tuple[list[Word], int]:
    """Returns (state, stride) for `nvfp4_arithmetic.random_words`; `window` is the shard's position, if any."""
    k0, k1 = m.load(key.entry(m, 0, pos), 2)
    row, column, stride = m.shr(pos.token, 2), pos.column, pos.width
    if window is not None and origin is not None:
        begin = [m.load(origin.entry(m, i, pos))[0] for i in range(3)]
        sequence, position = m.u32_div_const(pos.token, window.local_seq), m.u32_mod_const(pos.token, window.local_seq)
        token = m.iadd(m.imad(m.iadd(begin[0], sequence), window.seq, begin[1]), position)
        row, column, stride = m.shr(token, 2), m.iadd(column, begin[2]), window.width
    if window is None or window.words_per_row <= 2**32:
        return [k0, k1, m.imad(row, stride, column)], stride
    states = [_key_for_high_counter(m, k0, k1, m.iadd(row, group), column, stride) for group in range(TOKEN_BLOCK // 4)]
    return [word for state in states for word in state], stride


def _key_for_high_counter(m: LaneMemoryOps, k0: Word, k1: Word, row: Word, column: Word, stride: int) -> list[Word]:
    """Returns key words and the low half of a 64-bit counter, whose high half is mixed into the key, as
    `random_bits.key_for_high_counter`.
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
    """Array numbers of a kernel: sources, then scale, key, origin and deferred alpha of each job, then outputs."""

    sources: Sequence[jax.Array | StackSlice]
    inputs: list[jax.Array] = dataclasses.field(default_factory=list)
    output_shapes: list[jax.ShapeDtypeStruct] = dataclasses.field(default_factory=list)

    def add_input(self, array: jax.Array | None) -> int | None:
        if array is None:
            return None
        self.inputs.append(array)
        return len(self.sources) + len(self.inputs) - 1

    def vector(self, array: jax.Array | None) -> ScaleVectorArg | None:
        index = self.add_input(array)
        if array is None or index is None:
            return None
        return ScaleVectorArg(index) if array.ndim == 1 else ScaleVectorArg(index, *array.shape)

    def add_outputs(self, outputs: Sequence[jax.ShapeDtypeStruct]) -> int:
        """Adds outputs; returns the index of the first, counted among the outputs only."""
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
    """Returns the operands of `jobs`.

    A job is a `RowwiseOperand` or `ColumnwiseOperand`, and the index of its tensor among those whose 16 rows
    `make(lane_ops, rows of all arrays)` returns. `deferred_alpha`, float32, one per array, multiplies the arrays.
    Operands are computed in `order`, which decides how many registers are alive.
    """
    tokens, width = arrays[0].shape
    if arrays[0].dtype != jnp.bfloat16:
        raise TypeError(f"the quantize passes read bfloat16, got {arrays[0].dtype}; convert with astype first")
    args = KernelArrays(arrays)
    job_args, alphas_arg = [_operand_array_ids(args, side) for side, _ in jobs], args.add_input(deferred_alpha)
    first_outputs = [args.add_outputs(operand_outputs(side, tokens, width)) for side, _ in jobs]
    grid = program_grid(
        tokens, width, lanes.columns, tiled=any(s.code_scale_layout is ScaleLayout.TILED for s, _ in jobs)
    )
    if len(jobs) > 1 and width % lanes.columns and jobs[0][0].code_scale_layout is None:
        lanes = LaunchConfig(
            lanes.columns
        )  # unaligned rows: their masks and shifts need the registers of one program per SM (docs/LOG.md)

    def body(m: LaneMemoryOps) -> None:
        pos = lane_position(m, tokens, width, grid)
        rows_of_arrays = _load_all(m, len(arrays), pos, 2, alphas_arg)
        if len(jobs) > 1 and lanes.programs_per_sm > 1:  # one operand is bound by memory: prefetching costs 7%
            prefetch_next_program(m, len(arrays), tokens, width, grid, 2)
        tensors = make(m, rows_of_arrays)
        for i in order or range(len(jobs)):
            (side, tensor_index), (scale, key, origin, alpha_arg), first_output = jobs[i], job_args[i], first_outputs[i]
            random = None if key is None else _random(m, key, origin, side.window, pos)
            quantizer = load_quantizer(m, side.rule, side.rounding, scale, pos)
            rows = q.apply_deferred_alpha_bf16(m, tensors[tensor_index], _load_alphas(m, alpha_arg, 1))
            _quantize(m, side, pos, rows, quantizer, random, args.outputs_begin + first_output)

    run = functools.partial(launch_flat, body, [*arrays, *args.inputs], args.output_shapes, programs=grid[0] * grid[1])
    return tuple(run(lanes=lanes, name=name))


def _load_all(m: LaneMemoryOps, count: int, pos: LanePosition, size: int, alphas_arg: int | None) -> list[list[Word]]:
    """Loads the rows of the first `count` arrays, times the deferred alphas of array number `alphas_arg`, if any."""
    rows = [row for i in range(count) for row in load_rows(m, i, pos, size)]
    if alphas_arg is None:
        return rows
    alphas = _load_alphas(m, alphas_arg, count)
    return q.apply_deferred_alpha_bf16(m, rows, alphas) if size == 2 else q.apply_deferred_alpha_f32(m, rows, alphas)


def _load_alphas(m: LaneMemoryOps, array: int | None, count: int) -> list[Word]:
    """Returns the float32 deferred alphas of array number `array`; none if it is None."""
    return [] if array is None else [m.as_f32(m.load(m.address(array, i, 4))[0]) for i in range(count)]


def _quantize(
    m: LaneMemoryOps,
    side: Any,
    pos: LanePosition,
    rows: TokenRows,
    quantizer: KernelQuantizer,
    random: RandomWords,
    output: int,
) -> None:
    """Computes one operand and stores it in outputs `output` and, for scales, `output + 1`."""
    if side.code_scale_layout is not None and side.along_tokens:
        transposed = packed_codes.quantize_columns_to_codes(m, rows, quantizer, random, hadamard=side.hadamard)
        store_transposed_codes(m, output, output + 1, pos, side.code_scale_layout, transposed)
    elif side.code_scale_layout is not None:
        store_row_codes(
            m,
            output,
            output + 1,
            pos,
            side.code_scale_layout,
            packed_codes.quantize_rows_to_codes(m, rows, quantizer, random),
        )
    elif side.along_tokens:
        columns = q.quantize_columns_to_bf16(m, rows, quantizer, random, hadamard=side.hadamard, packed=side.packed)
        store_rows(
            m,
            output,
            pos,
            columns[:TOKEN_BLOCK] if not side.packed else columns[: TOKEN_BLOCK // 2],
            1 if side.packed else 2,
        )
        if side.packed:
            store_rows(m, output + 1, pos, columns[TOKEN_BLOCK // 2 :], 1)
    else:
        store_rows(m, output, pos, q.quantize_rows_to_bf16(m, rows, quantizer, random), 2)


def load_quantizer(
    m: LaneMemoryOps, rule: TwoLevelScale, rounding: str, scale: ScaleVectorArg, pos: LanePosition
) -> KernelQuantizer:
    """Returns the quantizer, with its entries loaded from the scale vector."""
    entries = [m.as_f32(m.load(scale.entry(m, entry, pos))[0]) for entry in quantizer_entries(rule)]
    return KernelQuantizer(rule, rounding, *entries)


def _random(
    m: LaneMemoryOps, key: ScaleVectorArg, origin: ScaleVectorArg | None, window: Any, pos: LanePosition
) -> list[list[Word]]:
    state, stride = untiled_random_state(m, key, origin, window, pos)
    return q.random_words(m, state, tokens=TOKEN_BLOCK, stride=stride)


def _operand_array_ids(args: KernelArrays, side: Any) -> tuple[Any, ...]:
    """Returns the array numbers of an operand's scale, key, origin and deferred alpha; None where it has none."""
    key, window = side.key, side.window
    origin = None if key is None or window is None else window.origin
    return args.vector(side.scale), args.vector(key), args.vector(origin), args.add_input(side.deferred_alpha)


def wants_codes(sides: Sequence[Any]) -> bool:
    """Returns True if these operands are codes; raises ValueError if only some are."""
    kinds = {side.code_scale_layout is not None for side in sides}
    if len(kinds) > 1:
        raise ValueError("a pass writes carriers or codes: give `codes` to all of its operands, or to none")
    return kinds == {True}


def operand_outputs(side: Any, tokens: int, width: int) -> list[jax.ShapeDtypeStruct]:
    """Returns the outputs of one operand."""
    if side.code_scale_layout is None:
        rows = side.outputs(TOKEN_BLOCK)  # (rows, dtype) per 16 tokens
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
    """Returns int32 bits, one per warp, of `count` amaxes; `tops(lane_ops, rows of all arrays)` returns a lane's.

    `deferred_alpha` as for `quantize_untiled`.
    """
    tokens, width = arrays[0].shape
    size = arrays[0].dtype.itemsize
    grid = program_grid(tokens, width, columns)
    args = KernelArrays(arrays)
    alphas_arg = args.add_input(deferred_alpha)

    def body(m: LaneMemoryOps) -> None:
        pos = lane_position(m, tokens, width, grid)
        amaxes = tops(m, _load_all(m, len(arrays), pos, size, alphas_arg))
        store_amaxes(m, args.outputs_begin, amaxes)

    num_programs = grid[0] * grid[1]
    outputs = [jax.ShapeDtypeStruct((num_programs * WARPS,), jnp.int32)] * count
    run = functools.partial(launch_flat, body, [*arrays, *args.inputs], outputs, programs=num_programs)
    return tuple(run(lanes=LaunchConfig(columns), name=name))


def store_amaxes(m: LaneMemoryOps, first: int, amaxes: Words) -> None:
    """Reduces each amax over the lanes of the warp and stores its bits, in array numbers from `first` on."""
    lane, warp = m.and_(m.thread_id(), 31), m.shr(m.thread_id(), 5)
    for i, amax in enumerate(amaxes):
        bits = m.as_u32(amax)
        for bit in (16, 8, 4, 2, 1):
            bits = m.as_u32(m.fmax_nan(m.as_f32(bits), m.as_f32(m.shuffle_xor(bits, bit))))
        m.store(m.address(first + i, m.imad(m.program_id(), WARPS, warp), 4), [bits], where=m.less(lane, 1))


def unpack_untiled(codes: jax.Array, scales: jax.Array) -> jax.Array:
    """Returns block-dequantized bf16 [tokens, columns]; codes [tokens / 2, columns], scales [tokens / 16, columns]."""
    tokens, width = 2 * codes.shape[0], codes.shape[1]
    grid = program_grid(tokens, width, 4)

    def body(m: LaneMemoryOps) -> None:
        pos = lane_position(m, tokens, width, grid)
        code_rows, scale_rows = load_rows(m, 0, pos, 1, rows=TOKEN_BLOCK // 2), load_rows(m, 1, pos, 1, rows=1)
        store_rows(m, 2, pos, q.unpack_columns(m, code_rows, scale_rows[0]), 2)

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
    """Applies `transform` to every 16 rows of w, float32 [k, n].

    `scalars` are its scale vector and, if any, its deferred alpha; `outputs` are (rows per 16 rows of w, dtype).
    """
    k, n = w.shape
    grid = program_grid(k, n, 4)
    arrays = [w, *scalars]
    alpha_arg = 2 if len(scalars) > 1 else None

    def body(m: LaneMemoryOps) -> None:
        pos = lane_position(m, k, n, grid)
        rows_f32 = [[m.as_f32(x) for x in row] for row in _load_all(m, 1, pos, 4, alpha_arg)]
        rows = transform(m, rows_f32, load_quantizer(m, rule, rounding, ScaleVectorArg(1), pos))
        for i, (count, dtype) in enumerate(outputs):
            begin = sum(rows for rows, _ in outputs[:i])
            store_rows(m, len(arrays) + i, pos, rows[begin : begin + count], jnp.dtype(dtype).itemsize)

    shapes = [jax.ShapeDtypeStruct((round_up(k) * count // TOKEN_BLOCK, n), dtype) for count, dtype in outputs]
    return launch_flat(body, arrays, shapes, programs=grid[0] * grid[1], lanes=FOUR_COLUMNS_LAUNCH, name=name)
