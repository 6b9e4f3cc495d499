"""RMSNorm and its gradient; each row is read once.

    r  = 1 / sqrt(mean(x^2) + eps),  n = x r,  h = bf16(n s)
    g  = the sum of the gradients from the consumers of h, rounded to bf16 after each addition
    dx = bf16(carry + bf16(r (g s - n mean(g s n)))),  ds = sum over rows of g n

A program, 128 lanes, holds whole rows in its registers; a lane has 8 neighbouring columns of every 1024. Sums have a
fixed order: a lane's columns in order, then lanes in pairs, then warps. So the bits are the same on every GPU and on
the host. They are not XLA's: h and dx differ from it by a unit in the last place in at most one of 60,000 elements
(docs/LOG.md, "A kernel for the norm"). 1 / sqrt is two correctly rounded operations. A row whose sum of squares
overflows becomes NaN.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from halfbyte.kernels import triton_launch
from halfbyte.kernels.lane_memory import SHARED_ARRAY_ID
from halfbyte.kernels.lane_ops import Address, LaneMemoryOps, LaneOps, Word, Words
from halfbyte.kernels.mosaic_launch import LaunchConfig, launch_flat

COLUMNS_PER_SPAN = 8  # contiguous columns of a lane: 16 bytes
NORM_STEP = 128 * COLUMNS_PER_SPAN  # columns from one span of a lane to its next
MAX_NORM_WIDTH = 8192  # wider rows do not fit into registers
BACKWARD_ROWS = 32  # rows per program, which sums their part of ds in registers
NORM_WARPS = 4
Spans = Sequence[Words]  # [span][words] of a lane's part of one row
Halves = Callable[[LaneMemoryOps, Words], list[Word]]  # unpacks both elements of each word, in order


def unsupported_norm(tokens: int, width: int, *, capability: tuple[int, int] | None = None) -> str | None:
    """Returns why the norm kernels do not support a [tokens, width] array, or None."""
    if width % NORM_STEP or width > MAX_NORM_WIDTH:
        return f"its kernels need a width that is a multiple of {NORM_STEP} up to {MAX_NORM_WIDTH}, got {width}"
    if tokens % BACKWARD_ROWS:
        return f"its kernels need a multiple of {BACKWARD_ROWS} tokens, got {tokens}"
    return triton_launch.unsupported_tiled(tokens, width, capability=capability)


def _forward_rows(width: int) -> int:
    """Returns the rows per program; a divisor of BACKWARD_ROWS, so that programs divide the tokens."""
    return 4 if width <= MAX_NORM_WIDTH // 2 else 2


@triton_launch.jit_per_shape("eps")
def rms_norm_forward(x: jax.Array, scale: jax.Array, *, eps: float) -> tuple[jax.Array, jax.Array]:
    """Returns h, bf16 like x [tokens, width], and r, float32 [tokens]; `scale` is float32 [width]."""
    tokens, width = validated_norm_dims(x)
    rows = _forward_rows(width)

    def body(m: LaneMemoryOps) -> None:
        first = m.imad(m.program_id(), rows, 0)
        row_indices = [m.iadd(first, r) for r in range(rows)]
        words = [load_row(m, 0, row_index, width) for row_index in row_indices]
        inverses = inverse_rms(m, words, eps)
        store_inverse_rms(m, 3, row_indices, inverses)
        for k in range(width // NORM_STEP):
            weights = _weights(m, 1, k)
            for row_index, row, inverse in zip(row_indices, words, inverses, strict=True):
                m.store(_span_address(m, 2, row_index, k, width), normalize_row(m, row[k], inverse, weights))

    outputs = [jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct((tokens,), jnp.float32)]
    results = launch_flat(
        body, [x, scale], outputs, programs=tokens // rows, lanes=LaunchConfig(COLUMNS_PER_SPAN, 4), name="rms_norm"
    )
    return results[0], results[1]


@triton_launch.jit_per_shape()
def rms_norm_backward(
    x: jax.Array, inverse: jax.Array, scale: jax.Array, carry: jax.Array, gradients: tuple[jax.Array, ...]
) -> tuple[jax.Array, jax.Array]:
    """Returns dx, bf16 like x, and partial sums of ds, float32 [tokens / 32, width], to be summed over the first dim.

    Args:
        inverse: r of each row, as `rms_norm_forward` returns it.
        carry: Gradient of x from its other consumers.
        gradients: Gradients from the consumers of h.
    """
    tokens, width = validated_norm_dims(x)
    arrays = [x, inverse, scale, carry, *gradients]
    dx, ds_parts = len(arrays), len(arrays) + 1

    def body(m: LaneMemoryOps) -> None:
        shared_start = m.alloc_shared(32)

        def add_row(i: Word, sums: Words) -> list[Word]:
            row = m.iadd(m.imad(m.program_id(), BACKWARD_ROWS, 0), i)
            r = m.as_f32(m.load(m.address(1, row, 4))[0])
            values, carried, *gradient_rows = (load_row(m, array, row, width) for array in (0, *range(3, dx)))
            g = functools.reduce(functools.partial(_add_bf16, m), gradient_rows)
            dot: Word = 0.0
            new_sums: list[Word] = []
            for k in range(width // NORM_STEP):
                for n, gradient, gs in _products(m, _halves, values[k], g[k], r, _weights(m, 2, k)):
                    dot = m.fadd(dot, m.fmul(gs, n))
                    new_sums.append(m.fadd(sums[len(new_sums)], m.fmul(gradient, n)))
            mean = m.fmul(_reduce_over_lanes(m, [dot], shared_start, m.and_(i, 1))[0], 1 / width)
            for k in range(width // NORM_STEP):
                products = _products(m, _unpack_halves_alternate, values[k], g[k], r, _weights(m, 2, k))
                grad = _pack_bf16(m, [m.fmul(r, m.fsub(gs, m.fmul(n, mean))) for n, _, gs in products])
                m.store(_span_address(m, dx, row, k, width), _add_bf16(m, [carried[k]], [grad])[0])
            return new_sums

        sums = m.fori_loop(BACKWARD_ROWS, add_row, [0.0] * (width // 128))
        for k in range(width // NORM_STEP):
            for half in range(0, COLUMNS_PER_SPAN, 4):
                words = [m.as_u32(v) for v in sums[COLUMNS_PER_SPAN * k + half : COLUMNS_PER_SPAN * k + half + 4]]
                m.store(_span_address(m, ds_parts, m.program_id(), k, width, 4), words, offset=4 * half)

    outputs = [
        jax.ShapeDtypeStruct(x.shape, x.dtype),
        jax.ShapeDtypeStruct((tokens // BACKWARD_ROWS, width), jnp.float32),
    ]
    lanes = LaunchConfig(COLUMNS_PER_SPAN, 4 if width <= MAX_NORM_WIDTH // 2 else 2)
    results = launch_flat(
        body, arrays, outputs, programs=tokens // BACKWARD_ROWS, lanes=lanes, name="rms_norm_backward"
    )
    return results[0], results[1]


def inverse_rms(m: LaneMemoryOps, rows: Sequence[Spans], eps: float) -> list[Word]:
    """Returns r of each row; `rows` are words as `load_row` returns them."""
    width = NORM_STEP * len(rows[0])
    squares = [_squares(m, [v for span in row for v in _halves(m, span)]) for row in rows]
    means = [m.fmul(total, 1 / width) for total in _reduce_over_lanes(m, squares, m.alloc_shared(16 * len(rows)), 0)]
    return [m.reciprocal(m.sqrt(m.fadd(mean, eps))) for mean in means]


def store_inverse_rms(m: LaneMemoryOps, array: int, row_indices: Words, inverses: Words) -> None:
    """Stores r of the rows with these indices in array number `array`."""
    for row_index, inverse in zip(row_indices, inverses, strict=True):
        m.store(m.address(array, row_index, 4), [m.as_u32(inverse)], where=m.less(m.thread_id(), 1))


def normalize_row(m: LaneOps, words: Words, inverse: Word, weights: Words) -> list[Word]:
    """Returns h of the words of a row; `weights` has one float32 per element."""
    return _pack_bf16(m, [m.fmul(m.fmul(v, inverse), s) for v, s in zip(_halves(m, words), weights, strict=True)])


def validated_norm_dims(x: jax.Array) -> tuple[int, int]:
    reason = unsupported_norm(*x.shape)
    if reason:
        raise ValueError(reason)
    tokens, width = x.shape
    return tokens, width


def _span_address(m: LaneMemoryOps, array: int, row: Word, k: int, width: int, size: int = 2) -> Address:
    """Returns the address of the lane's span k of a row."""
    column = m.imad(m.thread_id(), COLUMNS_PER_SPAN, k * NORM_STEP)
    return m.address(array, m.imad(row, width, column), size)


