"""The GEMM kernel in JAX's interpreter of GPU kernels, with its multiplications as late as they may be.

The interpreter runs warpgroups as threads and keeps a vector clock of each, so that what is read and written without an
order is found in any interleaving; but it multiplies at once, and does not note what a multiplication reads. Here one
that was issued reads its operands when it is waited for. The interpreter takes no transposed operands: "nn" alone.
"""

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import callback
from jax._src.pallas.mosaic_gpu import primitives
from jax.experimental.pallas import mosaic_gpu as plgpu

pytest.importorskip("jax._src.pallas.mosaic_gpu.interpret")
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, jaxpr_interpret
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

kernels = importlib.import_module("halfbyte.kernels.matmul")  # its function has the module's name
pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="a GPU runs the kernel itself")
M, N, STEPS = 128, 512, 5  # two tiles; the last step of each in the slot that the next begins with


class Changed:
    """A module with some names replaced."""

    def __init__(self, module, **names):
        self.module, self.names = module, names

    def __getattr__(self, name):
        return self.names[name] if name in self.names else getattr(self.module, name)


@pytest.fixture
def late(monkeypatch):
    issued = {}  # by thread
    at_once, summed = gpu_callbacks.wgmma, gpu_callbacks.wgmma_accumulator_deref

    def issue(**given):
        issued.setdefault(int(given["thread_id"]), []).append(given)
        return given["token"]

    def finish(thread, left):
        waiting = issued.get(int(thread), [])
        while len(waiting) > left:
            noted(waiting[0])
            at_once(**waiting.pop(0))

    def read(**given):
        finish(given["thread_id"], 0)
        return summed(**given)

    def other(interpreter, eqn, values):
        """Of what the interpreter passes over: a wait."""
        if eqn.primitive is not primitives.wgmma_wait_p:
            return arithmetic(interpreter, eqn, values)
        wait = functools.partial(finish, left=eqn.params["n"] if "n" in eqn.params else eqn.invars[0].val)
        callback.io_callback(wait, None, interpreter.thread_id, ordered=True)
        return []

    arithmetic = jaxpr_interpret.JaxprInterpreter._interpret_arithmetic_primitive
    monkeypatch.setattr(gpu_callbacks, "wgmma", issue)
    monkeypatch.setattr(gpu_callbacks, "wgmma_accumulator_deref", read)
    monkeypatch.setattr(jaxpr_interpret, "gpu_primitives", Changed(primitives, wgmma_wait_p=None))
    monkeypatch.setattr(jaxpr_interpret.JaxprInterpreter, "_interpret_arithmetic_primitive", other)


def noted(given):
    """The operands of a multiplication as read now by its thread."""
    memory, device, thread = gpu_callbacks._get_shared_memory(), int(given["device_id"]), int(given["thread_id"])
    utils = gpu_callbacks.interpret_utils
    where = utils.GPULoggingInfo(device_id=device, grid_point_coords=(), thread_id=thread, source_info=None)
    for side in "ab":
        key = gpu_callbacks.HostAllocationKey.from_array(given[f"{side}_allocation_key_as_array"])
        views = jax.tree.map(int, gpu_callbacks._remove_noop_transforms(given[f"{side}_transforms"]))
        part, of = utils.to_range(views), memory.get_global_thread_id(device, thread)
        clock = memory.get_buffer_content(key, part, of, logging_info=where)[2]
        gpu_callbacks.get_races().check_read(device, thread, clock, key, part, source_info=None)


def product(tiling):
    """Whether the product of small integers is right, and whether it raced."""
    random = np.random.default_rng(0)
    a, b = (random.integers(-3, 4, shape).astype(np.float32) for shape in ((M, 64 * STEPS), (64 * STEPS, N)))
    run = plgpu.kernel(
        functools.partial(kernels._kernel, tiling=tiling, layout="nn"),
        out_type=jax.ShapeDtypeStruct((M, N), jnp.bfloat16), grid=(1,), grid_names=("block",), num_threads=3,
        thread_name="warpgroup", interpret=InterpretGPUParams(detect_races=True),
    )  # fmt: skip
    one = jnp.ones(1)
    made = np.asarray(run(jnp.asarray(a, jnp.bfloat16), jnp.asarray(b, jnp.bfloat16), one, one))
    return np.array_equal(made, (a @ b).astype(made.dtype)), gpu_callbacks.get_races().races_found


def _nothing(_):
    pass


TILING = kernels.GemmTiling(64, 256, in_flight=1, split="m")  # of dgrad


def test_nothing_is_overwritten_while_a_multiplication_reads_it(late):
    assert product(TILING) == (True, False)


def test_a_tile_that_does_not_wait_for_the_last_races(late, monkeypatch):
    monkeypatch.setattr(kernels, "plgpu", Changed(plgpu, barrier_wait=_nothing, barrier_arrive=_nothing))
    assert product(TILING)[1]
