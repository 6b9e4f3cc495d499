"""Launch of tiled kernels through Pallas Triton: the grid, the arrays they support, and the body of a tile.

A kernel views a token-major [tokens, columns] array as [tokens / rows, rows, columns / 16, 16]. One program owns `rows`
tokens by `blocks` blocks of 16 columns. Each token row is its own [blocks, 16] register tile, so the token axis is in
the lane: token-axis amaxes and the Hadamard transform are register arithmetic, and nothing is transposed in memory. A
body of lane ops takes the words of a tile and returns words, on the GPU in one inline-PTX block.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from halfbyte.io.lazy_import import lazy_module
from halfbyte.kernels.mosaic_launch import StackSlice, is_interpreting
from halfbyte.kernels.numpy_lanes import NumpyLaneOps
from halfbyte.kernels.ptx_lanes import PtxLaneOps

plgpu = lazy_module("jax.experimental.pallas.triton")
NVFP4_BLOCK = 16
P = ParamSpec("P")
R = TypeVar("R")
Body = Callable[..., Sequence[Sequence[Any]]]  # (lane ops, words, scalars) -> words of each output


@dataclasses.dataclass(frozen=True)
class PassTiling:
    """Columns per lane and warps per program; programs are numbered along a token row first."""

    columns: int = 4
    warps: int = 4

    @property
    def width(self) -> int:
        return 32 * self.columns * self.warps


def unsupported_tiled(tokens: int, columns: int, *, capability: tuple[int, int] | None = None) -> str | None:
    """Returns why the quantize kernels do not support a [tokens, columns] array, or None."""
    if tokens % NVFP4_BLOCK:
        return f"the GPU kernels need a multiple of {NVFP4_BLOCK} tokens, got {tokens}"
    if capability is not None and capability < (9, 0):
        return f"the GPU kernels need compute capability 9.0 or newer, got {capability[0]}.{capability[1]}"
    return index_range_refusal(tokens, columns)


def index_range_refusal(tokens: int, columns: int) -> str | None:
    """Returns why a kernel cannot address every element of a [tokens, columns] array, or None."""
    if tokens * columns > 2**32:
        return f"the GPU kernels number elements with 32 bits, too few for {tokens} x {columns}"
    return None


def is_tileable(columns: int) -> bool:
    """Returns True if tiles divide rows of this width; untiled kernels (`nvfp4_untiled.py`) serve the others."""
    return columns % 128 == 0


def fit_warps(tiling: PassTiling, columns: int) -> PassTiling:
    """Returns `tiling` with as many warps as divide the columns."""
    warps = tiling.warps
    while warps > 1 and columns % (32 * tiling.columns * warps):
        warps //= 2
    return dataclasses.replace(tiling, warps=warps)


def jit_per_shape(*static: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Traces and lowers a pass once for all its calls with the same shapes and options.

    A kernel's code includes the source lines of the call that it was traced for, and XLA merges only calls with equal
    code. Without this, three linears that quantize the same x on three lines would launch three passes.
    """
    return lambda fn: jax.jit(fn, static_argnames=static)


def check_kernel_arrays(*arrays: jax.Array | StackSlice) -> None:
    """Raises ValueError for an array that no kernel supports, and for arrays of different shapes or dtypes.

    An untiled kernel computes the addresses of all arrays from the shape of the first.
    """
    x = arrays[0]
    reason = (
        unsupported_tiled(*x.shape) if x.ndim == 2 else f"the GPU kernels need [tokens, columns], got shape {x.shape}"
    )
    kinds = [f"{a.dtype.name}{list(a.shape)}" for a in arrays]
    if len(set(kinds)) > 1:
        reason = f"a GPU kernel reads arrays of one shape and dtype, got {', '.join(kinds)}"
    if reason:
        raise ValueError(reason)


@dataclasses.dataclass(frozen=True)
class TiledOutputs:
    """Outputs of a kernel, in the order of its results: `tensors`, each (rows per tile, dtype); `num_amaxes` int32
    arrays, one amax per program; and stacks, whose slices `stack_outputs` are written in place.
    """

    tensors: Sequence[tuple[int, DTypeLike]] = ()
    num_amaxes: int = 0
    stack_outputs: Sequence[StackSlice] = ()


