"""MS-EDEN of 128-point Hadamard transforms, of an array [rows, columns], bf16 or float32 (`formats.MsEdenScale`).

    y = H x on runs of 128 down a column (axis -2) or along a row (-1), in float32: signs, then butterflies
    z = |y| / (s d),  q = nearest(z),  c = sum z^2 / sum z q over the run,  s' = a neighbour of s c on the grid of E4M3

x is the array itself, or the dequantized values of its `ForwardOperand`, whose blocks are along the other axis: that is
quantized again in registers, for q (s d) needs a scale that a carrier q s does not have.

A lane has 16 rows of 4 columns, four neighbouring lanes a tile of 16 x 16, and a warp eight tiles, one below the
other or side by side: a run of 128 for each of 16. So each lane's eight neighbours at a distance of 4 have the blocks
of its runs. Along a row lanes of a tile exchange first, until each has whole blocks of four rows.
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
BLOCKS_PER_RUN = POINTS // TOKEN_BLOCK  # of a warp
LANES = LaunchConfig(4, 4)  # 128 registers a lane
STATIC = {"static": True}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ForwardOperand:
    """The forward operand whose numbers are transformed: its scales, their rule, and how elements are rounded."""

    scale: jax.Array
    rule: TwoLevelScale = dataclasses.field(metadata=STATIC)
    rounding: str = dataclasses.field(metadata=STATIC)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EdenQuantization:
    """How it is quantized: scales from `compute_tensor_scale` under `rule`, random bits of `key`, uint32 [2]."""

    scale: jax.Array
    key: jax.Array | StackSlice
    rule: TwoLevelScale = dataclasses.field(metadata=STATIC)
    window: GlobalWindow | None = None


def unsupported_eden(rows: int, columns: int, *, axis: int) -> str | None:
    """Why these kernels cannot take runs along `axis` of an array [rows, columns], or None."""
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
    """Returns amaxes of y, int32 bits, one per warp; `signs` float32 [128]."""
    pass_ = _EdenPass(x, signs, axis, forward)

    def body(m: LaneMemoryOps) -> None:
        turned = pass_.transformed(m, pass_.lane_position(m))
        nvfp4_untiled.store_amaxes(m, len(pass_.arrays), [q.amax_f32(m, turned)])

    output = jax.ShapeDtypeStruct((pass_.programs * WARPS,), jnp.int32)
    return launch_flat(body, pass_.arrays, [output], programs=pass_.programs, lanes=LANES, name=pass_.name("maxima"))[0]


@triton_launch.jit_per_shape("axis", "packed")
def eden_quantize(
    x: jax.Array | StackSlice, signs: jax.Array, drawn: EdenQuantization, *, axis: int,
    forward: ForwardOperand | None = None, packed: bool = False,
) -> tuple[jax.Array, ...]:  # fmt: skip
    """Returns the bf16 carrier in the order of x, or, down columns, `packed` code bytes [rows / 2, columns] and scale
    bytes [rows / 16, columns].
    """
    pass_, window = _EdenPass(x, signs, axis, forward), drawn.window
    origin = [] if window is None else [window.origin]
    arrays = [*pass_.arrays, drawn.scale, drawn.key, *origin]
    scale_at, key_at, made_at = len(pass_.arrays), len(pass_.arrays) + 1, len(arrays)
    rows, columns = x.shape

    def body(m: LaneMemoryOps) -> None:
        at = pass_.lane_position(m)
        turned = pass_.transformed(m, at)
        quantizer = nvfp4_untiled.load_quantizer(m, drawn.rule, "away", nvfp4_untiled.ScaleVectorArg(scale_at), at)
        places = nvfp4_untiled.ScaleVectorArg(key_at), nvfp4_untiled.ScaleVectorArg(key_at + 1) if origin else None
        state = functools.partial(nvfp4_untiled.untiled_random_state, m, *places, window)
        if axis == -1:
            _store_rows(m, made_at, at, turned, quantizer, state)
            return
        made = _columns(m, turned, quantizer, state(at)[0], packed)
        store_rows(m, made_at, at, made[: TOKEN_BLOCK // 2] if packed else made, 1 if packed else 2)
        if packed:
            store_rows(m, made_at + 1, at, made[TOKEN_BLOCK // 2 :], 1)

    outputs = [jax.ShapeDtypeStruct((rows, columns), jnp.bfloat16)]
    if packed:
        outputs = [jax.ShapeDtypeStruct((rows // n, columns), jnp.uint8) for n in (2, TOKEN_BLOCK)]
    return tuple(launch_flat(body, arrays, outputs, programs=pass_.programs, lanes=LANES, name=pass_.name("quantize")))


class _EdenPass:
    """What both passes do: find their place, read x, make the forward operand's numbers, transform them."""

    def __init__(self, x: jax.Array | StackSlice, signs: jax.Array, axis: int, forward: ForwardOperand | None):
        triton_launch.check_kernel_arrays(x)
        if reason := unsupported_eden(*x.shape, axis=axis):
            raise ValueError(reason)
        self.shape, self.size, self.axis, self.forward = x.shape, x.dtype.itemsize, axis, forward
        factors = signs * jnp.float32(2.0**-3)  # 1 / sqrt(128), but for sqrt(1/2)
        self.arrays = [x, factors, *([] if forward is None else [forward.scale])]
        rows, columns = x.shape
        in_columns = rows // POINTS, -(-columns // (WARPS * TOKEN_BLOCK))
        self.grid = program_grid(rows, columns, LANES.columns) if axis == -1 else in_columns
        self.programs = self.grid[0] * self.grid[1]

    def name(self, what: str) -> str:
        return f"{what}_eden_{'rows' if self.axis == -1 else 'columns'}{'' if self.forward is None else '_again'}"

    def lane_position(self, m: LaneMemoryOps) -> LanePosition:
        rows, columns = self.shape
        if self.axis == -1:
            return lane_position(m, rows, columns, self.grid)
        program, thread, across = m.program_id(), m.thread_id(), self.grid[1]
        first_token = m.imad(m.u32_div_const(program, across), POINTS, 0)
        first_column = m.imad(m.u32_mod_const(program, across), WARPS * TOKEN_BLOCK, 0)
        token = m.imad(m.shr(m.and_(thread, 31), 2), TOKEN_BLOCK, first_token)
        column = m.imad(m.and_(thread, 3), 4, m.imad(m.shr(thread, 5), TOKEN_BLOCK, first_column))
        inside = m.less(column, columns) if columns % (WARPS * TOKEN_BLOCK) else None
        return LanePosition(rows, columns, token, column, inside, first_token, first_column, thread)

    def transformed(self, m: LaneMemoryOps, at: LanePosition) -> list[list[Word]]:
        """y of the lane's 16 rows of 4 columns, float32."""
        words = load_rows(m, 0, at, self.size)
        rows: PairRows = words if self.size == 2 else q.float_pairs([[m.as_f32(x) for x in row] for row in words])
        numbers = self._numbers(m, rows, at)
        lane = m.and_(at.thread, 31)
        if self.axis == -1:
            factors = [m.as_f32(w) for w in m.load(m.address(1, m.imad(lane, 4, 0), 4), 4)]
            return [hadamard128_lanes(m, row, factors, lane, (1, 2, 4, 8, 16)) for row in numbers]
        first = m.address(1, m.imad(m.shr(lane, 2), TOKEN_BLOCK, 0), 4)
        factors = [m.as_f32(w) for i in range(0, TOKEN_BLOCK, 4) for w in m.load(first, 4, offset=4 * i)]
        columns = [hadamard128_lanes(m, column, factors, lane, (4, 8, 16)) for column in zip(*numbers, strict=True)]
        return [list(row) for row in zip(*columns, strict=True)]

    def _numbers(self, m: LaneMemoryOps, rows: PairRows, at: LanePosition) -> list[list[Word]]:
        if self.forward is None:
            return [[x for pair in row for x in unpack_pair_f32(m, pair)] for row in rows]
        quantizer = nvfp4_untiled.load_quantizer(
            m, self.forward.rule, self.forward.rounding, nvfp4_untiled.ScaleVectorArg(2), at
        )
        gemm_alpha = m.as_f32(m.load(m.address(2, GEMM_ALPHA_INDEX, 4))[0])  # d, or NaN where amax is not finite
        if self.axis != -1:
            encode, scale = q.row_scales(m, rows, quantizer)
            steps = [m.fmul(m.low_bf16(s), gemm_alpha) for s in scale]
            each = [(row, (e, e), (s, s)) for row, e, s in zip(rows, encode, steps, strict=True)]
            return [[x for pair in row for x in _dequantize_pair(m, pair, e, s, quantizer)] for row, e, s in each]
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
    """Both numbers of a pair on the grid, times its steps s d."""
    grid = m.with_sign(q.round_nearest_pair(m, pair, encode, quantizer), pair_signs(m, pair))
    return [m.fmul(x, step) for x, step in zip(unpack_pair_f32(m, grid), steps, strict=True)]


