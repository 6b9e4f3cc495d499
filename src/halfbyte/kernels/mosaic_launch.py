"""Launch of lane programs (`lane_ops.py`): inline PTX in a Mosaic GPU kernel, or NumPy on the host.

How it works: Mosaic GPU only launches the body. `launch_flat` runs it once against `PtxLaneMemoryOps`, which records
PTX, and emits the text as one inline-assembly block over the addresses of the arrays. No tiles, pipelines or layouts
come between the body and its machine code, so a body may store half a byte per element, 32 bytes of a transposed
column, or rows that begin at any address. The kernel compiles where no GPU is present. Under `interpret_kernels` the
same body runs in NumPy over all lanes at once, so that a wrong address or mask fails in a test without a GPU.

Why persistent programs: Mosaic GPU asks for one CTA per SM (`.minnctapersm 1`), and ptxas then takes up to 255
registers per lane: 8 to 12 warps per SM. With `programs_per_sm` > 1 one CTA of that many warpgroups fills the SM, ptxas
has to fit the register budget, and each warpgroup loops over its programs. SwiGLU's backward pass went from 673 to 558
us on an H200 with 16-warp CTAs and L2 prefetch (docs/LOG.md, "Kernels without tiles").

How it differs from `triton_launch.py`: Triton owns registers, layouts and the tile shape there, and rows must be
multiples of 128. Passes that are as fast in tiles have stayed there (docs/LOG.md, "Carriers without tiles").

`StackSlice` is one layer of a stack [layers, ...], which kernels read and write in place. `lax.scan` would fill the
stacks of residuals with zeros, copy each layer's slice into them, and copy each slice out for the backward pass,
because XLA fuses that slice into its own fusions and not into a kernel, which reads a whole buffer. So the loop carries
the stacks, uninitialized at first (`empty_stack_buffer`), each layer's kernel writes its slice, and
`return_as_cotangent` hands them to the backward loop.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from halfbyte.devices.compile_target import TraceFlag, lowering_device, record_architecture
from halfbyte.io.lazy_import import lazy_module
from halfbyte.kernels.lane_memory import NumpyLaneMemoryOps, PtxLaneMemoryOps
from halfbyte.kernels.lane_ops import LaneMemoryOps

plgpu = lazy_module("jax.experimental.pallas.mosaic_gpu")
WARPS_PER_GROUP = 4  # warps per warpgroup (a Mosaic thread), which runs one program
MULTIPROCESSORS = 132  # SMs of an H100 or H200: the default where kernels are not lowered for a GPU
_interpreted = TraceFlag(False)


def interpret_kernels() -> contextlib.AbstractContextManager[None]:
    """Interprets the kernels of functions traced inside the context: they run without a GPU, slowly, for tests."""
    return _interpreted(True)


def is_interpreting() -> bool:
    """Returns whether kernels traced now are interpreted."""
    return bool(_interpreted.value)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StackSlice:
    """The array at `index`, an int32 scalar, of a stack [layers, ...].

    The index must be in range: `lax` would clamp it, a kernel reads out of bounds.
    """

    stack: jax.Array
    index: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stack.shape[1:]

    @property
    def ndim(self) -> int:
        return self.stack.ndim - 1

    @property
    def dtype(self) -> jnp.dtype:
        return self.stack.dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def reshape(self, *shape: int) -> "StackSlice":
        """Returns the slice in another shape."""
        return StackSlice(self.stack.reshape(self.stack.shape[0], *shape), self.index)

    def write_to_stack(self, array: jax.Array) -> jax.Array:
        """Returns the stack with `array` at this index."""
        return lax.dynamic_update_index_in_dim(self.stack, array, self.index, 0)

    def materialize(self) -> jax.Array:
        """Returns a copy, unless XLA fuses it with its consumer."""
        return lax.dynamic_index_in_dim(self.stack, self.index, keepdims=False)


def materialize_slice(x: jax.Array | StackSlice) -> jax.Array:
    """Returns x as an array."""
    return x.materialize() if isinstance(x, StackSlice) else x


def empty_stack_buffer(layers: int, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
    """Returns an uninitialized stack of `layers` arrays of `shape`; write a slice before reading it."""
    return lax.empty((layers, *shape), dtype)


@jax.custom_vjp
def return_as_cotangent(x: jax.Array, stacks: object) -> jax.Array:
    """Returns x unchanged. Its VJP returns each stack as its own cotangent.

    Called after the layer loop: the backward loop carries the cotangents of the forward loop's carry, each layer
    returns the cotangents of the stacks unchanged, and a `StackSlice` of such a stack is the layer's residual.
    """
    return x


return_as_cotangent.defvjp(lambda x, stacks: (x, stacks), lambda stacks, dx: (dx, stacks))


def num_sms() -> int:
    """Returns the number of SMs of the device that kernels are lowered for, which need not be present."""
    return lowering_device().sms or MULTIPROCESSORS


@dataclasses.dataclass(frozen=True)
class LaunchConfig:
    """Columns per lane, concurrent programs per SM (`launch_flat`), and lanes per block of elements.

    `lanes_per_block` None is 16 / `columns`.
    """

    columns: int
    programs_per_sm: int = 1
    lanes_per_block: int | None = None


def launch_flat(
    body: Callable[[LaneMemoryOps], None],
    arrays: Sequence[jax.Array | StackSlice],
    outputs: Sequence[jax.ShapeDtypeStruct],
    *,
    programs: int,
    lanes: LaunchConfig,
    name: str,
) -> list[jax.Array]:
    """Runs `body(lane_ops)` and returns the arrays of shapes `outputs` that it writes.

    The body addresses `arrays`, then `outputs`, by number. Every byte of an output must be written by some lane. Stack
    slices are read in place.

    With `programs_per_sm` == 1 a lane has up to 255 registers, with which two CTAs of one program fit an SM. With more,
    one CTA fills the SM: `programs_per_sm` warpgroups, 65536 / (128 programs_per_sm) registers per lane, and each
    warpgroup advances to its next program independently.
    """
    if is_interpreting():
        run = functools.partial(launch_on_host, body, outputs=outputs, programs=programs, lanes=lanes)
        return list(jax.pure_callback(lambda *inputs: run(inputs), list(outputs), *map(materialize_slice, arrays)))
    layers = {i: array for i, array in enumerate(arrays) if isinstance(array, StackSlice)}
    num_arrays = len(arrays) + len(outputs)  # that the body addresses; the indices of stack slices follow
    addresses = {i: (num_arrays + n, layer.bytes) for n, (i, layer) in enumerate(layers.items())}
    lane_ops, warpgroups = PtxLaneMemoryOps(lanes.columns, lanes.lanes_per_block, addresses), lanes.programs_per_sm
    body(lane_ops)
    num_ctas = programs if warpgroups == 1 else min(num_sms(), -(-programs // warpgroups))
    ptx = lane_ops.kernel_source(programs, num_ctas, warpgroups)

    def kernel(*refs):
        input_refs, index_refs, output_refs = (
            refs[: len(arrays)],
            refs[len(arrays) : -len(outputs)],
            refs[-len(outputs) :],
        )
        emit_ptx = plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * len(refs))(functools.partial(_emit_inline_ptx, ptx))
        emit_ptx(*input_refs, *output_refs, *index_refs)

    record_architecture()
    run = plgpu.kernel(
        kernel,
        out_type=[jax.ShapeDtypeStruct((math.prod(o.shape),), o.dtype) for o in outputs],
        grid=(num_ctas,),
        grid_names=("block",),
        num_threads=warpgroups,
        thread_name="warpgroup",
        kernel_name=name,
    )
    buffers = [array.stack if isinstance(array, StackSlice) else array.reshape(-1) for array in arrays]
    results = run(*buffers, *(layer.index.reshape(1) for layer in layers.values()))
    return [r.reshape(o.shape) for r, o in zip(results, outputs, strict=True)]


def launch_on_host(
    body: Callable[[LaneMemoryOps], None],
    arrays: Sequence[np.ndarray],
    outputs: Sequence[jax.ShapeDtypeStruct],
    *,
    programs: int,
    lanes: LaunchConfig,
) -> list[np.ndarray]:
    """Evaluates `launch_flat` in NumPy. On a thread of XLA, which flushes subnormals, NumPy flushes them too."""
    output_bytes = [np.full(o.shape, 0xAB, np.uint8).repeat(jnp.dtype(o.dtype).itemsize) for o in outputs]
    input_bytes = [np.ascontiguousarray(np.asarray(a)).reshape(-1).view(np.uint8) for a in arrays]
    with np.errstate(all="ignore"):
        body(
            NumpyLaneMemoryOps(
                lanes.columns, [*input_bytes, *output_bytes], programs, WARPS_PER_GROUP, lanes.lanes_per_block
            )
        )
    return [w.view(o.dtype).reshape(o.shape) for w, o in zip(output_bytes, outputs, strict=True)]


def _emit_inline_ptx(text: str, _: object, *refs: Any) -> None:
    """Emits `text` as inline assembly into the Mosaic GPU kernel; its operands are the addresses of `refs`."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, llvm, memref

    word = ir.IntegerType.get_signless(64)
    pointers = [arith.index_cast(word, memref.extract_aligned_pointer_as_index(ref)) for ref in refs]
    llvm.inline_asm(None, pointers, text, ",".join("l" * len(pointers)), has_side_effects=True)
