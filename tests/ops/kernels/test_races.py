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

kernels = importlib.import_module("halfbyte.kernels.hopper_gemm")  # its function has the module's name
grouped = importlib.import_module("halfbyte.kernels.hopper_grouped_gemm")
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
        issued.setdefault(thread_of(given), []).append(given)
        return given["token"]

    def finish(thread, left):
        waiting = issued.get(thread, [])
        while len(waiting) > left:
            noted(waiting[0])
            at_once(**waiting.pop(0))

    def read(**given):
        finish(thread_of(given), 0)
        return summed(**given)

    def unfinished(eqn):
        return eqn.params["n"] if "n" in eqn.params else eqn.invars[0].val

    def other(interpreter, eqn, values):
        """Of what the interpreter passes over: a wait."""
        if eqn.primitive is not primitives.wgmma_wait_p:
            return arithmetic(interpreter, eqn, values)
        wait = lambda thread: finish(int(thread), unfinished(eqn))  # noqa: E731
        callback.io_callback(wait, None, interpreter.thread_id, ordered=True)
        return []

    def waits(interpreter, eqn, token, values):
        """The same for JAX 0.11 and later, which order callbacks by a token. Replaces the rule of `wait_load_tmem`, a
        primitive that Hopper does not use.
        """

        def wait(token, thread):
            finish(thread, unfinished(eqn))
            return token

        return callback.io_callback(wait, gpu_callbacks.TOKEN_SHAPE_DTYPE, token, interpreter.thread), []

    interpreter = jaxpr_interpret.JaxprInterpreter
    monkeypatch.setattr(gpu_callbacks, "wgmma", issue)
    monkeypatch.setattr(gpu_callbacks, "wgmma_accumulator_deref", read)
    if hasattr(interpreter, "_interpret_wait_load_tmem_p"):
        changed = Changed(primitives, wgmma_wait_p=None, wait_load_tmem_p=primitives.wgmma_wait_p)
        monkeypatch.setattr(interpreter, "_interpret_wait_load_tmem_p", waits)
    else:  # JAX 0.10
        changed, arithmetic = Changed(primitives, wgmma_wait_p=None), interpreter._interpret_arithmetic_primitive
        monkeypatch.setattr(interpreter, "_interpret_arithmetic_primitive", other)
    monkeypatch.setattr(jaxpr_interpret, "gpu_primitives", changed)


def thread_of(given):
    """Returns the thread of a callback: its number in JAX 0.10, its location in the grid in JAX 0.11 and later."""
    return int(given["thread_id"]) if "thread_id" in given else given["thread"]


def noted(given):
    """The operands of a multiplication as read now by its thread."""
    if "thread" in given:
        return noted_by_location(given["thread"], given)
    memory, device, thread = gpu_callbacks._get_shared_memory(), int(given["device_id"]), int(given["thread_id"])
    utils = gpu_callbacks.interpret_utils
    where = utils.GPULoggingInfo(device_id=device, grid_point_coords=(), thread_id=thread, source_info=None)
    for side in "ab":
        key = gpu_callbacks.HostAllocationKey.from_array(given[f"{side}_allocation_key_as_array"])
        views = jax.tree.map(int, gpu_callbacks._remove_noop_transforms(given[f"{side}_transforms"]))
        part, of = utils.to_range(views), memory.get_global_thread_id(device, thread)
        clock = memory.get_buffer_content(key, part, of, logging_info=where)[2]
        gpu_callbacks.get_races().check_read(device, thread, clock, key, part, source_info=None)


def noted_by_location(thread, given):
    """The same for JAX 0.11 and later, whose memory has a clock per proxy: WGMMA reads through the asynchronous one."""
    memory = gpu_callbacks._get_shared_memory()
    where = gpu_callbacks.memory.GPULoggingInfo(given["mesh_location"], thread, None)
    for side in "ab":
        key = gpu_callbacks.HostAllocationKey.from_array(given[f"{side}_allocation_key_as_array"])
        views = jax.tree.map(int, gpu_callbacks._remove_noop_transforms(given[f"{side}_transforms"]))
        part = memory.access(key, views)
        clock = memory.get_buffer_content(key, part, thread, logging_info=where)[2]
        gpu_callbacks.get_races().check_read(thread, clock.async_smem_clock, key, part, source_info=None)