def hadamard128_lanes(m: LaneMemoryOps, values: Words, factors: Words, lane: Word, bits: Sequence[int]) -> list[Word]:
    """H of a run of which this lane has `values` and lanes whose numbers differ in `bits` have the rest."""
    v = [m.fmul(x, factor) for x, factor in zip(values, factors, strict=True)]
    for distance in (d for d in (1, 2, 4, 8) if d < len(v)):
        for i in (i for i in range(len(v)) if not i & distance):
            j = i | distance
            v[i], v[j] = m.fadd(v[i], v[j]), m.fsub(v[i], v[j])
    for bit in bits:  # the lane with the bit has b of (a + b, a - b)
        flip = m.as_f32(m.or_(m.shl(m.and_(lane, bit), 32 - bit.bit_length()), ONE_F32_BITS))
        v = [m.ffma(x, flip, m.as_f32(m.shuffle_xor(x, bit))) for x in v]
    return [m.fmul(x, 0.5**0.5) for x in v]


def correct_block_scales(
    m: LaneMemoryOps, pairs: Sequence[Pair], quantizer: KernelQuantizer, uniforms: Words
) -> tuple[list[Word], Word, Words]:
    """(grid pairs, E4M3 codes, values) of two blocks of this lane, each with the seven others of its run in lanes of
    the same place; `uniforms` in [0, 1), one per block.
    """
    _, values, steps = block_scales(m, pair_amax(m, pairs), quantizer, [])
    sides, drawn = [], []
    for side, value, step, uniform in zip(zip(*pairs, strict=True), values, steps, uniforms, strict=True):
        by = prepare_encode_scale(m, step, quantizer)
        z = [apply_encode_scale(m, m.fabs(x), by, quantizer) for x in side]
        rounded = [round_nearest_e2m1(m, m.fmin(x, E2M1.max), "away") for x in z]
        square, cross = (
            _sum_over_run(m, [m.fmul(a, b) for a, b in zip(z, other, strict=True)]) for other in (z, rounded)
        )
        ratio = m.as_f32(m.select_if(m.fless(0.0, cross), m.fdiv(square, cross), ONE_F32_BITS))
        drawn.append(_round_stochastic_e4m3(m, m.fmul(value, ratio), uniform))
        sides.append(rounded)
    grids = [m.pack_exact(low, high) for low, high in zip(*sides, strict=True)]
    made, kept = apply_scale_floor(m, (drawn[0], drawn[1]), quantizer.rule.floor)
    return grids, made, kept