def launch_tiled(
    kernel: Callable[..., None],
    arrays: Sequence[jax.Array | StackSlice],
    scalars: Sequence[jax.Array | StackSlice],
    *,
    outputs: TiledOutputs,
    rows: int = NVFP4_BLOCK,
    tiling: PassTiling,
    name: str,
) -> list[jax.Array]:
    """Runs `kernel(program, array_refs, scalar_refs, output_refs, amax_refs)` over tiles of `rows` tokens.

    References of stack slices follow those of the outputs. `scalars` are small arrays: a vector, which every program
    reads; a table [parts, n], one vector per equal part of the tokens, of which a program reads its part's; one value
    per column, [1, columns / 16, 16], of which it reads its columns'; or a stack slice, read at its layer.
    """
    tensors, num_amaxes, stack_slices = outputs.tensors, outputs.num_amaxes, outputs.stack_outputs
    tokens, width = arrays[0].shape
    tiling = fit_warps(tiling, width)
    groups, blocks = tokens // rows, tiling.width // NVFP4_BLOCK
    grid = (groups, width // tiling.width)

    def spec(count: int, layers: tuple[int, ...] = ()) -> pl.BlockSpec:
        first = (0,) * len(layers)
        shape = (*layers, None, count, blocks, NVFP4_BLOCK)
        return pl.BlockSpec(shape, lambda j, i: (*first, i, 0, j, 0))

    def in_spec(array: jax.Array | StackSlice) -> pl.BlockSpec:
        return spec(array.shape[0] // groups, array.stack.shape[:1] if isinstance(array, StackSlice) else ())

    def whole_array(array: jax.Array | StackSlice) -> jax.Array:
        return array.stack if isinstance(array, StackSlice) else array

    def view(array: jax.Array | StackSlice) -> jax.Array:
        return whole_array(array.reshape(groups, array.shape[0] // groups, width // NVFP4_BLOCK, NVFP4_BLOCK))

    inputs = [*arrays, *scalars, *stack_slices]
    indices = [array.index.reshape(1) for array in inputs if isinstance(array, StackSlice)]
    a, b, o = len(arrays), len(arrays) + len(scalars), len(tensors)
    s = b + len(indices)

    def body(*refs):
        j, i = pl.program_id(0), pl.program_id(1)
        out_refs = refs[s + len(stack_slices) :]  # the stacks are inputs too (aliased), and are not read
        input_refs = stack_slice_refs(inputs, [*refs[:b], *out_refs[o + num_amaxes :]], refs[b:s])
        kernel((i, j), input_refs[:a], input_refs[a:b], [*out_refs[:o], *input_refs[b:]], out_refs[o : o + num_amaxes])

    def vector(s: jax.Array | StackSlice) -> pl.BlockSpec:
        if isinstance(s, StackSlice):
            return pl.BlockSpec(s.stack.shape, lambda *_: (0,) * s.stack.ndim)
        if s.ndim == 1:
            return pl.BlockSpec(s.shape, lambda *_: (0,))
        if s.ndim == 3:
            return pl.BlockSpec((None, blocks, NVFP4_BLOCK), lambda j, i: (0, j, 0))
        return pl.BlockSpec((None, s.shape[1]), lambda j, i: (i // (groups // s.shape[0]), 0))

    amax_spec = pl.BlockSpec((1, 1), lambda j, i: (i, j))
    results = pl.pallas_call(
        body,
        grid=grid[::-1],
        in_specs=[*map(in_spec, arrays), *map(vector, [*scalars, *indices]), *map(in_spec, stack_slices)],
        out_specs=[*(spec(count) for count, _ in tensors), *[amax_spec] * num_amaxes, *map(in_spec, stack_slices)],
        out_shape=[
            *(jax.ShapeDtypeStruct((groups, count, width // NVFP4_BLOCK, NVFP4_BLOCK), d) for count, d in tensors),
            *[jax.ShapeDtypeStruct(grid, jnp.int32)] * num_amaxes,
            *(jax.ShapeDtypeStruct(view(layer).shape, layer.dtype) for layer in stack_slices),
        ],
        input_output_aliases={s + i: o + num_amaxes + i for i in range(len(stack_slices))},
        compiler_params=plgpu.CompilerParams(num_warps=tiling.warps, num_stages=1),
        interpret=is_interpreting(),
        name=name,
    )(*map(view, arrays), *map(whole_array, scalars), *indices, *map(view, stack_slices))
    shaped = [r.reshape(-1, width) for r in results[:o]]
    stacks = [r.reshape(layer.stack.shape) for r, layer in zip(results[o + num_amaxes :], stack_slices, strict=True)]
    return [*shaped, *results[o : o + num_amaxes], *stacks]


@dataclasses.dataclass(frozen=True)
class StackSliceRef:
    """A kernel's reference to its tile of a stack slice."""

    ref: Any
    index: Any

    def __getitem__(self, at: object) -> jax.Array:
        return self.ref[self.index] if at is ... else self.ref[self.index, at]

    def __setitem__(self, at: object, tile: jax.Array) -> None:
        self.ref[self.index, at] = tile


def stack_slice_refs(
    arrays: Sequence[jax.Array | StackSlice], refs: Sequence[Any], indices: Sequence[Any]
) -> list[Any]:
    """Returns references to the tiles of `arrays`; `indices` are those of the layer indices, in order."""
    layer_indices = iter(indices)
    pairs = zip(arrays, refs, strict=True)
    return [
        StackSliceRef(ref, next(layer_indices)[0]) if isinstance(array, StackSlice) else ref for array, ref in pairs
    ]


def emit_tile_body(
    body: Body, tiles: Sequence[jax.Array], scalars: Sequence[jax.Array], *, outputs: Sequence[DTypeLike], columns: int
) -> list[jax.Array]:
    """Returns the [blocks, 16] tiles of dtypes `outputs` that `body(lane_ops, words, scalars)` computes.

    `words[i]` holds tile i of each lane: a list of 32-bit words (two bf16, or one of a 32-bit dtype, in each).
    `scalars` are float32 or int32 scalars or tiles; of a tile the lane sees the value of its first column. The body
    returns, for each output, the list of words of the lane.
    """
    run = _evaluate_vector if is_interpreting() else _evaluate_ptx
    return run(body, tiles, scalars, outputs, columns)


def words_per_lane(dtype: DTypeLike, columns: int) -> int:
    return max(1, columns * jnp.dtype(dtype).itemsize // 4)


def _evaluate_ptx(
    body: Body, tiles: Sequence[jax.Array], scalars: Sequence[jax.Array], outputs: Sequence[DTypeLike], columns: int
) -> list[jax.Array]:
    shape = tiles[0].shape
    scalars = [jnp.broadcast_to(s, shape) for s in scalars]
    lane_ops = PtxLaneOps(columns)
    position = sum(words_per_lane(d, columns) for d in outputs)
    total_outputs = position
    moves, inputs = [], []
    for array in (*tiles, *scalars):
        kind = "f" if array.dtype == jnp.float32 else "r"
        words = []
        for _ in range(words_per_lane(array.dtype, columns)):
            reg = lane_ops.reg(kind)
            moves.append(f"mov.b32 {reg.name}, ${position};")
            words.append(reg)
            position += 1
        inputs.append(words)
    lane_ops.lines = moves
    results = body(lane_ops, inputs[: len(tiles)], [words[0] for words in inputs[len(tiles) :]])
    flat = [word for words in results for word in words]
    if len(flat) != total_outputs:
        raise ValueError(f"the body returned {len(flat)} words a lane, its outputs {outputs} take {total_outputs}")
    stores = [f"mov.b32 ${i}, {reg.name};" for i, reg in enumerate(flat)]
    declared = {"r": ".b32", "f": ".f32", "h": ".b16", "p": ".pred"}
    declarations = [f".reg {declared[k]} {k}<{n}>;" for k, n in lane_ops.count.items() if n]
    constraints = ["=r"] * total_outputs + [
        "f" if array.dtype == jnp.float32 else "r"
        for array in (*tiles, *scalars)
        for _ in range(words_per_lane(array.dtype, columns))
    ]
    from halfbyte.kernels.ptx_lanes import inline_ptx  # loads Triton's lowering, which only a GPU needs

    return inline_ptx(
        "{\n" + "\n".join([*declarations, *lane_ops.lines, *stores]) + "\n}",
        [*tiles, *scalars],
        constraints=",".join(constraints),
        pack=columns,
        results=[jax.ShapeDtypeStruct(shape, d) for d in outputs],
    )


def _evaluate_vector(
    body: Body, tiles: Sequence[jax.Array], scalars: Sequence[jax.Array], outputs: Sequence[DTypeLike], columns: int
) -> list[jax.Array]:
    """Evaluates the body on the host, in NumPy: nothing to compile, and subnormals as on the GPU."""
    shape = tiles[0].shape

    def host(*arrays: jax.Array) -> list[np.ndarray]:
        words = [_split(np.asarray(a), columns) for a in arrays[: len(tiles)]]
        scalars_of_lanes = [
            _as_f32_or_u32(np.broadcast_to(np.asarray(a), shape)[:, ::columns]) for a in arrays[len(tiles) :]
        ]
        with np.errstate(all="ignore"):
            results = body(NumpyLaneOps(columns), words, scalars_of_lanes)
        return [_join(words, shape, d) for words, d in zip(results, outputs, strict=True)]

    return jax.pure_callback(host, [jax.ShapeDtypeStruct(shape, d) for d in outputs], *tiles, *scalars)


def _as_f32_or_u32(x: np.ndarray) -> np.ndarray:
    return x if x.dtype == np.float32 else x.astype(np.uint32)


def _split(tile: np.ndarray, columns: int) -> list[np.ndarray]:
    """Returns the words of a tile, each [blocks, lanes]."""
    dtype = np.float32 if tile.dtype == np.float32 else np.uint32
    lanes = np.ascontiguousarray(tile).view(dtype).reshape(tile.shape[0], tile.shape[1] // columns, -1)
    return [lanes[:, :, i] for i in range(lanes.shape[2])]


def _join(words: Sequence[np.ndarray], shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
    """Returns the tile of these words: the inverse of `_split`."""
    return np.ascontiguousarray(np.stack(words, -1)).view(jnp.dtype(dtype)).reshape(shape)