def integers(*shapes):
    random = np.random.default_rng(0)
    return [random.integers(-3, 4, shape).astype(np.float32) for shape in shapes]


def ran(body, shape, blocks, *arrays):
    """What one kernel makes of the arrays, and whether it raced."""
    noting = {"on_race": "warn"} if hasattr(InterpretGPUParams, "on_race") else {}  # JAX 0.12 raises by default
    run = plgpu.kernel(
        body, out_type=jax.ShapeDtypeStruct(shape, jnp.bfloat16), grid=(blocks,), grid_names=("block",), num_threads=3,
        thread_name="warpgroup", interpret=InterpretGPUParams(detect_races=True, **noting),
    )  # fmt: skip
    made = np.asarray(run(*(jnp.asarray(a, jnp.bfloat16 if a.ndim > 1 else a.dtype) for a in arrays)))
    return made, gpu_callbacks.get_races().races_found


def product(tiling, *, steps=STEPS, blocks=1):
    """Whether the product of small integers is right, and whether it raced."""
    a, b = integers((M, 64 * steps), (64 * steps, N))
    one, body = np.ones(1, np.float32), functools.partial(kernels._kernel, tiling=tiling, layout="nn")
    made, raced = ran(body, (M, N), blocks, a, b, one, one)
    return np.array_equal(made, (a @ b).astype(made.dtype)), raced


TILING = kernels.GemmTiling(64, 256, max_wgmma_in_flight=1, warpgroup_split_dim="m")  # of dgrad


def test_nothing_is_overwritten_while_a_multiplication_reads_it(late):
    assert product(TILING) == (True, False)


def test_a_slot_that_is_free_while_a_multiplication_reads_it_races(late, monkeypatch):
    """Planted: a walk that waits for one multiplication fewer than it frees slots."""
    early = Changed(plgpu, wgmma_wait=lambda unfinished: plgpu.wgmma_wait(unfinished + 1))
    monkeypatch.setattr(kernels, "plgpu", early)
    assert product(TILING)[1]


@pytest.mark.slow
def test_more_blocks_than_tiles_and_more_slots_than_steps(late):
    """The third block has no tile, and the others' steps leave slots that nobody filled."""
    assert product(TILING, steps=2, blocks=3) == (True, False)


def test_a_tiling_that_would_wait_for_itself_is_refused():
    with pytest.raises(ValueError, match="no slot is ever free"):
        kernels.GemmTiling(stages=2, max_wgmma_in_flight=2)


@pytest.mark.slow
@pytest.mark.parametrize("in_flight", [0, 1])
@pytest.mark.parametrize(("steps", "blocks"), [((5, 0, 0, 3), 1), ((0, 1, 5, 0), 2)])
def test_tiles_of_experts_have_steps_of_their_own(late, steps, blocks, in_flight):
    """Some have none, and the next one's begin in whatever slot is free."""
    experts = np.array([0, 0, 1, 2], np.int32)
    x, w = integers((len(experts) * grouped.GROUP_TILE_ROWS, 64 * STEPS), (3, 64 * STEPS, N))
    tiling = kernels.GemmTiling(max_wgmma_in_flight=in_flight)
    body = functools.partial(grouped._rows_kernel, tiling=tiling, layout="nn")
    shape, factor = (len(x), N), np.ones(len(experts), np.float32)
    made, raced = ran(body, shape, blocks, x, w, experts, np.array(steps, np.int32), factor)
    tiles = zip(x.reshape(len(experts), grouped.GROUP_TILE_ROWS, -1), experts, steps, strict=True)
    want = np.concatenate([tile[:, : 64 * n] @ w[e, : 64 * n] for tile, e, n in tiles])
    assert np.array_equal(made, want.astype(made.dtype)) and not raced
