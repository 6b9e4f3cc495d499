"""RMSNorm and its gradient, each row read once.

    r  = 1 / sqrt(mean(x^2) + eps),  n = x r,  h = bf16(n s)
    g  = the sum of what the readers of h send back, rounded to bf16 after each addition
    dx = bf16(carry + bf16(r (g s - n mean(g s n)))),  ds = sum over rows of g n

A program, 128 lanes, has whole rows in its registers; a lane has 8 neighbouring columns of every 1024. Its sums are
those of a lane in the order of its columns, then of lanes in pairs, then of warps: the same bits on every GPU and on
the host. 1 / sqrt is two correctly rounded operations. A row whose sum of squares overflows becomes NaN.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from halfbyte.kernels import triton_launch
from halfbyte.kernels.lane_memory import SHARED_ARRAY_ID
from halfbyte.kernels.lane_ops import Address, LaneMemoryOps, LaneOps, Word, Words
from halfbyte.kernels.mosaic_launch import LaunchConfig, launch_flat

COLUMNS_PER_SPAN = 8  # columns of a lane that lie side by side: 16 bytes
NORM_STEP = 128 * COLUMNS_PER_SPAN  # from one such span to the lane's next
MAX_NORM_WIDTH = 8192  # more do not fit into registers
BACKWARD_ROWS = 32  # of a program, whose part of ds is summed in registers
NORM_WARPS = 4
Spans = Sequence[Words]  # a lane's words of one row, span by span
Halves = Callable[[LaneMemoryOps, Words], list[Word]]  # both numbers of each word, in order


def unsupported_norm(tokens: int, width: int, *, capability: tuple[int, int] | None = None) -> str | None:
    """Why these kernels cannot take a [tokens, width] array, or None."""
    if width % NORM_STEP or width > MAX_NORM_WIDTH:
        return f"its kernels need a width that is a multiple of {NORM_STEP} up to {MAX_NORM_WIDTH}, got {width}"
    if tokens % BACKWARD_ROWS:
        return f"its kernels need a multiple of {BACKWARD_ROWS} tokens, got {tokens}"
    return triton_launch.unsupported_tiled(tokens, width, capability=capability)


def _forward_rows(width: int) -> int:
    """Of a program: a part of BACKWARD_ROWS, so that no row is left over."""
    return 4 if width <= MAX_NORM_WIDTH // 2 else 2


@triton_launch.jit_per_shape("eps")
def rms_norm_forward(x: jax.Array, scale: jax.Array, *, eps: float) -> tuple[jax.Array, jax.Array]:
    """h, bf16 as x [tokens, width], and r, float32 [tokens]; `scale` float32 [width]."""
    tokens, width = validated_norm_dims(x)
    rows = _forward_rows(width)

    def body(m: LaneMemoryOps) -> None:
        first = m.imad(m.program_id(), rows, 0)
        numbers = [m.iadd(first, r) for r in range(rows)]
        words = [load_row(m, 0, number, width) for number in numbers]
        inverses = inverse_rms(m, words, eps)
        store_inverse_rms(m, 3, numbers, inverses)
        for k in range(width // NORM_STEP):
            weights = _weights(m, 1, k)
            for number, row, inverse in zip(numbers, words, inverses, strict=True):
                m.store(_span_address(m, 2, number, k, width), normalize_row(m, row[k], inverse, weights))

    outputs = [jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct((tokens,), jnp.float32)]
    made = launch_flat(
        body, [x, scale], outputs, programs=tokens // rows, lanes=LaunchConfig(COLUMNS_PER_SPAN, 4), name="rms_norm"
    )
    return made[0], made[1]


@triton_launch.jit_per_shape()
def rms_norm_backward(
    x: jax.Array, inverse: jax.Array, scale: jax.Array, carry: jax.Array, gradients: tuple[jax.Array, ...]
) -> tuple[jax.Array, jax.Array]:
    """dx, bf16 as x, and parts of ds, float32 [tokens / 32, width], to be summed over the first dim. `carry` is x's
    gradient from elsewhere, `gradients` those of h's readers; r is `inverse`.
    """
    tokens, width = validated_norm_dims(x)
    arrays = [x, inverse, scale, carry, *gradients]
    dx, parts = len(arrays), len(arrays) + 1

    def body(m: LaneMemoryOps) -> None:
        slots = m.alloc_shared(32)

        def turn(i: Word, sums: Words) -> list[Word]:
            row = m.iadd(m.imad(m.program_id(), BACKWARD_ROWS, 0), i)
            r = m.as_f32(m.load(m.address(1, row, 4))[0])
            values, carried, *each = (load_row(m, array, row, width) for array in (0, *range(3, dx)))
            g = functools.reduce(functools.partial(_added, m), each)
            dot: Word = 0.0
            added: list[Word] = []
            for k in range(width // NORM_STEP):
                for n, gradient, gs in _products(m, _halves, values[k], g[k], r, _weights(m, 2, k)):
                    dot = m.fadd(dot, m.fmul(gs, n))
                    added.append(m.fadd(sums[len(added)], m.fmul(gradient, n)))
            mean = m.fmul(_reduce_over_lanes(m, [dot], slots, m.and_(i, 1))[0], 1 / width)
            for k in range(width // NORM_STEP):
                products = _products(m, _unpack_halves_alternate, values[k], g[k], r, _weights(m, 2, k))
                made = _packed(m, [m.fmul(r, m.fsub(gs, m.fmul(n, mean))) for n, _, gs in products])
                m.store(_span_address(m, dx, row, k, width), _added(m, [carried[k]], [made])[0])
            return added

        sums = m.fori_loop(BACKWARD_ROWS, turn, [0.0] * (width // 128))
        for k in range(width // NORM_STEP):
            for half in range(0, COLUMNS_PER_SPAN, 4):
                words = [m.as_u32(v) for v in sums[COLUMNS_PER_SPAN * k + half : COLUMNS_PER_SPAN * k + half + 4]]
                m.store(_span_address(m, parts, m.program_id(), k, width, 4), words, offset=4 * half)

    outputs = [
        jax.ShapeDtypeStruct(x.shape, x.dtype),
        jax.ShapeDtypeStruct((tokens // BACKWARD_ROWS, width), jnp.float32),
    ]
    lanes = LaunchConfig(COLUMNS_PER_SPAN, 4 if width <= MAX_NORM_WIDTH // 2 else 2)
    made = launch_flat(body, arrays, outputs, programs=tokens // BACKWARD_ROWS, lanes=lanes, name="rms_norm_backward")
    return made[0], made[1]


def inverse_rms(m: LaneMemoryOps, rows: Sequence[Spans], eps: float) -> list[Word]:
    """r of each of these rows, whose words lie in the lanes as `load_row` has them."""
    width = NORM_STEP * len(rows[0])
    squares = [_squares(m, [v for span in row for v in _halves(m, span)]) for row in rows]
    means = [m.fmul(total, 1 / width) for total in _reduce_over_lanes(m, squares, m.alloc_shared(16 * len(rows)), 0)]
    return [m.reciprocal(m.sqrt(m.fadd(mean, eps))) for mean in means]


def store_inverse_rms(m: LaneMemoryOps, array: int, numbers: Words, inverses: Words) -> None:
    """Writes r of the rows of these numbers."""
    for number, inverse in zip(numbers, inverses, strict=True):
        m.store(m.address(array, number, 4), [m.as_u32(inverse)], where=m.less(m.thread_id(), 1))


def normalize_row(m: LaneOps, words: Words, inverse: Word, weights: Words) -> list[Word]:
    """h of a row's words, for which `weights` has a number for each half."""
    return _packed(m, [m.fmul(m.fmul(v, inverse), s) for v, s in zip(_halves(m, words), weights, strict=True)])


