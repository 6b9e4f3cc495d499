"""NVFP4 quantize passes over a token-major bf16 array [tokens, columns], as Pallas Triton kernels.

`partial_amax` reads x for the amaxes of x and of its Hadamard transform along tokens; the per-tensor scale depends on
all of x. `quantize_tiled` reads it again and writes the rowwise operand (blocks of 16 columns), the columnwise one
(blocks of 16 tokens, with or without the transform), or both, at 0.83 to 1.00 of a copy's bandwidth (docs/speed.md).

Each token row of a tile is a [blocks, 16] register tile, so the token axis is in the lane: columnwise amaxes and the
transform need no transpose in memory. Each operand is one inline-PTX block (`nvfp4_arithmetic.py`); one block for both
keeps all outputs alive, 152 registers instead of 123 (docs/LOG.md). Unlike Transformer Engine, which stores codes, the
default output is block-dequantized for the emulated GEMM (`code * block_scale` in bf16, exact) and token-major, since
wgrad contracts over tokens in either layout. Residuals are packed: two tokens per byte, the even one in the low nibble.

Random bits: element (t, n) takes byte t % 4 of the word of counter (t // 4) * columns + n, where t, n and columns are
those of the global array; a `GlobalWindow` is the position of a shard in it.
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

from halfbyte.formats import TwoLevelScale
from halfbyte.formats.random_bits import key_for_high_counter, multiply_high_low
from halfbyte.formats.scale_rules import TWO_LEVEL
from halfbyte.kernels import nvfp4_arithmetic as q
from halfbyte.kernels import nvfp4_untiled, triton_launch
from halfbyte.kernels.block_scales import KernelQuantizer
from halfbyte.kernels.lane_ops import LaneOps, TokenRows, Word
from halfbyte.kernels.mosaic_launch import LaunchConfig, StackSlice, materialize_slice
from halfbyte.kernels.packed_codes import ScaleLayout
from halfbyte.kernels.tensor_scale_kernel import quantizer_entries
from halfbyte.kernels.triton_launch import NVFP4_BLOCK, PassTiling, TiledOutputs, emit_tile_body

AMAX_TILING = PassTiling(4, 4)
ROW_TILING = PassTiling(8, 4)
BOTH_TILING = PassTiling(4, 4)
UNPACK_TILING = PassTiling(4, 4)
ROW_TOKENS = 8  # tokens per program of the rowwise-only pass
CODES_LAUNCH = LaunchConfig(4, 4)
ROW_COLUMN_CODES_LAUNCH = LaunchConfig(2, 8)  # RNE: fewer registers, more warps; gains most on narrow arrays
ROW_COLUMN_BF16_LAUNCH = LaunchConfig(4, 2)  # 255 registers per lane; four programs per SM would leave 128
STATIC_FIELD = {"static": True}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GlobalWindow:
    """Position of a shard [tokens, columns] in the global array [sequences, seq, width]: it begins at `origin`, int32
    [3], and has `local_seq` positions of each of its sequences.
    """

    origin: jax.Array
    local_seq: int = dataclasses.field(metadata=STATIC_FIELD)
    seq: int = dataclasses.field(metadata=STATIC_FIELD)
    width: int = dataclasses.field(metadata=STATIC_FIELD)
    words_per_row: int = dataclasses.field(metadata=STATIC_FIELD)  # random words of the global array

    @classmethod
    def from_offset(
        cls, shape: tuple[int, ...], offset: Sequence[jax.Array | int], whole: tuple[int, ...]
    ) -> "GlobalWindow":
        """Returns the window of a shard [sequences, positions, columns], or [positions, columns], of a global array."""
        if len(shape) == 2:
            shape, offset, whole = (1, *shape), (0, *offset), (1, *whole)
        origin = jnp.stack([jnp.asarray(o, jnp.int32) for o in offset])
        return cls(origin, shape[1], whole[1], whole[2], whole[0] * whole[1] // 4 * whole[2])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowwiseOperand:
    """Rowwise operand: `scale` is the vector of `compute_tensor_scale`, `rule` the scale rule of its format. With a
    `key` (uint32 [2]) it is rounded stochastically, by `rounding`. With `code_scale_layout` it is packed codes, and
    scales in that layout; else block-dequantized bf16.
    """

    scale: jax.Array
    key: jax.Array | StackSlice | None = None
    window: GlobalWindow | None = None
    code_scale_layout: ScaleLayout | None = dataclasses.field(default=None, metadata=STATIC_FIELD)
    rule: TwoLevelScale = dataclasses.field(default=TWO_LEVEL, metadata=STATIC_FIELD)
    rounding: str = dataclasses.field(default="stochastic", metadata=STATIC_FIELD)
    along_tokens = False
    deferred_alpha = None

    def outputs(self, tokens: int) -> list[tuple[int, DTypeLike]]:
        """Returns (rows, dtype) of each output, for `tokens` token rows."""
        return [(tokens, jnp.bfloat16)]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ColumnwiseOperand:
    """Columnwise operand, as `RowwiseOperand`. `packed` returns code bytes and scale bytes, token-major, not bf16;
    `code_scale_layout` those that a GEMM reads, transposed. With `deferred_alpha`, float32 [1], the operand is that of
    bf16(x * deferred_alpha): x may be block-dequantized, and deferred_alpha its tensor's decode scale.
    """

    scale: jax.Array
    key: jax.Array | StackSlice | None = None
    window: GlobalWindow | None = None
    hadamard: bool = dataclasses.field(default=True, metadata=STATIC_FIELD)
    packed: bool = dataclasses.field(default=False, metadata=STATIC_FIELD)
    code_scale_layout: ScaleLayout | None = dataclasses.field(default=None, metadata=STATIC_FIELD)
    rule: TwoLevelScale = dataclasses.field(default=TWO_LEVEL, metadata=STATIC_FIELD)
    rounding: str = dataclasses.field(default="stochastic", metadata=STATIC_FIELD)
    deferred_alpha: jax.Array | None = None
    along_tokens = True

    def outputs(self, tokens: int) -> list[tuple[int, DTypeLike]]:
        """Returns (rows, dtype) of each output, for `tokens` token rows; bytes are int8 inside Triton kernels."""
        return [(tokens // 2, jnp.int8), (tokens // NVFP4_BLOCK, jnp.int8)] if self.packed else [(tokens, jnp.bfloat16)]


@triton_launch.jit_per_shape("hadamard", "tiling")
def partial_amax(
    x: jax.Array, *, deferred_alpha: jax.Array | None = None, hadamard: bool = True, tiling: PassTiling = AMAX_TILING
) -> tuple[jax.Array, ...]:
    """Returns partial amaxes of x, and of its bf16 Hadamard transform if `hadamard`: int32 bits, one per program, which
    `compute_tensor_scale` reduces. Inf and NaN are kept. `deferred_alpha`, float32 [1]: of bf16(x * deferred_alpha).
    """
    return tiled_partial_amax(
        [x], TileTransform(lambda m, words: [words], 1), hadamard=hadamard, tiling=tiling, deferred_alpha=deferred_alpha
    )


@dataclasses.dataclass(frozen=True)
class TileTransform:
    """The first `count` tensors of `compute_rows(lane_ops, rows of all arrays)`, which returns their token rows."""

    compute_rows: Callable[[LaneOps, TokenRows], Sequence[TokenRows]]
    count: int


def tiled_partial_amax(
    arrays: Sequence[jax.Array | StackSlice],
    transform: TileTransform,
    *,
    hadamard: bool,
    tiling: PassTiling,
    deferred_alpha: jax.Array | None = None,
    stack_slices: Sequence[StackSlice] = (),
    name: str = "maxima",
) -> tuple[jax.Array, ...]:
    """Returns `partial_amax` of each tensor that `transform` computes from the arrays, then the written stacks.
    `deferred_alpha`, float32, one per array, multiplies the arrays. The first arrays are also written to
    `stack_slices`, without it: the pass reads them anyway, so the residual costs no read.
    """
    triton_launch.check_kernel_arrays(*arrays)
    num_amaxes = transform.count * (2 if hadamard else 1)

    def body(m, words, alphas):
        tensors = transform.compute_rows(m, q.apply_deferred_alpha_bf16(m, words, alphas))[: transform.count]
        return [amax for rows in tensors for amax in lane_amaxes(m, rows, hadamard)]

    if not triton_launch.is_tileable(arrays[0].shape[1]):

        def untiled_body(m, rows):
            return [amax[0] for amax in body(m, rows, ())]

        untiled = functools.partial(
            nvfp4_untiled.untiled_partial_amax, arrays, untiled_body, num_amaxes, deferred_alpha=deferred_alpha
        )
        stacks = [
            layer.write_to_stack(materialize_slice(array)) for layer, array in zip(stack_slices, arrays, strict=False)
        ]
        return *untiled(columns=tiling.columns, name=name), *stacks

    def kernel(_, refs, scalar_refs, stacks, amax_refs):
        tiles = [ref[r] for ref in refs for r in range(NVFP4_BLOCK)]
        for i, ref in enumerate(stacks):
            for r in range(NVFP4_BLOCK):
                ref[r] = tiles[i * NVFP4_BLOCK + r]
        alphas = [ref[i] for ref in scalar_refs for i in range(len(arrays))]
        outputs = [jnp.int32] * len(amax_refs)
        amax_tiles = emit_tile_body(body, tiles, alphas, outputs=outputs, columns=tiling.columns)
        for ref, tile in zip(amax_refs, amax_tiles, strict=True):
            ref[0, 0] = jnp.max(tile)

    scalars = [] if deferred_alpha is None else [deferred_alpha]
    tile_outputs = TiledOutputs(num_amaxes=num_amaxes, stack_outputs=stack_slices)
    return tuple(triton_launch.launch_tiled(kernel, arrays, scalars, outputs=tile_outputs, tiling=tiling, name=name))


def lane_amaxes(m: LaneOps, rows: TokenRows, hadamard: bool) -> list[list[Word]]:
    """Returns the lane's amax, and that of the transform: float32 bits, repeated for each of the lane's columns."""
    amax = q.pairwise_amax(m, [w for row in rows for w in row])
    amaxes = [[m.and_(m.max_u16x2(amax, m.shl(amax, 16)), 0xFFFF0000)] * m.columns]
    if hadamard:
        transformed = [q.hadamard_amax(m, [row[k] for row in rows]) for k in range(len(rows[0]))]
        amaxes.append([m.and_(m.pack_round(0.0, functools.reduce(m.fmax_nan, transformed)), 0xFFFF0000)] * m.columns)
    return amaxes


@triton_launch.jit_per_shape("tiling")
def quantize_tiled(
    x: jax.Array,
    *,
    rows: RowwiseOperand | None = None,
    columns: ColumnwiseOperand | None = None,
    tiling: PassTiling | None = None,
) -> tuple[jax.Array, ...]:
    """Returns the operands from one read of x: first those of `rows`, then those of `columns`.

    Block-dequantized: bf16 [tokens, columns]. `packed`: codes uint8 [tokens / 2, columns], scales uint8 [tokens / 16,
    columns]. With `code_scale_layout`, rows are uint8 [tokens, columns / 2] and scales [tokens, columns / 16], columns
    are uint8 [columns, tokens / 2] and scales [columns, tokens / 16]; tiled scales are flat.
    """
    sides = [side for side in (rows, columns) if side is not None]
    if not sides:
        raise ValueError("quantize was asked for no operand: give rows, columns or both")
    if nvfp4_untiled.wants_codes(sides) or not triton_launch.is_tileable(x.shape[1]):
        triton_launch.check_kernel_arrays(x)
        jobs = [(side, 0) for side in sides]
        run = functools.partial(nvfp4_untiled.quantize_untiled, [x], lambda m, rows: [rows], jobs)
        return run(lanes=_lanes(sides), name=kernel_name(*sides))
    rows_only = columns is None
    return quantize_tiled_transform(
        [x],
        lambda tiles: [tiles],
        [(side, 0) for side in sides],
        tokens=ROW_TOKENS if rows_only else NVFP4_BLOCK,
        tiling=tiling or (ROW_TILING if rows_only and x.shape[1] % (32 * ROW_TILING.columns) == 0 else BOTH_TILING),
        name=kernel_name(*sides),
    )


def quantize_tiled_transform(
    arrays: Sequence[jax.Array | StackSlice],
    make: Callable[[list[jax.Array]], Sequence[list[jax.Array]]],
    jobs: Sequence[tuple[RowwiseOperand | ColumnwiseOperand, int]],
    *,
    tokens: int = NVFP4_BLOCK,
    tiling: PassTiling,
    name: str,
) -> tuple[jax.Array, ...]:
    """Returns the operands of `jobs`, each (operand, index of its tensor among those that `make(tiles)` returns). Each
    operand is stored before the next one is computed, which keeps few registers alive.
    """
    triton_launch.check_kernel_arrays(arrays[0])
    width = arrays[0].shape[1]
    shapes = [side.outputs(tokens) for side, _ in jobs]
    with_key = [i for i, (side, _) in enumerate(jobs) if side.key is not None]
    with_origin = [i for i in with_key if jobs[i][0].window is not None]
    scalars = [side.scale for side, _ in jobs] + [side.key for side, _ in jobs if side.key is not None]
    scalars += [side.window.origin for side, _ in jobs if side.key is not None and side.window is not None]
    with_alpha, alphas_begin = [i for i, (side, _) in enumerate(jobs) if side.deferred_alpha is not None], len(scalars)
    scalars += [side.deferred_alpha for side, _ in jobs if side.deferred_alpha is not None]

    def kernel(program, refs, scalar_refs, out_refs, _):
        tensors = make([ref[r] for ref in refs for r in range(tokens)])
        keys = dict(zip(with_key, scalar_refs[len(jobs) :], strict=False))
        origins = dict(zip(with_origin, scalar_refs[len(jobs) + len(with_key) : alphas_begin], strict=True))
        alphas = dict(zip(with_alpha, scalar_refs[alphas_begin:], strict=True))
        for i, (side, index) in enumerate(jobs):
            refs_of = (scalar_refs[i], keys.get(i), origins.get(i), alphas.get(i))
            operand_tiles = _quantize_tiles(side, tensors[index], refs_of, program, width, tiling)
            begin = sum(len(s) for s in shapes[:i])
            output_rows = [
                (ref, r) for ref, (count, _) in zip(out_refs[begin:], shapes[i], strict=False) for r in range(count)
            ]
            for (ref, r), tile in zip(output_rows, operand_tiles, strict=True):
                ref[r] = tile

    tile_outputs = TiledOutputs([output for shape in shapes for output in shape])
    operand_tiles = triton_launch.launch_tiled(
        kernel, arrays, scalars, outputs=tile_outputs, rows=tokens, tiling=tiling, name=name
    )
    return tuple(lax.bitcast_convert_type(a, jnp.uint8) if a.dtype == jnp.int8 else a for a in operand_tiles)


def _quantize_tiles(
    side: RowwiseOperand | ColumnwiseOperand,
    tiles: Sequence[jax.Array],
    refs: Sequence[Any],
    program: tuple[jax.Array, jax.Array],
    width: int,
    tiling: PassTiling,
) -> list[jax.Array]:
    """Returns the output tiles of one operand of one program; `refs` are its scale, key, origin and deferred alpha."""
    tokens = len(tiles)
    scale, key, origin, deferred_alpha = refs
    scalars = [scale[entry] for entry in quantizer_entries(side.rule)]
    split = len(scalars)
    if key is not None:
        scalars += tiled_random_state((key[0], key[1]), origin, side.window, program, tiles[0].shape, tokens, width)
    end = len(scalars)
    scalars += [] if deferred_alpha is None else [deferred_alpha[0]]

    def body(m, words, scalars):
        quantizer, seed, random = KernelQuantizer(side.rule, side.rounding, *scalars[:split]), scalars[split:end], None
        words = q.apply_deferred_alpha_bf16(m, words, scalars[end:])
        if seed:
            random = q.random_words(m, seed, tokens=tokens, stride=side.window.width if side.window else width)
        if isinstance(side, ColumnwiseOperand):
            flags = {"hadamard": side.hadamard, "packed": side.packed}
            return q.quantize_columns_to_bf16(m, words, quantizer, random, **flags)
        return q.quantize_rows_to_bf16(m, words, quantizer, random)

    outputs = [dtype for count, dtype in side.outputs(tokens) for _ in range(count)]
    return emit_tile_body(body, tiles, scalars, outputs=outputs, columns=tiling.columns)


def _lanes(sides: Sequence[RowwiseOperand | ColumnwiseOperand]) -> LaunchConfig:
    if len(sides) == 1:
        return CODES_LAUNCH
    if not nvfp4_untiled.wants_codes(sides):
        return ROW_COLUMN_BF16_LAUNCH
    return CODES_LAUNCH if any(side.key is not None for side in sides) else ROW_COLUMN_CODES_LAUNCH


def kernel_name(*sides: RowwiseOperand | ColumnwiseOperand) -> str:
    parts = ["quantize"]
    for side in sides:
        name = "columns" if isinstance(side, ColumnwiseOperand) else "rows"
        parts.append(name if side.key is None else f"{name}_stochastic")
        if isinstance(side, ColumnwiseOperand):
            parts += ["hadamard"] * side.hadamard + ["packed"] * side.packed
        parts += [side.rule.error_metric] if side.rule.has_candidates else []
        parts += [] if side.code_scale_layout is None else ["codes"]
    return "_".join(parts)


def _as_int(word: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(word, jnp.int32)


def tiled_random_state(
    key: tuple[jax.Array, jax.Array],
    origin: Any,
    window: GlobalWindow | None,
    program: tuple[jax.Array, jax.Array],
    shape: tuple[int, ...],
    tokens: int,
    width: int,
) -> list[jax.Array]:
    """Returns two key words (int32 scalars) and the counter of each column (int32 tile), for the program's first four
    tokens; for every four tokens, if counters have more than 32 bits.
    """
    i, j = program
    column = lax.broadcasted_iota(jnp.int32, shape, 0) * NVFP4_BLOCK + lax.broadcasted_iota(jnp.int32, shape, 1)
    column = column + j * np.int32(shape[0] * NVFP4_BLOCK)
    row, stride = i * np.int32(tokens // 4), width
    if window is not None:
        first_token = i * np.int32(tokens)
        sequence, position = first_token // np.int32(window.local_seq), first_token % np.int32(window.local_seq)
        token = (origin[0] + sequence) * np.int32(window.seq) + origin[1] + position
        row, column, stride = token // np.int32(4), column + origin[2], window.width
    if window is None or window.words_per_row <= 2**32:
        return [_as_int(key[0]), _as_int(key[1]), row * np.int32(stride) + column]
    rows = [row + np.int32(group) for group in range(tokens // 4)]
    return [word for r in rows for word in _key_for_high_counter_tiled(key, r, column, stride)]


def _key_for_high_counter_tiled(
    key: tuple[jax.Array, jax.Array], row: jax.Array, column: jax.Array, stride: int
) -> list[jax.Array]:
    """Returns key words and low halves of the counters row * stride + column; the high halves are mixed into the key.
    All columns of a lane have the same high half, because the stride is a multiple of 16.
    """
    high, low = multiply_high_low(stride, _as_uint(row))
    counter = low + _as_uint(column)
    keys = [key_for_high_counter(high + jnp.uint32(carry), *key) for carry in (0, 1)]
    carried = counter < low
    key_words = [jnp.where(carried, after, before) for before, after in zip(*keys, strict=True)]
    return [*map(_as_int, key_words), _as_int(counter)]


def _as_uint(word: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(word, jnp.uint32)


@triton_launch.jit_per_shape("tiling")
def unpack_tiled(codes: jax.Array, scales: jax.Array, *, tiling: PassTiling = UNPACK_TILING) -> jax.Array:
    """Returns the block-dequantized bf16 [tokens, columns] of a packed columnwise operand."""
    if codes.shape[0] != 8 * scales.shape[0] or codes.shape[1] != scales.shape[1]:
        raise ValueError(f"packed codes {codes.shape} need scales [tokens / 16, columns], got {scales.shape}")

    if not triton_launch.is_tileable(codes.shape[1]):
        return nvfp4_untiled.unpack_untiled(codes, scales)

    def body(m, words, _):
        return q.unpack_columns(m, words[:8], words[8])

    def kernel(_, arrays, __, out_refs, ___):
        tiles = [arrays[0][r] for r in range(8)] + [arrays[1][0]]
        unpacked = emit_tile_body(body, tiles, [], outputs=[jnp.bfloat16] * NVFP4_BLOCK, columns=tiling.columns)
        for r, tile in enumerate(unpacked):
            out_refs[0][r] = tile

    packed = [lax.bitcast_convert_type(a, jnp.int8) for a in (codes, scales)]
    out = TiledOutputs([(NVFP4_BLOCK, jnp.bfloat16)])
    return triton_launch.launch_tiled(kernel, packed, [], outputs=out, rows=8, tiling=tiling, name="unpack")[0]
