"""SwiGLU fused into the quantize passes of the MLP, forward and backward.

    s = 1 / (1 + exp(-g)),   a = bf16(g s),   h = bf16(a u)
    du = bf16(dh a),   dg = bf16(bf16(dh u) (s (1 + g (1 - s))))

Float32 arithmetic between the stated roundings. exp and the reciprocal are the GPU's approximations, a few units in the
last place from XLA's; the maxima pass and the quantize pass of one tensor run the same code, so that scales and codes
belong together. Conformance with `reference` is therefore stated on the quantizers' inputs: `activation` returns the h,
dg and du that the kernels see, and every operand equals `quantize` of those, bit for bit.

g, u and dh may come from GEMMs that owe them a float32 factor each (`owed`): what is read is then bf16(g owed), and so
on. With carriers nothing is owed.

Passes over [tokens, hidden]: forward, two reads of g and u and one written operand; backward, two reads of g, u and dh
and five written operands. h, dg and du never reach memory.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from halfbyte.kernels import codes, layout
from halfbyte.kernels.launch import Lanes
from halfbyte.kernels.layout import BLOCK, Tiling
from halfbyte.kernels.machine import Machine, TokenRows, Word, Words
from halfbyte.kernels.nvfp4 import Columnwise, Made, Rowwise, find_maxima, quantize_made
from halfbyte.kernels.stacks import Layer
from halfbyte.kernels.tile import evaluate

FORWARD_TILING = Tiling(4, 2)
BACKWARD_MAXIMA_TILING = Tiling(2, 4)
# Of a lane that keeps 48 words, as many as have room: 96 registers for a carrier, 168 for one of two candidates.
BACKWARD_CODES, BACKWARD_CARRIERS, BACKWARD_CHOICES = Lanes(2, 4), Lanes(2, 5), Lanes(2, 3)
H_FIRST = (4, 0, 1, 2, 3)  # the order of the backward pass's operands: h's registers are free for the others


def _gate(m: Machine, g_word: Word) -> tuple[list[Word], list[Word], Word]:
    """g and sigmoid(g) of both halves, and the word of a."""
    g = [m.low(g_word), m.high(g_word)]
    s = [m.sigmoid(x) for x in g]
    return g, s, m.pack_round(*(m.fmul(x, y) for x, y in zip(g, s, strict=True)))


def forward_words(m: Machine, g: Words, u: Words) -> list[Word]:
    """h of one token row."""
    return [m.mul_bf16x2(_gate(m, a)[2], b) for a, b in zip(g, u, strict=True)]


def backward_words(m: Machine, g: Words, u: Words, d: Words) -> tuple[list[Word], ...]:
    """dg, du and h of one token row."""
    dg, du, h = [], [], []
    for g_word, u_word, d_word in zip(g, u, d, strict=True):
        gate, s, a = _gate(m, g_word)
        through = m.mul_bf16x2(d_word, u_word)
        slopes = [m.fmul(y, m.ffma(x, m.fsub(1.0, y), 1.0)) for x, y in zip(gate, s, strict=True)]
        dg.append(m.pack_round(m.fmul(m.low(through), slopes[0]), m.fmul(m.high(through), slopes[1])))
        du.append(m.mul_bf16x2(d_word, a))
        h.append(m.mul_bf16x2(a, u_word))
    return dg, du, h


def forward_made(m: Machine, words: TokenRows) -> list[list[list[Word]]]:
    """h, from the token rows of g, then of u."""
    count = len(words) // 2
    return [[forward_words(m, words[r], words[count + r]) for r in range(count)]]


def backward_made(m: Machine, words: TokenRows) -> list[list[list[Word]]]:
    """dg, du and h, from the token rows of g, of u, then of dh."""
    count = len(words) // 3
    rows = [backward_words(m, words[r], words[count + r], words[2 * count + r]) for r in range(count)]
    return [[row[i] for row in rows] for i in range(3)]


FORWARD = Made(forward_made, 1)


def _forward_maker(tiling: Tiling) -> Callable[[list[jax.Array]], list[list[jax.Array]]]:
    """From the tiles of g and u to those of h."""

    def body(m, words, _):
        return forward_made(m, words)[0]

    def make(tiles: list[jax.Array]) -> list[list[jax.Array]]:
        return [evaluate(body, tiles, [], outputs=[jnp.bfloat16] * BLOCK, columns=tiling.columns)]

    return make


def forward_maxima(
    g: jax.Array,
    u: jax.Array,
    *,
    owed: jax.Array | None = None,
    hadamard: bool = True,
    into: Sequence[Layer] = (),
    tiling: Tiling = FORWARD_TILING,
) -> tuple[jax.Array, ...]:
    """Partial maxima of h, and of its transform along tokens if `hadamard`; as `maxima`. With `into`, layers of two
    stacks, g and u are written there, and the stacks are the last results.
    """
    run = functools.partial(find_maxima, [g, u], FORWARD, owed=owed, hadamard=hadamard, into=into)
    return run(tiling=tiling, name="swiglu_forward_maxima")


def quantize_forward(
    g: jax.Array,
    u: jax.Array,
    *,
    owed: jax.Array | None = None,
    rows: Rowwise | None = None,
    columns: Columnwise | None = None,
    tiling: Tiling = FORWARD_TILING,
) -> tuple[jax.Array, ...]:
    """The operands of h asked for, in one read of g and u, as `quantize` gives them."""
    jobs: list[tuple[Rowwise | Columnwise, int]] = [(side, 0) for side in (rows, columns) if side is not None]
    if codes.asked([side for side, _ in jobs]) or not layout.divides(g.shape[1]):
        layout.check(g, u)
        run = functools.partial(codes.quantize_made, name="swiglu_forward_codes")
        return run([g, u], forward_made, jobs, lanes=Lanes(4, 4), owed=owed)
    if owed is not None:
        raise ValueError("the pass that writes carriers in tiles reads what owes nothing; multiply g and u first")
    return quantize_made([g, u], _forward_maker(tiling), jobs, tiling=tiling, name="swiglu_forward")


def backward_maxima(
    g: jax.Array | Layer,
    u: jax.Array | Layer,
    dh: jax.Array,
    *,
    owed: jax.Array | None = None,
    hadamard: bool = True,
    tensors: int = 2,
    tiling: Tiling = BACKWARD_MAXIMA_TILING,
) -> tuple[jax.Array, ...]:
    """Partial maxima of dg, of its transform, of du, of its transform (without the transforms unless `hadamard`), and
    with `tensors=3` of h as well.
    """
    run = functools.partial(find_maxima, [g, u, dh], Made(backward_made, tensors), owed=owed, hadamard=hadamard)
    return run(tiling=tiling, name="swiglu_backward_maxima")


def quantize_backward(
    g: jax.Array | Layer,
    u: jax.Array | Layer,
    dh: jax.Array,
    *,
    owed: jax.Array | None = None,
    dg: tuple[Rowwise, Columnwise],
    du: tuple[Rowwise, Columnwise],
    h: Columnwise,
) -> tuple[jax.Array, ...]:
    """Five operands in one read of g, u and dh: dg by rows and by columns, du by rows and by columns, h by columns; as
    `quantize` gives them.
    """
    layout.check(g, u, dh)
    jobs: list[tuple[Rowwise | Columnwise, int]] = [(dg[0], 0), (dg[1], 0), (du[0], 1), (du[1], 1), (h, 2)]
    sides = [side for side, _ in jobs]
    name = "swiglu_backward_codes" if codes.asked(sides) else "swiglu_backward"
    run = functools.partial(codes.quantize_made, [g, u, dh], backward_made, jobs, order=H_FIRST, name=name)
    return run(lanes=_backward_lanes(sides), owed=owed)


def _backward_lanes(sides: Sequence[Rowwise | Columnwise]) -> Lanes:
    if codes.asked(sides):
        return BACKWARD_CODES
    return BACKWARD_CHOICES if any(side.rule.chooses for side in sides) else BACKWARD_CARRIERS
