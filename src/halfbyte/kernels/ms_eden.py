"""MS-EDEN of 128-point Hadamard transforms, of an array [rows, columns], bf16 or float32 (`formats.MsEdenScale`).

    y = H x on runs of 128 down a column (axis -2) or along a row (-1), in float32: signs, then butterflies
    z = |y| / (s d),  q = nearest(z),  c = sum z^2 / sum z q over the run,  s' = a neighbour of s c on the grid of E4M3

Idea (Quartet II, arXiv 2601.22813): round elements to nearest, and correct the scale instead. c is by how much rounding
shortened or lengthened the run, and s c is rounded stochastically to one of its two E4M3 neighbours, so that its mean
is s c. That takes one random number per 16 elements.

x is the array itself, or the dequantized values of its `ForwardOperand`, whose blocks are along the other axis. Those
are quantized again in registers: q (s d) needs the block scale, which a block-dequantized q s no longer has.

How it works: one warp holds each run of 128, 8 blocks. A lane has 16 rows of 4 columns, four neighbouring lanes a 16x16
tile, and a warp eight tiles, stacked (axis -2) or side by side (-1). Lanes 4 apart hold the blocks of one run, so
butterflies between lanes and the sums of c are shuffles, without shared memory. Along a row, the lanes of a tile first
exchange elements until each has whole blocks of four rows.

How it differs from `nvfp4_tiled.py`: the transform stays in float32 (sums of 128 are no bf16 values), ties go away from
zero, and elements are divided by their step with correct rounding (`div_prepared`), because a code depends on the last
bit. Sums over a run have a fixed order: the bits are those of `formats.division_scale_rules`.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from halfbyte.formats import E2M1, E4M3, TwoLevelScale
from halfbyte.kernels import nvfp4_arithmetic as q
from halfbyte.kernels import nvfp4_untiled, triton_launch
from halfbyte.kernels.block_scales import (
    EXPONENT,
    ONE_F32_BITS,
    KernelQuantizer,
    Pair,
    PairRows,
    apply_encode_scale,
    apply_scale_floor,
    block_scales,
    lane_rows_f32,
    pair_amax,
    pair_signs,
    prepare_encode_scale,
    round_nearest_e2m1,
    unpack_pair_f32,
)
from halfbyte.kernels.lane_ops import LaneMemoryOps, Word, Words
from halfbyte.kernels.mosaic_launch import LaunchConfig, StackSlice, launch_flat
from halfbyte.kernels.nvfp4_tiled import GlobalWindow
from halfbyte.kernels.row_access import (
    TOKEN_BLOCK,
    WARPS,
    LanePosition,
    lane_position,
    load_rows,
    program_grid,
    store_rows,
)
from halfbyte.kernels.tensor_scale_kernel import GEMM_ALPHA_INDEX

POINTS = 128
BLOCKS_PER_RUN = POINTS // TOKEN_BLOCK  # one per tile of the warp
LANES = LaunchConfig(4, 4)  # 128 registers per lane
STATIC = {"static": True}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ForwardOperand:
    """Forward operand whose dequantized values are transformed: its scale vector, scale rule and rounding."""

    scale: jax.Array
    rule: TwoLevelScale = dataclasses.field(metadata=STATIC)
    rounding: str = dataclasses.field(metadata=STATIC)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EdenQuantization:
    """MS-EDEN quantization: scale vector of `compute_tensor_scale` under `rule`, random bits of `key`, uint32 [2]."""

    scale: jax.Array
    key: jax.Array | StackSlice
    rule: TwoLevelScale = dataclasses.field(metadata=STATIC)
    window: GlobalWindow | None = None


def unsupported_eden(rows: int, columns: int, *, axis: int) -> str | None:
    """Returns why the kernels do not support runs along `axis` of an array [rows, columns], or None."""
    if (columns if axis == -1 else rows) % POINTS:
        return f"transforms of {POINTS} points along axis {axis} do not divide {rows} x {columns}"
    return (
        f"tiles of {TOKEN_BLOCK} x {TOKEN_BLOCK} do not divide {rows} x {columns}"
        if rows % TOKEN_BLOCK or columns % TOKEN_BLOCK
        else None
    )


@triton_launch.jit_per_shape("axis")
def eden_partial_amax(
    x: jax.Array | StackSlice, signs: jax.Array, *, axis: int, forward: ForwardOperand | None = None
) -> jax.Array:
    """Returns partial amaxes of y, int32 bits of float32, one per warp; `signs` is float32 [128]."""
    pass_ = _EdenPass(x, signs, axis, forward)

    def body(m: LaneMemoryOps) -> None:
        y = pass_.transformed(m, pass_.lane_position(m))
        nvfp4_untiled.store_amaxes(m, len(pass_.arrays), [q.amax_f32(m, y)])

    output = jax.ShapeDtypeStruct((pass_.programs * WARPS,), jnp.int32)
    return launch_flat(body, pass_.arrays, [output], programs=pass_.programs, lanes=LANES, name=pass_.name("maxima"))[0]


@triton_launch.jit_per_shape("axis", "packed")
def eden_quantize(
    x: jax.Array | StackSlice, signs: jax.Array, drawn: EdenQuantization, *, axis: int,
    forward: ForwardOperand | None = None, packed: bool = False,
) -> tuple[jax.Array, ...]:  # fmt: skip
    """Returns the block-dequantized operand, bf16 in the order of x.

    With `packed`, only along axis -2: code bytes [rows / 2, columns] and scale bytes [rows / 16, columns].
    """
    pass_, window = _EdenPass(x, signs, axis, forward), drawn.window
    origin = [] if window is None else [window.origin]
    arrays = [*pass_.arrays, drawn.scale, drawn.key, *origin]
    scale_arg, key_arg, output_arg = len(pass_.arrays), len(pass_.arrays) + 1, len(arrays)
    rows, columns = x.shape

    def body(m: LaneMemoryOps) -> None:
        pos = pass_.lane_position(m)
        y = pass_.transformed(m, pos)
        quantizer = nvfp4_untiled.load_quantizer(m, drawn.rule, "away", nvfp4_untiled.ScaleVectorArg(scale_arg), pos)
        key_args = nvfp4_untiled.ScaleVectorArg(key_arg), nvfp4_untiled.ScaleVectorArg(key_arg + 1) if origin else None
        state = functools.partial(nvfp4_untiled.untiled_random_state, m, *key_args, window)
        if axis == -1:
            _store_rows(m, output_arg, pos, y, quantizer, state)
            return
        operand_rows = _quantize_columns(m, y, quantizer, state(pos)[0], packed)
        store_rows(m, output_arg, pos, operand_rows[: TOKEN_BLOCK // 2] if packed else operand_rows, 1 if packed else 2)
        if packed:
            store_rows(m, output_arg + 1, pos, operand_rows[TOKEN_BLOCK // 2 :], 1)

    outputs = [jax.ShapeDtypeStruct((rows, columns), jnp.bfloat16)]
    if packed:
        outputs = [jax.ShapeDtypeStruct((rows // n, columns), jnp.uint8) for n in (2, TOKEN_BLOCK)]
    return tuple(launch_flat(body, arrays, outputs, programs=pass_.programs, lanes=LANES, name=pass_.name("quantize")))


class _EdenPass:
    """Common part of both passes: lane positions, load of x, dequantized forward operand, transform."""

    def __init__(self, x: jax.Array | StackSlice, signs: jax.Array, axis: int, forward: ForwardOperand | None):
        triton_launch.check_kernel_arrays(x)
        if reason := unsupported_eden(*x.shape, axis=axis):
            raise ValueError(reason)
        self.shape, self.size, self.axis, self.forward = x.shape, x.dtype.itemsize, axis, forward
        scaled_signs = signs * jnp.float32(2.0**-3)  # 2**-3 is 1 / sqrt(128) but for sqrt(1/2)
        self.arrays = [x, scaled_signs, *([] if forward is None else [forward.scale])]
        rows, columns = x.shape
        column_grid = rows // POINTS, -(-columns // (WARPS * TOKEN_BLOCK))
        self.grid = program_grid(rows, columns, LANES.columns) if axis == -1 else column_grid
        self.programs = self.grid[0] * self.grid[1]

    def name(self, what: str) -> str:
        return f"{what}_eden_{'rows' if self.axis == -1 else 'columns'}{'' if self.forward is None else '_again'}"

    def lane_position(self, m: LaneMemoryOps) -> LanePosition:
        rows, columns = self.shape
        if self.axis == -1:
            return lane_position(m, rows, columns, self.grid)
        program, thread, programs_across = m.program_id(), m.thread_id(), self.grid[1]
        first_token = m.imad(m.u32_div_const(program, programs_across), POINTS, 0)
        first_column = m.imad(m.u32_mod_const(program, programs_across), WARPS * TOKEN_BLOCK, 0)
        token = m.imad(m.shr(m.and_(thread, 31), 2), TOKEN_BLOCK, first_token)
        column = m.imad(m.and_(thread, 3), 4, m.imad(m.shr(thread, 5), TOKEN_BLOCK, first_column))
        in_bounds = m.less(column, columns) if columns % (WARPS * TOKEN_BLOCK) else None
        return LanePosition(rows, columns, token, column, in_bounds, first_token, first_column, thread)

    def transformed(self, m: LaneMemoryOps, pos: LanePosition) -> list[list[Word]]:
        """Returns y of the lane's 16 rows of 4 columns, float32."""
        words = load_rows(m, 0, pos, self.size)
        rows: PairRows = words if self.size == 2 else q.float_pairs([[m.as_f32(x) for x in row] for row in words])
        values = self._values(m, rows, pos)
        lane = m.and_(pos.thread, 31)
        if self.axis == -1:
            signs = [m.as_f32(w) for w in m.load(m.address(1, m.imad(lane, 4, 0), 4), 4)]
            return [hadamard128_lanes(m, row, signs, lane, (1, 2, 4, 8, 16)) for row in values]
        begin = m.address(1, m.imad(m.shr(lane, 2), TOKEN_BLOCK, 0), 4)
        signs = [m.as_f32(w) for i in range(0, TOKEN_BLOCK, 4) for w in m.load(begin, 4, offset=4 * i)]
        columns = [hadamard128_lanes(m, column, signs, lane, (4, 8, 16)) for column in zip(*values, strict=True)]
        return [list(row) for row in zip(*columns, strict=True)]

    def _values(self, m: LaneMemoryOps, rows: PairRows, pos: LanePosition) -> list[list[Word]]:
        if self.forward is None:
            return [[x for pair in row for x in unpack_pair_f32(m, pair)] for row in rows]
        quantizer = nvfp4_untiled.load_quantizer(
            m, self.forward.rule, self.forward.rounding, nvfp4_untiled.ScaleVectorArg(2), pos
        )
        gemm_alpha = m.as_f32(m.load(m.address(2, GEMM_ALPHA_INDEX, 4))[0])  # d, or NaN for a non-finite amax
        if self.axis != -1:
            encode, scale = q.row_scales(m, rows, quantizer)
            steps = [m.fmul(m.low_bf16(s), gemm_alpha) for s in scale]
            row_scales = [(row, (e, e), (s, s)) for row, e, s in zip(rows, encode, steps, strict=True)]
            return [[x for pair in row for x in _dequantize_pair(m, pair, e, s, quantizer)] for row, e, s in row_scales]
        columns: list[Sequence[Word]] = []
        for k in range(len(rows[0])):
            pairs = [row[k] for row in rows]
            _, values, encodes = q.column_scales(m, pairs, quantizer)
            low, high = (m.fmul(value, gemm_alpha) for value in values)
            columns += zip(*(_dequantize_pair(m, pair, encodes, (low, high), quantizer) for pair in pairs), strict=True)
        return [list(row) for row in zip(*columns, strict=True)]