def load_row(m: LaneMemoryOps, array: int, row: Word, width: int) -> list[list[Word]]:
    """Loads the lane's words of a bf16 row."""
    return [m.load(_span_address(m, array, row, k, width), 4) for k in range(width // NORM_STEP)]


def _weights(m: LaneMemoryOps, array: int, k: int) -> list[Word]:
    """Loads the lane's columns of span k of a float32 vector."""
    at = _span_address(m, array, 0, k, 0, 4)
    return [m.as_f32(w) for half in (0, 4) for w in m.load(at, 4, offset=4 * half)]


def _halves(m: LaneOps, words: Words) -> list[Word]:
    return [half(w) for w in words for half in (m.low_bf16, m.high_bf16)]


def _unpack_halves_alternate(m: LaneMemoryOps, words: Words) -> list[Word]:
    """`_halves` by other instructions: ptxas would keep the results of equal ones, two registers per word, from one use
    to the other.
    """
    return [m.as_f32(m.prmt(w, 0, selector)) for w in words for selector in (0x1044, 0x3244)]


def _pack_bf16(m: LaneOps, values: Words) -> list[Word]:
    return [m.pack_round(lo, hi) for lo, hi in zip(values[::2], values[1::2], strict=True)]


def _add_bf16(m: LaneMemoryOps, a: Spans, b: Spans) -> list[list[Word]]:
    """Returns a + b, rounded to bf16."""
    return [
        _pack_bf16(m, [m.fadd(x, y) for x, y in zip(_halves(m, left), _halves(m, right), strict=True)])
        for left, right in zip(a, b, strict=True)
    ]


def _products(
    m: LaneMemoryOps, halves: Halves, x: Words, g: Words, r: Word, weights: Words
) -> list[tuple[Word, Word, Word]]:
    """Returns n, g and g s of each column of a span."""
    columns = zip(halves(m, x), halves(m, g), weights, strict=True)
    return [(m.fmul(value, r), gradient, m.fmul(gradient, s)) for value, gradient, s in columns]


def _squares(m: LaneMemoryOps, values: Words) -> Word:
    """Returns the sum of the squares of bf16 values; each square is exact."""
    total: Word = 0.0
    for v in values:
        total = m.ffma(v, v, total)
    return total


def _reduce_over_lanes(m: LaneMemoryOps, sums: Words, start: int, buffer: Word) -> list[Word]:
    """Reduces each of `sums` over all lanes of the program, through shared memory from byte `start` on.

    With two buffers, lanes may write the sums of the next call to `buffer` 1 while others still read `buffer` 0.
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
    warp_sums = [
        m.load(m.address(SHARED_ARRAY_ID, m.iadd(first, NORM_WARPS * i), 4), NORM_WARPS) for i in range(len(sums))
    ]
    return [m.fadd(*(m.fadd(m.as_f32(a), m.as_f32(b)) for a, b in (w[:2], w[2:]))) for w in warp_sums]
