"""How kernels cut an array into programs, and which arrays they cannot take."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from halfbyte.kernels.interpret import is_interpreted
from halfbyte.kernels.stacks import Layer
from halfbyte.later import later

plgpu = later("jax.experimental.pallas.triton")
BLOCK = 16
P = ParamSpec("P")
R = TypeVar("R")


@dataclasses.dataclass(frozen=True)
class Tiling:
    """`columns` a lane and `warps` a program; programs are numbered along a token row first."""

    columns: int = 4
    warps: int = 4

    @property
    def width(self) -> int:
        return 32 * self.columns * self.warps


def unsupported(tokens: int, columns: int, *, capability: tuple[int, int] | None = None) -> str | None:
    """Why the quantize kernels cannot take a [tokens, columns] array, or None."""
    if tokens % BLOCK:
        return f"the GPU kernels need a multiple of {BLOCK} tokens, got {tokens}"
    if capability is not None and capability < (9, 0):
        return f"the GPU kernels need compute capability 9.0 or newer, got {capability[0]}.{capability[1]}"
    return too_many(tokens, columns)


def too_many(tokens: int, columns: int) -> str | None:
    """Why a kernel cannot find every element of a [tokens, columns] array, or None."""
    if tokens * columns > 2**32:
        return f"the GPU kernels number elements with 32 bits, too few for {tokens} x {columns}"
    return None


def divides(columns: int) -> bool:
    """Whether tiles divide such rows; kernels without tiles (`codes.py`) serve the others."""
    return columns % 128 == 0


def fit(tiling: Tiling, columns: int) -> Tiling:
    """`tiling` with as many warps as divide the columns."""
    warps = tiling.warps
    while warps > 1 and columns % (32 * tiling.columns * warps):
        warps //= 2
    return dataclasses.replace(tiling, warps=warps)


def once(*static: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Traces and lowers a pass once for all its calls with the same shapes and options.

    A kernel's code holds the source lines of the call that it was traced for, and XLA merges only calls with equal
    code: without this, three linears that quantize the same x on three lines would do it three times.
    """
    return lambda fn: jax.jit(fn, static_argnames=static)


def check(*arrays: jax.Array | Layer) -> None:
    """Raises ValueError for an array that no kernel takes, and for several that one cannot read by the same numbers: a
    kernel without tiles has the first one's shape and dtype, and reads wherever they lead.
    """
    x = arrays[0]
    reason = unsupported(*x.shape) if x.ndim == 2 else f"the GPU kernels need [tokens, columns], got shape {x.shape}"
    kinds = [f"{a.dtype.name}{list(a.shape)}" for a in arrays]
    if len(set(kinds)) > 1:
        reason = f"a GPU kernel reads arrays of one shape and dtype, got {', '.join(kinds)}"
    if reason:
        raise ValueError(reason)


@dataclasses.dataclass(frozen=True)
class Results:
    """What a kernel makes, in the order of its results: `outputs`, (rows out of a tile's tokens, dtype) each; `maxima`
    int32 arrays, one number a program; and stacks, of which it writes `into` layers in place.
    """

    outputs: Sequence[tuple[int, DTypeLike]] = ()
    maxima: int = 0
    into: Sequence[Layer] = ()