def validated_norm_dims(x: jax.Array) -> tuple[int, int]:
    reason = unsupported_norm(*x.shape)
    if reason:
        raise ValueError(reason)
    tokens, width = x.shape
    return tokens, width


def _span_address(m: LaneMemoryOps, array: int, row: Word, k: int, width: int, size: int = 2) -> Address:
    """The lane's span number k of a row."""
    column = m.imad(m.thread_id(), COLUMNS_PER_SPAN, k * NORM_STEP)
    return m.address(array, m.imad(row, width, column), size)


def load_row(m: LaneMemoryOps, array: int, row: Word, width: int) -> list[list[Word]]:
    """The lane's words of a row of bf16."""
    return [m.load(_span_address(m, array, row, k, width), 4) for k in range(width // NORM_STEP)]


def _weights(m: LaneMemoryOps, array: int, k: int) -> list[Word]:
    """The lane's columns of span k of a float32 vector."""
    at = _span_address(m, array, 0, k, 0, 4)
    return [m.as_f32(w) for half in (0, 4) for w in m.load(at, 4, offset=4 * half)]


def _halves(m: LaneOps, words: Words) -> list[Word]:
    return [half(w) for w in words for half in (m.low_bf16, m.high_bf16)]


def _unpack_halves_alternate(m: LaneMemoryOps, words: Words) -> list[Word]:
    """`_halves` by other instructions: a compiler that sees the same ones keeps the first results, two registers for
    each word, from one use to the other.
    """
    return [m.as_f32(m.prmt(w, 0, selector)) for w in words for selector in (0x1044, 0x3244)]


def _packed(m: LaneOps, values: Words) -> list[Word]:
    return [m.pack_round(lo, hi) for lo, hi in zip(values[::2], values[1::2], strict=True)]


def _added(m: LaneMemoryOps, a: Spans, b: Spans) -> list[list[Word]]:
    """a + b, rounded to bf16."""
    return [
        _packed(m, [m.fadd(x, y) for x, y in zip(_halves(m, left), _halves(m, right), strict=True)])
        for left, right in zip(a, b, strict=True)
    ]


def _products(
    m: LaneMemoryOps, halves: Halves, x: Words, g: Words, r: Word, weights: Words
) -> list[tuple[Word, Word, Word]]:
    """n, g and g s of each column of a span."""
    columns = zip(halves(m, x), halves(m, g), weights, strict=True)
    return [(m.fmul(value, r), gradient, m.fmul(gradient, s)) for value, gradient, s in columns]


def _squares(m: LaneMemoryOps, values: Words) -> Word:
    """The sum of their squares, which are exact."""
    total: Word = 0.0
    for v in values:
        total = m.ffma(v, v, total)
    return total


def _reduce_over_lanes(m: LaneMemoryOps, sums: Words, start: int, buffer: Word) -> list[Word]:
    """Each of `sums` over all lanes of the program, through shared memory from byte `start` on, of which there are two
    `buffer`s where lanes may already write the next sums.
    """
    lane, warp = m.and_(m.thread_id(), 31), m.shr(m.thread_id(), 5)
    first = m.imad(buffer, NORM_WARPS * len(sums), start // 4)
    for i, total in enumerate(sums):
        for bit in (16, 8, 4, 2, 1):
            total = m.fadd(total, m.as_f32(m.shuffle_xor(total, bit)))
        m.store(
            m.address(SHARED_ARRAY_ID, m.iadd(m.iadd(first, NORM_WARPS * i), warp), 4),
            [m.as_u32(total)],
            where=m.less(lane, 1),
        )
    m.barrier()
    every = [m.load(m.address(SHARED_ARRAY_ID, m.iadd(first, NORM_WARPS * i), 4), NORM_WARPS) for i in range(len(sums))]
    return [m.fadd(*(m.fadd(m.as_f32(a), m.as_f32(b)) for a, b in (w[:2], w[2:]))) for w in every]