def _dequantize_pair(
    m: LaneMemoryOps, pair: Pair, encode: tuple[Word, Word], steps: tuple[Word, Word], quantizer: KernelQuantizer
) -> list[Word]:
    """Returns the dequantized values of a pair: rounded to the grid, times its steps s d."""
    grid = m.with_sign(q.round_nearest_pair(m, pair, encode, quantizer), pair_signs(m, pair))
    return [m.fmul(x, step) for x, step in zip(unpack_pair_f32(m, grid), steps, strict=True)]


def hadamard128_lanes(m: LaneMemoryOps, values: Words, signs: Words, lane: Word, bits: Sequence[int]) -> list[Word]:
    """Returns this lane's values of H of a run, which it shares with the lanes whose indices differ in `bits`."""
    v = [m.fmul(x, sign) for x, sign in zip(values, signs, strict=True)]
    for distance in (d for d in (1, 2, 4, 8) if d < len(v)):
        for i in (i for i in range(len(v)) if not i & distance):
            j = i | distance
            v[i], v[j] = m.fadd(v[i], v[j]), m.fsub(v[i], v[j])
    for bit in bits:  # butterfly between lanes: the lane with the bit holds b and computes a - b
        flip = m.as_f32(m.or_(m.shl(m.and_(lane, bit), 32 - bit.bit_length()), ONE_F32_BITS))
        v = [m.ffma(x, flip, m.as_f32(m.shuffle_xor(x, bit))) for x in v]
    return [m.fmul(x, 0.5**0.5) for x in v]