def call(
    kernel: Callable[..., None],
    arrays: Sequence[jax.Array | Layer],
    scalars: Sequence[jax.Array | Layer],
    *,
    makes: Results,
    rows: int = BLOCK,
    tiling: Tiling,
    name: str,
) -> list[jax.Array]:
    """Runs `kernel(program, array_refs, scalar_refs, output_refs, maxima_refs)` over tiles of `rows` tokens. References
    of layers follow those of the outputs. Scalars are vectors; of a table of them, one for each of so many equal parts
    of the tokens, a program sees its part's; of one for each column, [1, columns / 16, 16], those of its columns; of a
    layer of a stack, those of that layer.
    """
    outputs, maxima, into = makes.outputs, makes.maxima, makes.into
    tokens, width = arrays[0].shape
    tiling = fit(tiling, width)
    groups, blocks = tokens // rows, tiling.width // BLOCK
    grid = (groups, width // tiling.width)

    def spec(count: int, layers: tuple[int, ...] = ()) -> pl.BlockSpec:
        first = (0,) * len(layers)
        shape = (*layers, None, count, blocks, BLOCK)
        return pl.BlockSpec(shape, lambda j, i: (*first, i, 0, j, 0))

    def in_spec(array: jax.Array | Layer) -> pl.BlockSpec:
        return spec(array.shape[0] // groups, array.stack.shape[:1] if isinstance(array, Layer) else ())

    def whole(array: jax.Array | Layer) -> jax.Array:
        return array.stack if isinstance(array, Layer) else array

    def view(array: jax.Array | Layer) -> jax.Array:
        return whole(array.reshape(groups, array.shape[0] // groups, width // BLOCK, BLOCK))

    lying = [*arrays, *scalars, *into]
    indices = [array.index.reshape(1) for array in lying if isinstance(array, Layer)]
    a, b, o = len(arrays), len(arrays) + len(scalars), len(outputs)
    s = b + len(indices)

    def body(*refs):
        j, i = pl.program_id(0), pl.program_id(1)
        made = refs[s + len(into) :]  # the stacks come in as well, and are not read
        places = in_layers(lying, [*refs[:b], *made[o + maxima :]], refs[b:s])
        kernel((i, j), places[:a], places[a:b], [*made[:o], *places[b:]], made[o : o + maxima])

    def vector(s: jax.Array | Layer) -> pl.BlockSpec:
        if isinstance(s, Layer):
            return pl.BlockSpec(s.stack.shape, lambda *_: (0,) * s.stack.ndim)
        if s.ndim == 1:
            return pl.BlockSpec(s.shape, lambda *_: (0,))
        if s.ndim == 3:
            return pl.BlockSpec((None, blocks, BLOCK), lambda j, i: (0, j, 0))
        return pl.BlockSpec((None, s.shape[1]), lambda j, i: (i // (groups // s.shape[0]), 0))

    one = pl.BlockSpec((1, 1), lambda j, i: (i, j))
    results = pl.pallas_call(
        body,
        grid=grid[::-1],
        in_specs=[*map(in_spec, arrays), *map(vector, [*scalars, *indices]), *map(in_spec, into)],
        out_specs=[*(spec(count) for count, _ in outputs), *[one] * maxima, *map(in_spec, into)],
        out_shape=[
            *(jax.ShapeDtypeStruct((groups, count, width // BLOCK, BLOCK), d) for count, d in outputs),
            *[jax.ShapeDtypeStruct(grid, jnp.int32)] * maxima,
            *(jax.ShapeDtypeStruct(view(layer).shape, layer.dtype) for layer in into),
        ],
        input_output_aliases={s + i: o + maxima + i for i in range(len(into))},
        compiler_params=plgpu.CompilerParams(num_warps=tiling.warps, num_stages=1),
        interpret=is_interpreted(),
        name=name,
    )(*map(view, arrays), *map(whole, scalars), *indices, *map(view, into))
    shaped = [r.reshape(-1, width) for r in results[:o]]
    stacks = [r.reshape(layer.stack.shape) for r, layer in zip(results[o + maxima :], into, strict=True)]
    return [*shaped, *results[o : o + maxima], *stacks]


@dataclasses.dataclass(frozen=True)
class LayerRef:
    """A kernel's reference to its tile of one layer of a stack."""

    ref: Any
    index: Any

    def __getitem__(self, at: object) -> jax.Array:
        return self.ref[self.index] if at is ... else self.ref[self.index, at]

    def __setitem__(self, at: object, tile: jax.Array) -> None:
        self.ref[self.index, at] = tile


def in_layers(arrays: Sequence[jax.Array | Layer], refs: Sequence[Any], indices: Sequence[Any]) -> list[Any]:
    """References to the tiles of `arrays`; `indices` are those of their layers' numbers, in order."""
    numbers = iter(indices)
    pairs = zip(arrays, refs, strict=True)
    return [LayerRef(ref, next(numbers)[0]) if isinstance(array, Layer) else ref for array, ref in pairs]
