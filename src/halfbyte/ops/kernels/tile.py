"""How a body meets its tile: words in, words out, on the GPU as one inline-assembly block.

Every kernel of this room views a token-major [tokens, columns] array as [tokens / rows, rows, columns / 16, 16]. One
program owns `rows` tokens by `blocks` blocks of 16 columns; each token row is its own [blocks, 16] register tile, so
the token axis never leaves the lane: token-axis maxima and the Hadamard transform are register arithmetic, and nothing
is transposed in memory.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from halfbyte.ops.kernels.inline import inline_ptx
from halfbyte.ops.kernels.ptx import Ptx
from halfbyte.ops.kernels.vector import Vector


def evaluate(
    body: Callable[..., Sequence[Any]],
    tiles: Sequence[jax.Array],
    scalars: Sequence[jax.Array],
    *,
    outputs: Sequence[Any],
    columns: int,
    interpret: bool,
) -> list[jax.Array]:
    """The [blocks, 16] tiles of dtypes `outputs` that `body(machine, words, scalars)` makes.

    `words[i]` holds tile i of each lane: a list of 32-bit words (two bf16, or one of a 32-bit dtype, in each).
    `scalars` are float32 or int32 scalars or tiles; a tile gives the value of the lane's first column. The body
    returns, for each output, the list of words of the lane.
    """
    run = _evaluate_vector if interpret else _evaluate_ptx
    return run(body, tiles, scalars, outputs, columns)


def words_per_lane(dtype: Any, columns: int) -> int:
    return max(1, columns * jnp.dtype(dtype).itemsize // 4)


def _evaluate_ptx(body: Any, tiles: Any, scalars: Any, outputs: Any, columns: int) -> list[jax.Array]:
    shape = tiles[0].shape
    scalars = [jnp.broadcast_to(s, shape) for s in scalars]
    machine = Ptx(columns)
    position = sum(words_per_lane(d, columns) for d in outputs)
    total_outputs = position
    moves, inputs = [], []
    for array in (*tiles, *scalars):
        kind = "f" if array.dtype == jnp.float32 else "r"
        words = []
        for _ in range(words_per_lane(array.dtype, columns)):
            reg = machine.reg(kind)
            moves.append(f"mov.b32 {reg.name}, ${position};")
            words.append(reg)
            position += 1
        inputs.append(words)
    machine.lines = moves
    results = body(machine, inputs[: len(tiles)], [words[0] for words in inputs[len(tiles) :]])
    flat = [word for words in results for word in words]
    if len(flat) != total_outputs:
        raise ValueError(f"the body returned {len(flat)} words a lane, its outputs {outputs} take {total_outputs}")
    stores = [f"mov.b32 ${i}, {reg.name};" for i, reg in enumerate(flat)]
    declared = {"r": ".b32", "f": ".f32", "h": ".b16", "p": ".pred"}
    declarations = [f".reg {declared[k]} {k}<{n}>;" for k, n in machine.count.items() if n]
    constraints = ["=r"] * total_outputs + [
        "f" if array.dtype == jnp.float32 else "r"
        for array in (*tiles, *scalars)
        for _ in range(words_per_lane(array.dtype, columns))
    ]
    return inline_ptx(
        "{\n" + "\n".join([*declarations, *machine.lines, *stores]) + "\n}",
        [*tiles, *scalars],
        constraints=",".join(constraints),
        pack=columns,
        results=[jax.ShapeDtypeStruct(shape, d) for d in outputs],
    )


def _evaluate_vector(body: Any, tiles: Any, scalars: Any, outputs: Any, columns: int) -> list[jax.Array]:
    shape = tiles[0].shape
    machine = Vector(columns)
    firsts = [jnp.broadcast_to(s, shape)[:, ::columns] for s in scalars]
    results = body(machine, [_split(t, columns) for t in tiles], [_known(s) for s in firsts])
    return [_join(words, shape, d, columns) for words, d in zip(results, outputs, strict=True)]


def _known(x: jax.Array) -> jax.Array:
    return x if x.dtype == jnp.float32 else x.astype(jnp.uint32)


def _split(tile: jax.Array, columns: int) -> list[jax.Array]:
    """The words of a tile, each [blocks, lanes]."""
    lanes = tile.reshape(tile.shape[0], -1, columns)
    if tile.dtype.itemsize == 4:
        return [_known(lanes[:, :, i]) for i in range(columns)]
    per_word = 4 // tile.dtype.itemsize
    unsigned = {1: jnp.uint8, 2: jnp.uint16}[tile.dtype.itemsize]
    raw = lax.bitcast_convert_type(lanes, unsigned).astype(jnp.uint32)
    words = []
    for first in range(0, columns, per_word):
        word = raw[:, :, first]
        for i in range(1, per_word):
            word = word | (raw[:, :, first + i] << np.uint32(8 * tile.dtype.itemsize * i))
        words.append(word)
    return words


def _join(words: Sequence[jax.Array], shape: tuple[int, ...], dtype: Any, columns: int) -> jax.Array:
    """The tile whose words are given: the inverse of `_split`."""
    dtype = jnp.dtype(dtype)
    if dtype.itemsize == 4:
        elements = [lax.bitcast_convert_type(w, dtype) for w in words]
        return jnp.stack(elements, -1).reshape(shape)
    width = 8 * dtype.itemsize
    unsigned = {1: jnp.uint8, 2: jnp.uint16}[dtype.itemsize]
    mask = np.uint32((1 << width) - 1)
    elements = [((w >> np.uint32(width * i)) & mask).astype(unsigned) for w in words for i in range(32 // width)]
    return lax.bitcast_convert_type(jnp.stack(elements[:columns], -1).reshape(shape), dtype)