def correct_block_scales(
    m: LaneMemoryOps, pairs: Sequence[Pair], quantizer: KernelQuantizer, uniforms: Words
) -> tuple[list[Word], Word, Words]:
    """Returns (grid pairs, E4M3 codes, scale values) of two blocks of this lane.

    The other seven blocks of each run are in the lanes with the same index of the other tiles. `uniforms` are in
    [0, 1), one per block.
    """
    _, values, steps = block_scales(m, pair_amax(m, pairs), quantizer, [])
    sides, scales = [], []
    for side, value, step, uniform in zip(zip(*pairs, strict=True), values, steps, uniforms, strict=True):
        divisor = prepare_encode_scale(m, step, quantizer)
        z = [apply_encode_scale(m, m.fabs(x), divisor, quantizer) for x in side]
        rounded = [round_nearest_e2m1(m, m.fmin(x, E2M1.max), "away") for x in z]
        square, cross = (
            _sum_over_run(m, [m.fmul(a, b) for a, b in zip(z, other, strict=True)]) for other in (z, rounded)
        )
        ratio = m.as_f32(m.select_if(m.fless(0.0, cross), m.fdiv(square, cross), ONE_F32_BITS))
        scales.append(_round_stochastic_e4m3(m, m.fmul(value, ratio), uniform))
        sides.append(rounded)
    grids = [m.pack_exact(low, high) for low, high in zip(*sides, strict=True)]
    codes, scale_values = apply_scale_floor(m, (scales[0], scales[1]), quantizer.rule.floor)
    return grids, codes, scale_values


