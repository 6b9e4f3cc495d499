"""RMSNorm in the passes that quantize its result: h = bf16(x r s) is computed where it is read and never written.

    statistics   reads x, leaves r of each row and the maxima of h and of its transform along tokens
    quantize     reads x, writes the operands of h

h, r and every operand have the bits of `norm.forward` and of `maxima` and `quantize` over its h: the sum of a row's
squares has the order of `norm.py`, and h is rounded to bf16 before anything else is done with it. A program of
`statistics` has 16 rows. It reads them for their sums, four at a time, and once more for the maxima, which need all 16
of a column: then they lie in a cache.

Passes over [tokens, width]: two reads of x and the written operands, where the norm and its readers' passes take one
read and one write more.
"""

import jax
import jax.numpy as jnp

from halfbyte.kernels import codes, layout, norm
from halfbyte.kernels.launch import Lanes, launch
from halfbyte.kernels.layout import BLOCK
from halfbyte.kernels.machine import MemoryMachine, Word, Words
from halfbyte.kernels.nvfp4 import BOTH_TILING, Columnwise, Rowwise, TileMaker, name_of, quantize_made, tops_of
from halfbyte.kernels.place import WARPS
from halfbyte.kernels.tile import evaluate

COLUMNS = 4  # of a lane, side by side, where maxima are found
STEP = 128 * COLUMNS
ROWS = 4  # whose sums are found at a time: x's words of so many rows lie in registers


@layout.once("eps")
def statistics(x: jax.Array, scale: jax.Array, *, eps: float) -> tuple[jax.Array, jax.Array, jax.Array]:
    """r, float32 [tokens], and partial maxima of h and of its transform, as `maxima` leaves them; x bf16 [tokens,
    width], `scale` float32 [width].
    """
    tokens, width = norm.checked(x)
    rows = ROWS if width <= norm.WIDEST // 2 else ROWS // 2

    def body(m: MemoryMachine) -> None:
        first = m.imad(m.program(), BLOCK, 0)
        numbers = [m.iadd(first, r) for r in range(BLOCK)]
        inverses: list[Word] = []
        for at in range(0, BLOCK, rows):
            words = [norm.load_row(m, 0, number, width) for number in numbers[at : at + rows]]
            inverses += norm.inverses_of(m, words, eps)
        norm.store_inverses(m, 2, numbers, inverses)

        def turn(i: Word, held: Words) -> list[Word]:
            column = m.imad(m.thread(), COLUMNS, m.imad(i, STEP, 0))
            begin = m.address(0, m.imad(first, width, column), 2)
            read = [m.load(begin, COLUMNS // 2, offset=2 * width * r) for r in range(BLOCK)]
            weights = [m.real(w) for w in m.load(m.address(1, column, 4), COLUMNS)]
            h = [norm.normed(m, words, r, weights) for words, r in zip(read, inverses, strict=True)]
            found = [m.real(top[0]) for top in tops_of(m, h, hadamard=True)]
            return [m.fmax_nan(a, b) for a, b in zip(held, found, strict=True)]

        codes.store_maxima(m, 3, m.repeat(width // STEP, turn, [0.0, 0.0]))

    programs = tokens // BLOCK
    maxima = jax.ShapeDtypeStruct((programs * WARPS,), jnp.int32)
    outputs = [jax.ShapeDtypeStruct((tokens,), jnp.float32), maxima, maxima]
    made = launch(body, [x, scale], outputs, programs=programs, lanes=Lanes(COLUMNS, 4), name="rms_norm_maxima")
    return made[0], made[1], made[2]


@layout.once()
def quantize(
    x: jax.Array, inverse: jax.Array, scale: jax.Array, *,
    rows: Rowwise | None = None, columns: Columnwise | None = None,
) -> tuple[jax.Array, ...]:  # fmt: skip
    """The operands of h that are asked for, as carriers or packed, in one read of x; `inverse` is r."""
    norm.checked(x)
    sides = [side for side in (rows, columns) if side is not None]
    if codes.asked(sides):
        raise ValueError("the passes that norm write carriers; for codes give `quantize` h, of `norm.forward`")

    def body(m, words, given):
        *read, weights = words
        return [norm.normed(m, row, r, weights) for row, r in zip(read, given, strict=True)]

    def make(tiles, inverses, weights):
        outputs = [jnp.bfloat16] * BLOCK
        each = [inverses[r] for r in range(BLOCK)]
        return [evaluate(body, [*tiles, weights[...]], each, outputs=outputs, columns=BOTH_TILING.columns)]

    maker = TileMaker(make, [inverse.reshape(-1, BLOCK), scale.reshape(1, -1, BLOCK)])
    name = f"norm_{name_of(*sides)}"
    return quantize_made([x], maker, [(side, 0) for side in sides], tiling=BOTH_TILING, name=name)
