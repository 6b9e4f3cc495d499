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
from jax.typing import DTypeLike

from halfbyte.kernels.interpret import is_interpreted
from halfbyte.kernels.ptx import Ptx
from halfbyte.kernels.vector import Vector

Body = Callable[..., Sequence[Sequence[Any]]]  # (machine, words, scalars) -> words of each output


def evaluate(
    body: Body,
    tiles: Sequence[jax.Array],
    scalars: Sequence[jax.Array],
    *,
    outputs: Sequence[DTypeLike],
    columns: int,
) -> list[jax.Array]:
    """The [blocks, 16] tiles of dtypes `outputs` that `body(machine, words, scalars)` makes.

    `words[i]` holds tile i of each lane: a list of 32-bit words (two bf16, or one of a 32-bit dtype, in each).
    `scalars` are float32 or int32 scalars or tiles; a tile gives the value of the lane's first column. The body
    returns, for each output, the list of words of the lane.
    """
    run = _evaluate_vector if is_interpreted() else _evaluate_ptx
    return run(body, tiles, scalars, outputs, columns)


def words_per_lane(dtype: DTypeLike, columns: int) -> int:
    return max(1, columns * jnp.dtype(dtype).itemsize // 4)


def _evaluate_ptx(
    body: Body, tiles: Sequence[jax.Array], scalars: Sequence[jax.Array], outputs: Sequence[DTypeLike], columns: int
) -> list[jax.Array]:
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
    from halfbyte.kernels.inline import inline_ptx  # loads Triton's lowering, which only a GPU needs

    return inline_ptx(
        "{\n" + "\n".join([*declarations, *machine.lines, *stores]) + "\n}",
        [*tiles, *scalars],
        constraints=",".join(constraints),
        pack=columns,
        results=[jax.ShapeDtypeStruct(shape, d) for d in outputs],
    )


def _evaluate_vector(
    body: Body, tiles: Sequence[jax.Array], scalars: Sequence[jax.Array], outputs: Sequence[DTypeLike], columns: int
) -> list[jax.Array]:
    """On the host, in NumPy: nothing to compile, and denormals as on the GPU."""
    shape = tiles[0].shape

    def host(*arrays: jax.Array) -> list[np.ndarray]:
        words = [_split(np.asarray(a), columns) for a in arrays[: len(tiles)]]
        firsts = [_known(np.broadcast_to(np.asarray(a), shape)[:, ::columns]) for a in arrays[len(tiles) :]]
        with np.errstate(all="ignore"):
            results = body(Vector(columns), words, firsts)
        return [_join(words, shape, d) for words, d in zip(results, outputs, strict=True)]

    return jax.pure_callback(host, [jax.ShapeDtypeStruct(shape, d) for d in outputs], *tiles, *scalars)


def _known(x: np.ndarray) -> np.ndarray:
    return x if x.dtype == np.float32 else x.astype(np.uint32)


def _split(tile: np.ndarray, columns: int) -> list[np.ndarray]:
    """The words of a tile, each [blocks, lanes]."""
    dtype = np.float32 if tile.dtype == np.float32 else np.uint32
    lanes = np.ascontiguousarray(tile).view(dtype).reshape(tile.shape[0], tile.shape[1] // columns, -1)
    return [lanes[:, :, i] for i in range(lanes.shape[2])]


def _join(words: Sequence[np.ndarray], shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
    """The tile whose words are given: the inverse of `_split`."""
    return np.ascontiguousarray(np.stack(words, -1)).view(jnp.dtype(dtype)).reshape(shape)