def _sum_over_run(m: LaneMemoryOps, each: Words) -> Word:
    """The sum over a run: a block's in order, then its blocks in order."""
    total = functools.reduce(m.fadd, each)
    return functools.reduce(m.fadd, [m.as_f32(m.shuffle_from_block(total, tile)) for tile in range(BLOCKS_PER_RUN)])


def _round_stochastic_e4m3(m: LaneMemoryOps, wanted: Word, uniform: Word) -> Word:
    """Rounds `wanted` stochastically to a neighbour among E4M3's values."""
    inside = m.fmin(wanted, E4M3.max)
    binade = m.fmax(m.as_f32(m.and_(inside, EXPONENT)), E4M3.min_normal)
    gap = m.fmul(binade, 2.0**-E4M3.mantissa_bits)
    below = m.floor_grid(inside, m.fmul(gap, 2.0))
    up = m.fless(m.fmul(uniform, gap), m.fsub(wanted, below))
    return m.fmin(m.fadd(below, m.as_f32(m.select_if(up, gap, 0))), E4M3.max)


def _uniform(m: LaneMemoryOps, word: Word) -> Word:
    """Of 24 bits."""
    return m.fmul(m.u32_to_f32(word), 2.0**-24)


def _columns(
    m: LaneMemoryOps, turned: Sequence[Words], quantizer: KernelQuantizer, state: Words, packed: bool
) -> list[list[Word]]:
    """`q.quantize_columns_to_bf16` by these scales: a block's three bytes are those of one random word."""
    k0, k1, index = state[:3]
    words = [q.counter_hash_word(m, m.iadd(index, column), k0, k1) for column in range(4)]
    uniforms = [_uniform(m, m.prmt(word, 0, 0x4012)) for word in words]
    made = []
    for k, pairs in enumerate(zip(*q.float_pairs(turned), strict=True)):
        grids, scale_codes, values = correct_block_scales(m, pairs, quantizer, uniforms[2 * k : 2 * k + 2])
        made.append((q.column_pair_words(m, pairs, grids, m.pack_exact(*values), packed), scale_codes))
    return q.interleave_columns(m, made, packed)


