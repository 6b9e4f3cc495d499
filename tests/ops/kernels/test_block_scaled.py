"""The kernel's own body, run by a model of the machine in NumPy: one thread for the warp that fetches, one for the warp
that multiplies, one for the warpgroup that stores, and barriers with the parity of the hardware's.

Oracle: codes and scales as they were drawn, multiplied expert by expert in float64. Where a scale lies the model
has from PTX's manual, not from `formats.tiling`: row r, block c of a 128x4 tile at byte r % 32 * 16 + r // 32 * 4 + c.
What no model shows, whether the instructions do this, is asked before the first step (`conformance`).
"""

import functools
import threading
from types import SimpleNamespace

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu

import halfbyte as hb
from halfbyte import devices, formats
from halfbyte.kernels import blackwell_grouped_gemm
from halfbyte.kernels.blackwell_grouped_gemm import K_TILE, NVFP4_SCALE_BLOCK, OUTPUT_TILE_SIZE, BlockScaledCodes
from halfbyte.ops import expert_tiles

BLOCKS = 3  # of the grid: each has many tiles
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


class Ref:
    """A view of memory."""

    def __init__(self, array):
        self.array = array
        self.shape, self.dtype = array.shape, array.dtype
        self.at = self

    def __getitem__(self, where):
        part = self.array[where]
        return Ref(part) if part.ndim else part

    def __setitem__(self, where, values):
        self.array[where] = np.asarray(values)

    def transpose(self, order):
        return Ref(self.array.transpose(order))


class Barrier:
    """Phases end when all have arrived; who waits for its n-th one sees only whether the count is odd."""

    def __init__(self, arrivals):
        self.arrivals, self.pending, self.done, self.changed = arrivals, 0, 0, threading.Condition()
        self.waits = threading.local()

    def arrive(self):
        with self.changed:
            self.pending += 1
            if self.pending == self.arrivals:
                self.pending, self.done = 0, self.done + 1
                self.changed.notify_all()

    def wait(self):
        number = getattr(self.waits, "number", 0)
        with self.changed:
            assert self.changed.wait_for(lambda: self.done % 2 != number % 2, timeout=600), "waits for ever"
            assert self.done == number + 1, "a phase was missed"
        self.waits.number = number + 1


class Barriers(list):
    at = property(lambda self: self)
    shape = property(lambda self: (len(self),))


def when(condition):
    return lambda body: body() if bool(condition) else None


def fori_loop(first, last, body, state):
    for i in range(int(first), int(last)):
        state = body(i, state)
    return state


