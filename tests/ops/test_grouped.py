"""grouped_qdot. Oracle: a loop of `qdot` over experts, each given its own rows, filled up with zeros to a block."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from halfbyte import devices, ops
from halfbyte.kernels.hopper_gemm import matmul
from halfbyte.ops import expert_tiles, gemm_problem, grouped_linear
from halfbyte.ops import grouped_dot as grouped_qdots
from halfbyte.recipes import recipe

COUNTS = np.array([0, 1, 15, 16, 17, 2000], np.int32)
ON_GPU = jax.default_backend() == "gpu"
ROWS = int(COUNTS.sum()) + 7  # seven rows belong to nobody
NARROW = 64, 32  # inputs, outputs
WIDE = (256, 256) if ON_GPU else NARROW  # as a GPU's kernels take them
RECIPES = ("nvfp4", "mxfp8", "fp8", "bf16")  # blocks of 16, of 32, a scale an expert, none
RECIPES += ("nvfp4_no_rht", "mxfp4") if ON_GPU else ()
KEY = jax.random.key(5)


@pytest.fixture(autouse=True, scope="module")
def _quick(quick_compiles):
    """Both sides are compiled alike."""


@functools.cache
def given(inputs=NARROW[0], outputs=NARROW[1]):
    """x, w, dy of experts that differ by 10^6 in size; rubbish in the rows that belong to nobody."""
    random = np.random.default_rng(0)
    sizes = np.repeat(np.append(10.0 ** np.arange(-3, 3), 1e4), np.append(COUNTS, 7))[:, None]
    x, dy = random.normal(size=(ROWS, inputs)) * sizes, random.normal(size=(ROWS, outputs)) / sizes
    w = random.normal(size=(6, inputs, outputs)) * 10.0 ** np.arange(-2, 4)[:, None, None]
    return jnp.asarray(x, jnp.bfloat16), jnp.asarray(w, jnp.float32), jnp.asarray(dy, jnp.bfloat16)


@functools.cache
def grouped(name, backend="reference"):
    chosen = recipe(name)

    @functools.partial(jax.jit, static_argnames="known")
    def run(x, w, dy, counts, known=None):
        how = {"recipe": chosen, "key": KEY, "backend": backend}
        counts = counts if known is None else np.array(known, np.int32)
        y, back = jax.vjp(lambda x, w: ops.grouped_qdot(x, w, counts, **how), x, w)
        return y, *back(dy)

    return run


@functools.cache
def alone(name):
    chosen = recipe(name)

    @jax.jit
    def run(x, w, dy, key):
        y, back = jax.vjp(lambda x, w: ops.qdot(x, w, recipe=chosen, key=key, backend="reference"), x, w)
        return y, *back(dy)

    return run


def bits(array):
    values = np.asarray(array.astype(jnp.float32))
    return values.view(np.uint32) & 0x7FFFFFFF | (values < 0) << 31


def ordered(array):
    """bfloat16 numbers as integers that count them."""
    signed = bits(array).astype(np.int64) >> 16
    return np.where(signed & 0x8000, -(signed & 0x7FFF), signed)


def summed_by_our_kernel(x, dy):
    room = ((0, -x.shape[0] % 64), (0, 0))
    one, how = jnp.ones(()), {"layout": "tn", "out_dtype": jnp.float32}
    return np.asarray(matmul(*(jnp.asarray(np.pad(each, room)) for each in (x, dy)), one, one, **how))


# `reference` is that loop under every recipe, and fills up to blocks of 16 or of 32; it compiles each expert by itself.
FEW = np.array([0, 15, 0, 17, 0, 0], np.int32)
CASES = [*((name, "auto") for name in RECIPES), ("nvfp4", "reference"), ("mxfp8", "reference")]


@pytest.mark.slow(fast_cases=["mxfp8-reference"])
@pytest.mark.parametrize("name, backend", CASES)
def test_each_expert_is_a_qdot_of_its_own_bit_for_bit(name, backend):
    """As `reference` of known groups all of it. By tiles (`auto`) float32 sums run in another order: 1e-6 of dw's
    largest (of bf16 on a GPU they are those of our dense kernel, XLA's are up to 3e-6 off); and where products are no
    short numbers, a unit of y and dx in less than one of a thousand, on a GPU or 1e-6 of their largest: a sum that
    nearly vanishes has units that are finer than what float32 adds up.
    """
    x, w, dy = given(*WIDE)
    counts, known = (FEW, tuple(FEW.tolist())) if backend == "reference" else (COUNTS, None)
    y, dx, dw = map(np.asarray, grouped(name, backend)(x, w, dy, jnp.asarray(counts), known=known))
    x, w, dy = map(np.asarray, (x, w, dy))
    starts, units, long = np.cumsum(counts) - counts, [], ("bf16", "fp8", "mxfp8") if ON_GPU else ("bf16",)
    exact = backend == "reference" or name not in long
    for expert, (start, count) in enumerate(zip(starts, counts, strict=True)):
        if count == 0:
            assert not np.any(dw[expert])
            continue
        own, room = slice(start, start + count), ((0, -count % 32), (0, 0))
        one = np.pad(x[own], room), w[expert], np.pad(dy[own], room), jax.random.fold_in(KEY, expert)
        expected = [np.asarray(each) for each in alone(name)(*one)]
        if ON_GPU and name == "bf16":
            expected[2] = summed_by_our_kernel(x[own], dy[own])
        for ours, theirs in zip((y[own], dx[own]), expected[:2], strict=True):
            theirs = theirs[: ours.shape[0]]
            units.append(np.abs(ordered(ours) - ordered(theirs)).ravel())
            assert exact <= np.array_equal(bits(ours), bits(theirs)), (name, expert)
            near = 1e-6 * np.abs(theirs.astype(np.float32)).max() if ON_GPU else 0
            far = np.abs(ours.astype(np.float32) - theirs) > near
            assert np.all(units[-1][far.ravel()] <= 1), (name, expert)
        apart = np.abs(dw[expert] - expected[2]).max() / np.abs(expected[2]).max()
        assert apart <= (0 if backend == "reference" else 1e-6), (name, expert)
    units = np.concatenate(units)
    assert np.mean(units > 0) < 1e-3
    assert not np.any(y[counts.sum() :]) and not np.any(dx[counts.sum() :])


@pytest.mark.slow
@pytest.mark.parametrize("spoilt", ["x", "w", "dy"])
def test_nan_stays_in_its_expert(spoilt):
    x, w, dy = given()
    clean = grouped("nvfp4")(x, w, dy, jnp.asarray(COUNTS))
    at = int(COUNTS[:4].sum()) + 3  # of expert 4
    bad = {"x": x.at[at, 5].set(jnp.nan), "w": w.at[4, 3, 2].set(jnp.nan), "dy": dy.at[at, 5].set(jnp.nan)}[spoilt]
    y, dx, dw = grouped("nvfp4")(*({"x": x, "w": w, "dy": dy} | {spoilt: bad}).values(), jnp.asarray(COUNTS))
    own = np.zeros(ROWS, bool)
    own[COUNTS[:4].sum() : COUNTS[:5].sum()] = True
    spread = {"x": (y, dw), "w": (y, dx), "dy": (dx, dw)}[spoilt]
    for ours, before, mine in ((y, clean[0], own), (dx, clean[1], own), (dw, clean[2], np.arange(6) == 4)):
        assert np.array_equal(bits(ours)[~mine], bits(before)[~mine])
        assert np.isnan(np.asarray(ours, np.float32)[mine]).all() == any(ours is each for each in spread)


def one_amax(monkeypatch):
    real = grouped_linear._amaxes
    monkeypatch.setattr(grouped_linear, "_amaxes", lambda *given: jnp.full_like(made := real(*given), jnp.max(made)))


def blocks_of_two_experts(monkeypatch):
    monkeypatch.setattr(expert_tiles, "padded_group_sizes", lambda counts, tile: counts)


def an_offset_one_block_off(monkeypatch):
    real = expert_tiles.row_of_pair
    moved = lambda experts, *where: real(experts, *where) + jnp.where(experts == 4, 16, 0)  # noqa: E731
    monkeypatch.setattr(expert_tiles, "row_of_pair", moved)


def bytes_counted_from_the_buffer(monkeypatch):
    real = grouped_linear._random_bytes
    spoil = lambda found: dataclasses.replace(found, first_tile_of_expert=jnp.arange(found.experts.size) * found.tile)  # noqa: E731
    monkeypatch.setattr(grouped_linear, "_random_bytes", lambda words, shape, found: real(words, shape, spoil(found)))


def tail_rows_counted(monkeypatch):
    real, tail = grouped_qdots._tiled, ROWS - int(COUNTS.sum())
    more = lambda x, w, counts, *how: real(x, w, counts.at[-1].add(tail), *how)  # noqa: E731
    monkeypatch.setattr(grouped_qdots, "_tiled", more)


def runs_of_two_experts(monkeypatch):
    """Hadamard runs over tokens begin half a run late, in both operands of wgrad alike."""
    real = grouped_linear.hadamard_transform

    def late(x, *, axis, points):
        moved = jnp.roll(x, points // 2, axis) if axis == -2 else x
        made = real(moved, axis=axis, points=points)
        return jnp.roll(made, -points // 2, axis) if axis == -2 else made

    monkeypatch.setattr(grouped_linear, "hadamard_transform", late)


FAULTS = (one_amax, blocks_of_two_experts, an_offset_one_block_off, bytes_counted_from_the_buffer)
FAULTS_OF_DW = (runs_of_two_experts, tail_rows_counted)
RANDOM_Y = dataclasses.replace(recipe("nvfp4_no_rht"), fprop_x=recipe("nvfp4_no_rht").dgrad_dy)


@functools.cache
def forward(backend):
    x, w, _ = given()
    return jax.jit(lambda: ops.grouped_qdot(x, w, COUNTS, recipe=RANDOM_Y, key=KEY, backend=backend))()


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(monkeypatch, fault):
    """Each is one that other grouped GEMMs had; rubbish in tail rows is in the data of all of these tests. x is rounded
    by chance here, so that fprop alone shows them."""
    right = forward("reference")
    assert np.array_equal(bits(right), bits(forward("auto")))
    fault(monkeypatch)
    assert not np.array_equal(bits(right), bits(forward.__wrapped__("auto")))


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS_OF_DW)
def test_a_planted_fault_of_the_weight_gradient_is_found(monkeypatch, fault):
    """What meets in wgrad alone: Hadamard runs over tokens, and rows that belong to nobody."""
    given_to = *given(), jnp.asarray(COUNTS)
    right = np.asarray(grouped("nvfp4")(*given_to)[2])

    def agrees(dw):
        return np.all(np.abs(np.asarray(dw) - right) <= 1e-6 * np.abs(right).max((1, 2), keepdims=True))

    assert agrees(grouped("nvfp4", "auto")(*given_to)[2])
    fault(monkeypatch)
    assert not agrees(jax.jit(lambda *given: grouped.__wrapped__("nvfp4", "auto")(*given)[2])(*given_to))  # dw alone


def test_groups_that_do_not_fit_are_refused_or_nan():
    x, w, dy = given()
    with pytest.raises(ValueError, match="rows"):
        ops.grouped_qdot(x, w, COUNTS * 2, recipe="bf16")
    assert np.isnan(np.asarray(grouped("bf16")(x, w, dy, jnp.asarray(COUNTS * 2))[0], np.float32)).all()
    with pytest.raises(ValueError, match="experts"):
        ops.grouped_qdot(x, w[0], COUNTS, recipe="bf16")
    with pytest.raises(TypeError, match="whole numbers"):
        ops.grouped_qdot(x, w, COUNTS.astype(np.float32), recipe="bf16")


@pytest.mark.slow
def test_groups_that_no_one_can_have_are_no_steps_of_a_kernel(monkeypatch):
    """A walk that is told of fewer steps than none, or of more than there are rows, may never end."""
    seen, made = [], expert_tiles.ExpertTiles.from_counts

    def watched(counts, *more):
        jax.debug.callback(seen.append, counts)
        return made(counts, *more)

    monkeypatch.setattr(expert_tiles.ExpertTiles, "from_counts", watched)
    x, w, _ = given()
    run = jax.jit(lambda groups: ops.grouped_qdot(x, w, groups, recipe="bf16"))
    y = run(jnp.array([-200, 1, 2**31 - 1, 0, -(2**31), 5], jnp.int32))
    jax.effects_barrier()
    assert np.isnan(np.asarray(y, np.float32)).all()
    assert [each.tolist() for each in seen] == [[0, 1, ROWS, 0, 0, 5]]


@pytest.mark.slow
@pytest.mark.parametrize("device, weight", [("h200", "quantize_weight"), ("gb300", "pack_weight")])
def test_kernels_make_and_multiply_the_codes_of_each_expert(interpreted, device, weight):
    """As a Hopper or Blackwell GPU runs it, with kernels interpreted: a table of scales, keys and places for tiles and
    experts. On Blackwell operands are codes, and dw's columns are an expert's rows."""
    random, counts, wide = np.random.default_rng(1), jnp.array([130, 0, 17]), 128
    sizes = np.repeat([1e-2, 1e3, 1e5], [130, 17, 4])[:, None]
    x = jnp.asarray(random.normal(size=(151, wide)) * sizes, jnp.bfloat16)
    w = jnp.asarray(random.normal(size=(3, wide, wide)) * 10.0 ** np.arange(3)[:, None, None], jnp.float32)
    dy = jnp.asarray(random.normal(size=(151, wide)) / sizes, jnp.bfloat16)
    with gemm_problem._target(devices.device_by_name(device)):
        found = grouped("nvfp4", "auto")(x, w, dy, counts)
        program = str(jax.make_jaxpr(grouped("nvfp4", "auto"))(x, w, dy, counts))
    assert weight in program and ("u8[128,320]" in program) == (device == "gb300")  # dy's codes, turned
    expected = grouped("nvfp4")(x, w, dy, counts)
    for ours, theirs in zip(found[:2], expected[:2], strict=True):
        assert np.mean(bits(ours) != bits(theirs)) < 1e-3
    largest = np.abs(expected[2]).max(axis=(1, 2), keepdims=True)
    assert np.all(np.abs(found[2] - expected[2]) <= 1e-6 * largest)


@pytest.mark.slow
def test_codes_for_blackwell_are_the_definition_s(interpreted):
    """All six operands decoded, as the radar reads them, beside those that XLA makes: equal, bit for bit."""
    random, counts, wide = np.random.default_rng(2), jnp.array([130, 0, 17]), 128
    own = (np.arange(384) < 130) | ((np.arange(384) >= 256) & (np.arange(384) < 273))
    x, dy = (jnp.asarray(random.normal(size=(384, wide)) * own[:, None] * size, jnp.bfloat16) for size in (1, 1e4))
    w = jnp.asarray(random.normal(size=(3, wide, wide)), jnp.float32)
    nvfp4 = recipe("nvfp4")

    @jax.jit
    def values(x, w, dy, counts):
        found = grouped_linear.grouped_operands(
            x, w, dy, expert_tiles.ExpertTiles.from_counts(counts, 384, 128), recipe=nvfp4, key=KEY
        )
        factors = {role: operand.decode_scale for role, operand in found.items()}
        decoded = {role: o.values(role, getattr(nvfp4, role)) for role, o in found.items()}
        assert all((o.scales is not None) == (gemm_problem.target_device().name == "gb300") for o in found.values())
        return {role: each.astype(jnp.float32) for role, each in decoded.items()}, factors

    with gemm_problem._target(devices.device_by_name("gb300")):
        found = values(x, w, dy, counts)
    jax.tree.map(np.testing.assert_array_equal, found, values(x, w, dy, counts))


def test_grouped_qdot_negative_count_traced_is_nan():
    """The counts add up to the rows, but one is negative: no row belongs to that expert."""
    x, w = jnp.ones((32, 16), jnp.bfloat16), jnp.ones((3, 16, 16))
    run = jax.jit(lambda counts: ops.grouped_qdot(x, w, counts, recipe="bf16"))
    assert np.isnan(np.asarray(run(jnp.int32([16, -8, 24])), np.float32)).all()
    assert np.isfinite(np.asarray(run(jnp.int32([16, 0, 16])), np.float32)).all()