def _store_rows(m, array: int, at: LanePosition, turned: Sequence[Words], quantizer: KernelQuantizer, state) -> None:
    """Writes carriers of blocks along rows. A lane has whole blocks of four rows, whose random bytes are those of three
    words.
    """
    part = m.and_(at.thread, 3)
    here = dataclasses.replace(at, token=m.imad(part, 4, at.token), column=m.imad(part, -4, at.column))
    k0, k1, index = state(here)[0][:3]
    words = [q.counter_hash_word(m, m.iadd(index, column), k0, k1) for column in range(3)]
    blocks = lane_rows_f32(m, q.float_pairs(turned), TOKEN_BLOCK // m.columns)
    for r in range(0, 4, 2):
        uniforms = [_uniform(m, _gather_byte(m, words, r + i)) for i in range(2)]
        pairs = list(zip(*blocks[r : r + 2], strict=True))
        grids, _, values = correct_block_scales(m, pairs, quantizer, uniforms)
        scale = m.pack_exact(*values)
        carriers = [q.dequantize_pair(m, pair, grid, scale) for pair, grid in zip(pairs, grids, strict=True)]
        for i, selector in enumerate((0x5410, 0x7632)):  # halves are rows
            row = [m.prmt(a, b, selector) for a, b in zip(carriers[::2], carriers[1::2], strict=True)]
            to = m.address(array, m.imad(m.iadd(here.token, r + i), at.width, here.column), 2)
            for half in (0, 4):
                m.store(to, row[half : half + 4], offset=4 * half, where=at.in_bounds)


def _gather_byte(m: LaneMemoryOps, words: Words, number: int) -> Word:
    """Byte `number` of each of three words, the first one's highest."""
    low = m.prmt(words[2], words[1], number | (4 + number) << 4)
    return m.and_(m.prmt(low, words[0], 0x0010 | (4 + number) << 8), 0x00FFFFFF)