class Machine:
    """What `plgpu`, `pl` and `lax` are for the body, in one block of the grid."""

    def __init__(self, block):
        self.here, self.block = threading.local(), block
        self.plgpu = SimpleNamespace(
            planar_snake=lambda *given: tuple(map(int, mosaic_gpu.planar_snake(jnp.int32(given[0]), *given[1:]))),
            nd_loop=self.nd_loop, warp_map=lambda body: body(self.here.warp), Layout=mosaic_gpu.Layout,
            layout_cast=lambda x, _: x, copy_gmem_to_smem=self.fetch, barrier_wait=lambda barrier: barrier.wait(),
            barrier_arrive=lambda barrier: barrier.arrive(), tcgen05_commit_arrive=lambda barrier: barrier.arrive(),
            async_copy_scales_to_tmem=self.scales, tcgen05_mma=self.multiply, wait_load_tmem=lambda: None,
            async_load_tmem=lambda ref: ref.array.copy(), commit_smem=lambda: None, copy_smem_to_gmem=self.send,
            wait_smem_to_gmem=self.sent,
        )  # fmt: skip
        self.pl = SimpleNamespace(when=when, ds=lambda at, size: slice(int(at), int(at) + size))
        self.lax = SimpleNamespace(
            rem=lambda a, b: int(a) % int(b), div=lambda a, b: int(a) // int(b), fori_loop=fori_loop,
            axis_index=lambda name: getattr(self.here, name),
        )  # fmt: skip
        self.on_their_way = []

    def nd_loop(self, grid, *, collective_axes, init_carry):
        def run(body):
            carry = init_carry
            for index in range(self.block, grid[0], BLOCKS):
                carry = body(SimpleNamespace(index=(index,)), carry)

        return run

    def fetch(self, part, room, barrier):
        room[...] = part.array
        barrier.arrive()

    def scales(self, part, place):
        tiles, row = part.array[0], np.arange(OUTPUT_TILE_SIZE)
        for t in range(tiles.shape[0]):
            for c in range(4):
                place.array[:, 4 * t + c] = tiles[t, row % 32, row // 32 * 4 + c]

    def multiply(self, into, left, right, barrier, *, a_scale, b_scale, accumulate):
        a, b = (
            left.array * a_scale.array.repeat(NVFP4_SCALE_BLOCK, 1),
            right.array.T * b_scale.array.repeat(NVFP4_SCALE_BLOCK, 1),
        )
        into[...] = (into.array if accumulate else 0) + a @ b.T
        barrier.arrive()

    def send(self, staged, place):
        self.on_their_way.append((staged, place))

    def sent(self, left, wait_read_only=True):
        while len(self.on_their_way) > left and self.here.warpgroup == 1:
            staged, place = self.on_their_way.pop(0)
            place[...] = staged.array

    def run(self, body):
        """The three threads of a block; what one of them raises."""
        wrong = []

        def thread(warpgroup, warp):
            self.here.warpgroup, self.here.warp = warpgroup, warp
            try:
                body()
            except BaseException as error:
                wrong.append(error)

        threads = [threading.Thread(target=thread, args=role) for role in ((0, 0), (0, 1), (1, 0))]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        if wrong:
            raise wrong[0]


def launch(work_of, count, step, shape, a, b, *tables):
    """`block_scaled._launch` on that machine, block after block."""
    out = Ref(np.full(shape.shape, np.nan, shape.dtype))
    codes = [values(each.codes) for each in (a, b)]
    scales = [np.asarray(each.scales).view(ml_dtypes.float8_e4m3fn).astype(np.float32) for each in (a, b)]
    across = [2 * each.codes.shape[-1] // K_TILE for each in (a, b)]
    tiles = [each.reshape(-1, n, 32, 16) for each, n in zip(scales, across, strict=True)]
    given = [Ref(np.asarray(each)) for each in (*codes, *tiles, *tables)]
    stages, wide = blackwell_grouped_gemm.PREFETCHED_CODES_PER_ROW // step, 64 if shape.dtype == jnp.bfloat16 else 32
    room = lambda *sizes: Ref(np.full(sizes, np.nan, np.float32))  # noqa: E731
    for block in range(BLOCKS):
        machine = Machine(block)
        kept = {name: getattr(blackwell_grouped_gemm, name) for name in ("plgpu", "pl", "lax")}
        scratch: dict = {
            "operand_stages": tuple(
                room(stages, *size)
                for size in ((OUTPUT_TILE_SIZE, step),) * 2 + ((1, step // K_TILE, 32, 16),) * 2
            ),
            "scales": tuple(room(OUTPUT_TILE_SIZE, step // NVFP4_SCALE_BLOCK) for _ in range(2)),
            "accumulators": room(OUTPUT_TILE_SIZE, 2 * OUTPUT_TILE_SIZE),
            "epilogue_smem": Ref(np.zeros((2, OUTPUT_TILE_SIZE, wide), shape.dtype)),
            "tma_barriers": Barriers(Barrier(4) for _ in range(stages)),
            "mma_barriers": Barriers(Barrier(1) for _ in range(stages)),
            "accumulator_ready": Barriers(Barrier(1) for _ in range(2)),
            "accumulator_free": Barriers(Barrier(1) for _ in range(2)),
        }  # fmt: skip
        try:
            for name in kept:
                setattr(blackwell_grouped_gemm, name, getattr(machine, name))
            body = functools.partial(
                blackwell_grouped_gemm._kernel, *given, out, work_of=work_of, count=count, step=step
            )
            machine.run(functools.partial(body, **scratch))
        finally:
            for name, module in kept.items():
                setattr(blackwell_grouped_gemm, name, module)
    return out.array


def values(codes):
    """Of packed codes, the even one in the low nibble."""
    packed = np.asarray(codes)
    both = np.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:-1], -1)
    return E2M1[both & 7] * np.where(both & 8, -1, 1).astype(np.float32)


def drawn(random, rows, k):
    """(Codes, the numbers that they stand for) of a matrix [rows, k]."""
    codes = jnp.asarray(random.integers(0, 16, (rows, k)), jnp.uint8)
    scales = random.uniform(0.1, 2, (rows, k // NVFP4_SCALE_BLOCK)).astype(ml_dtypes.float8_e4m3fn)
    packed = BlockScaledCodes(formats.pack_nibbles(codes), formats.swizzle_scales(jnp.asarray(scales.view(np.uint8))))
    return packed, values(packed.codes) * scales.astype(np.float32).repeat(NVFP4_SCALE_BLOCK, 1)


@pytest.fixture(params=["machine", "interpreted"])
def runner(request, monkeypatch):
    if request.param == "machine":
        monkeypatch.setattr(blackwell_grouped_gemm, "_launch", launch)
    else:
        monkeypatch.setattr(blackwell_grouped_gemm, "is_interpreting", lambda: True)


ALPHA = np.array([0.5, 3, 100, 0.01], np.float32)


@pytest.mark.slow(fast_cases=["machine-1536-float32"])
@pytest.mark.usefixtures("runner")
@pytest.mark.parametrize("k, dtype", [(384, jnp.bfloat16), (1536, jnp.float32)])
def test_a_tile_of_rows_meets_its_expert(k, dtype):
    """Steps of 128 and of 256 codes, fewer and more of them than are under way; two tiles have no expert."""
    random, n = np.random.default_rng(k), 256
    experts = np.array([0, 0, 2, 3, 4, 4], np.int32)
    x, x_values = drawn(random, experts.size * OUTPUT_TILE_SIZE, k)
    tall, w_values = drawn(random, 4 * n, k)
    w = BlockScaledCodes(tall.codes.reshape(4, n, k // 2), tall.scales)
    y = blackwell_grouped_gemm.block_scaled_grouped_gemm(x, w, jnp.asarray(ALPHA), jnp.asarray(experts), dtype=dtype)
    parts = x_values.reshape(-1, OUTPUT_TILE_SIZE, k).astype(np.float64)
    for tile, (part, expert) in enumerate(zip(parts, experts, strict=True)):
        expected = (
            part @ w_values.reshape(4, n, k)[expert].T * ALPHA[expert]
            if expert < 4
            else np.zeros((OUTPUT_TILE_SIZE, n))
        )
        found = np.asarray(y[tile * OUTPUT_TILE_SIZE : (tile + 1) * OUTPUT_TILE_SIZE], np.float64)
        close = 2.0**-8 if dtype == jnp.bfloat16 else 2.0**-20
        assert np.abs(found - expected).max() <= close * np.abs(expected).max()


@pytest.mark.slow(fast_cases=["interpreted"])
@pytest.mark.usefixtures("runner")
def test_an_expert_s_gradient_has_its_own_rows_alone():
    """Of 0 to 9 tiles, more than are under way; columns after the last have codes that nobody may count."""
    random, counts, (m, n) = np.random.default_rng(5), np.array([130, 0, 1100, 17], np.int32), (256, 384)
    tiles = -(-counts // OUTPUT_TILE_SIZE)
    rows = int(tiles.sum() + 2) * OUTPUT_TILE_SIZE
    (x, x_values), (dy, dy_values) = drawn(random, m, rows), drawn(random, n, rows)
    dw = np.asarray(
        blackwell_grouped_gemm.block_scaled_grouped_wgrad_gemm(x, dy, jnp.asarray(ALPHA), jnp.asarray(counts))
    )
    for e, (first, many) in enumerate(zip(np.cumsum(tiles) - tiles, tiles, strict=True)):
        own = slice(first * OUTPUT_TILE_SIZE, (first + many) * OUTPUT_TILE_SIZE)
        expected = x_values[:, own].astype(np.float64) @ dy_values[:, own].T * ALPHA[e]
        assert np.abs(dw[e] - expected).max() <= 2.0**-20 * np.abs(expected).max(initial=0)


@pytest.mark.parametrize(
    "device, sides, recipe, reason",
    [
        ("gb300", (256, 384), "nvfp4", None), ("b200", (2048, 768), "nvfp4_no_rht", None),
        ("gb300", (256, 320), "nvfp4", "multiples of 128, got 320"), ("h200", (256, 384), "nvfp4", "capability 10"),
        ("rtx-pro-6000", (256, 384), "nvfp4", "capability 10"),
        *(("gb300", (256, 384), name, "what NVFP4 kernels make") for name in ("mxfp8", "fp8", "bf16")),
    ],
)  # fmt: skip
def test_what_is_not_served_has_a_reason(device, sides, recipe, reason):
    asked = hb.recipe(recipe), sides, devices.device_by_name(device)
    found = expert_tiles.block_scaled_refusal(*asked)
    assert found is None if reason is None else reason in found
    assert expert_tiles.block_scaled_refusal(*asked, dtypes=("float32", "float32")) is not None
    assert expert_tiles.block_scaled_refusal(*asked, backend="emulated") is not None
    assert (
        expert_tiles.block_scaled_refusal(*asked, tile=256) is not None
        and expert_tiles.block_scaled_refusal(None, *asked[1:]) is not None
    )
