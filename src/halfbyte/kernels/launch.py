"""How a body of `memory.py` becomes a kernel: one inline-assembly block in a Mosaic GPU kernel, or NumPy on the host.

Mosaic GPU only launches it: there are no tiles, no pipelines and no layouts, so that nothing stands between the body
and the machine code, and the kernel compiles where no GPU is present.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from halfbyte.kernels.architecture import record_architecture
from halfbyte.kernels.interpret import is_interpreted
from halfbyte.kernels.machine import MemoryMachine
from halfbyte.kernels.memory import PtxMemory, VectorMemory
from halfbyte.kernels.stacks import Layer, array_of
from halfbyte.later import later

plgpu = later("jax.experimental.pallas.mosaic_gpu")
GROUP = 4  # warps of a Mosaic thread, a warpgroup, and of a program
MULTIPROCESSORS = 132  # of an H100 or H200, where no device says it


def multiprocessors() -> int:
    try:
        return int(jax.local_devices()[0].core_count)
    except (AttributeError, RuntimeError):
        return MULTIPROCESSORS


@dataclasses.dataclass(frozen=True)
class Lanes:
    """`columns` of a lane, programs that a multiprocessor runs at a time (`launch`), and how many lanes a block of
    numbers has: 16 / `columns` unless given."""

    columns: int
    groups: int = 1
    count: int | None = None


def launch(
    body: Callable[[MemoryMachine], None],
    arrays: Sequence[jax.Array | Layer],
    outputs: Sequence[jax.ShapeDtypeStruct],
    *,
    programs: int,
    lanes: Lanes,
    name: str,
) -> list[jax.Array]:
    """The arrays of shapes `outputs` that `body(machine)` writes; it knows `arrays`, then `outputs`, by number. Every
    byte of an output must be written by some lane. A layer is read where it lies in its stack.

    Mosaic GPU asks for one block a multiprocessor, and the assembler then gives a lane as many registers as such a
    block can have: up to 255, with which two blocks of one program fit. With `groups` > 1 a block is as large as a
    multiprocessor: so many programs at a time, 65536 / (128 groups) registers a lane, and each warpgroup goes on to its
    next program by itself.
    """
    if is_interpreted():
        run = functools.partial(on_host, body, outputs=outputs, programs=programs, lanes=lanes)
        return list(jax.pure_callback(lambda *given: run(given), list(outputs), *map(array_of, arrays)))
    layers = {i: array for i, array in enumerate(arrays) if isinstance(array, Layer)}
    known = len(arrays) + len(outputs)  # to the body; numbers of layers come after them
    places = {i: (known + n, layer.bytes) for n, (i, layer) in enumerate(layers.items())}
    machine, groups = PtxMemory(lanes.columns, lanes.count, places), lanes.groups
    body(machine)
    blocks = programs if groups == 1 else min(multiprocessors(), -(-programs // groups))
    text = machine.text(programs, blocks, groups)

    def kernel(*refs):
        read, numbers, written = refs[: len(arrays)], refs[len(arrays) : -len(outputs)], refs[-len(outputs) :]
        assemble = plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * len(refs))(functools.partial(_assemble, text))
        assemble(*read, *written, *numbers)

    record_architecture()
    run = plgpu.kernel(
        kernel,
        out_type=[jax.ShapeDtypeStruct((math.prod(o.shape),), o.dtype) for o in outputs],
        grid=(blocks,),
        grid_names=("block",),
        num_threads=groups,
        thread_name="warpgroup",
        kernel_name=name,
    )
    given = [array.stack if isinstance(array, Layer) else array.reshape(-1) for array in arrays]
    made = run(*given, *(layer.index.reshape(1) for layer in layers.values()))
    return [m.reshape(o.shape) for m, o in zip(made, outputs, strict=True)]


def _assemble(text: str, _: object, *refs: Any) -> None:
    """The assembly block over the addresses of `refs`, written into the kernel that is being built."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, llvm, memref

    word = ir.IntegerType.get_signless(64)
    places = [arith.index_cast(word, memref.extract_aligned_pointer_as_index(ref)) for ref in refs]
    llvm.inline_asm(None, places, text, ",".join("l" * len(places)), has_side_effects=True)


def on_host(
    body: Callable[[MemoryMachine], None],
    arrays: Sequence[np.ndarray],
    outputs: Sequence[jax.ShapeDtypeStruct],
    *,
    programs: int,
    lanes: Lanes,
) -> list[np.ndarray]:
    """What `launch` returns, in NumPy; in a thread of XLA, which flushes subnormal numbers, it flushes them as well."""
    written = [np.full(o.shape, 0xAB, np.uint8).repeat(jnp.dtype(o.dtype).itemsize) for o in outputs]
    read = [np.ascontiguousarray(np.asarray(a)).reshape(-1).view(np.uint8) for a in arrays]
    with np.errstate(all="ignore"):
        body(VectorMemory(lanes.columns, [*read, *written], programs, GROUP, lanes.count))
    return [w.view(o.dtype).reshape(o.shape) for w, o in zip(written, outputs, strict=True)]