def _sum_over_run(m: LaneMemoryOps, terms: Words) -> Word:
    """Sums over a run: the elements of each block in order, then its blocks in order."""
    total = functools.reduce(m.fadd, terms)
    return functools.reduce(m.fadd, [m.as_f32(m.shuffle_from_block(total, tile)) for tile in range(BLOCKS_PER_RUN)])


def _round_stochastic_e4m3(m: LaneMemoryOps, scale: Word, uniform: Word) -> Word:
    """Rounds `scale` stochastically to one of its two neighbours on the E4M3 grid, saturating."""
    clipped = m.fmin(scale, E4M3.max)
    binade = m.fmax(m.as_f32(m.and_(clipped, EXPONENT)), E4M3.min_normal)
    gap = m.fmul(binade, 2.0**-E4M3.mantissa_bits)
    below = m.floor_grid(clipped, m.fmul(gap, 2.0))
    up = m.fless(m.fmul(uniform, gap), m.fsub(scale, below))
    return m.fmin(m.fadd(below, m.as_f32(m.select_if(up, gap, 0))), E4M3.max)


def _uniform(m: LaneMemoryOps, word: Word) -> Word:
    """Returns a float32 in [0, 1) from a word of 24 bits."""
    return m.fmul(m.u32_to_f32(word), 2.0**-24)


def _quantize_columns(
    m: LaneMemoryOps, y: Sequence[Words], quantizer: KernelQuantizer, state: Words, packed: bool
) -> list[list[Word]]:
    """Returns rows as `q.quantize_columns_to_bf16`, under MS-EDEN scales; a block takes 24 bits of one random word."""
    k0, k1, index = state[:3]
    words = [q.counter_hash_word(m, m.iadd(index, column), k0, k1) for column in range(4)]
    uniforms = [_uniform(m, m.prmt(word, 0, 0x4012)) for word in words]
    column_pairs = []
    for k, pairs in enumerate(zip(*q.float_pairs(y), strict=True)):
        grids, scale_codes, values = correct_block_scales(m, pairs, quantizer, uniforms[2 * k : 2 * k + 2])
        column_pairs.append((q.column_pair_words(m, pairs, grids, m.pack_exact(*values), packed), scale_codes))
    return q.interleave_columns(m, column_pairs, packed)


def _store_rows(m, array: int, pos: LanePosition, y: Sequence[Words], quantizer: KernelQuantizer, state) -> None:
    """Stores block-dequantized rows. A lane has whole blocks of four rows, whose random bytes come from three words."""
    lane_in_tile = m.and_(pos.thread, 3)
    block_pos = dataclasses.replace(
        pos, token=m.imad(lane_in_tile, 4, pos.token), column=m.imad(lane_in_tile, -4, pos.column)
    )
    k0, k1, index = state(block_pos)[0][:3]
    words = [q.counter_hash_word(m, m.iadd(index, column), k0, k1) for column in range(3)]
    blocks = lane_rows_f32(m, q.float_pairs(y), TOKEN_BLOCK // m.columns)
    for r in range(0, 4, 2):
        uniforms = [_uniform(m, _gather_byte(m, words, r + i)) for i in range(2)]
        pairs = list(zip(*blocks[r : r + 2], strict=True))
        grids, _, values = correct_block_scales(m, pairs, quantizer, uniforms)
        scale = m.pack_exact(*values)
        dequantized = [q.dequantize_pair(m, pair, grid, scale) for pair, grid in zip(pairs, grids, strict=True)]
        for i, selector in enumerate((0x5410, 0x7632)):  # halves are rows
            row = [m.prmt(a, b, selector) for a, b in zip(dequantized[::2], dequantized[1::2], strict=True)]
            target = m.address(array, m.imad(m.iadd(block_pos.token, r + i), pos.width, block_pos.column), 2)
            for half in (0, 4):
                m.store(target, row[half : half + 4], offset=4 * half, where=pos.in_bounds)


def _gather_byte(m: LaneMemoryOps, words: Words, number: int) -> Word:
    """Returns byte `number` of each of three words, that of the first word highest."""
    low = m.prmt(words[2], words[1], number | (4 + number) << 4)
    return m.and_(m.prmt(low, words[0], 0x0010 | (4 + number) << 8), 0x00FFFFFF)
