"""grouped_qdot in programs that are not ours. Oracle: the same rows in a program of one device, and `qdot`, which warns
and refuses where this must."""

import functools
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import halfbyte as hb
from halfbyte import ops
from halfbyte.devices import device_by_name
from halfbyte.formats import SharedBitsWarning

GROUPS, EXPERTS, INPUTS, OUTPUTS = (5, 0, 9), 3, 32, 32
ROWS = 16  # two belong to nobody
KEY = jax.random.key(3)


@pytest.fixture(autouse=True, scope="module")
def _quick(quick_compiles):
    """All sides are compiled alike."""


@functools.cache
def given(replicas=1):
    random = np.random.default_rng(1)
    x = jnp.asarray(random.normal(size=(replicas * ROWS, INPUTS)), jnp.bfloat16)
    return x, jnp.asarray(random.normal(size=(EXPERTS, INPUTS, OUTPUTS)), jnp.float32), jnp.array(GROUPS * replicas)


def grouped(x, w, groups, *, recipe="mxfp8", backend="auto"):
    return hb.grouped_qdot(x, w, groups, recipe=recipe, key=KEY, backend=backend)


def gradients(run):
    """(dx, dw) of a loss that tells rows apart."""
    return jax.jit(jax.grad(lambda x, w, groups: jnp.sum(run(x, w, groups).astype(jnp.float32) ** 2), argnums=(0, 1)))


@pytest.mark.slow
@pytest.mark.parametrize("groups", [GROUPS, list(GROUPS), np.array(GROUPS, np.uint8), np.array(GROUPS, np.int64)])
def test_groups_are_any_whole_numbers(groups):
    x, w, known = given()
    assert np.array_equal(jax.jit(lambda x: grouped(x, w, groups))(x), jax.jit(lambda x: grouped(x, w, known))(x))


def test_no_rows_and_no_experts_give_no_rows_and_zeros():
    x, w, groups = given()
    dx, dw = gradients(grouped)(x[:0], w, groups * 0)
    assert dx.shape == (0, INPUTS) and not np.any(dw)
    y = grouped(x, w[:0], groups[:0])
    assert y.shape == (ROWS, OUTPUTS) and not np.any(y)


@pytest.mark.slow
def test_rows_of_other_dtypes_are_refused_as_by_qdot():
    x, w, groups = given()
    for dtype in (jnp.float16, jnp.int32):
        with pytest.raises(TypeError, match="bfloat16 or float32"):
            grouped(x.astype(dtype), w, groups)


@pytest.mark.slow
def test_traced_groups_whose_sum_wraps_around_give_nan():
    x, w, _ = given()
    wraps = jnp.array([2**31 - 1, 2**31 - 1, 2 + ROWS], jnp.int32)  # 2^32 + ROWS
    assert np.isnan(np.asarray(jax.jit(grouped)(x, w, wraps), np.float32)).all()


@pytest.mark.slow
def test_one_key_for_several_tensors_is_said():
    """Of what is rounded by chance: nvfp4's gradients; mxfp8 draws nothing."""
    x, w, groups = given()
    several = {
        "vmap": lambda run: jax.vmap(run)(jnp.stack([x, 2 * x])),
        "scan": lambda run: jax.lax.scan(lambda carry, _: (carry, run(carry)), x, length=2),
    }
    for word, mapped in several.items():
        with pytest.warns(SharedBitsWarning, match=word):
            jax.eval_shape(lambda mapped=mapped: mapped(lambda x: grouped(x, w, groups, recipe="nvfp4")))
        with warnings.catch_warnings(action="error"):
            jax.eval_shape(lambda mapped=mapped: mapped(lambda x: grouped(x, w, groups)))


def test_there_is_no_second_derivative():
    x, w, groups = given()
    slope = lambda x: jnp.sum(gradients(grouped)(x, w, groups)[0].astype(jnp.float32))  # noqa: E731
    with pytest.raises(NotImplementedError, match="second derivative"):
        jax.eval_shape(jax.grad(slope), x)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_a_device_of_a_shard_map_has_its_own_groups(backend):
    """Weights that all devices have in common get the sum of their gradients, but for its order."""
    x, w, groups = given(2)
    mesh = Mesh(np.array(jax.devices("cpu")[:2]), ("data",))
    run = functools.partial(grouped, backend=backend)
    parts = jax.shard_map(run, mesh=mesh, in_specs=(P("data"), P(), P("data")), out_specs=P("data"))
    halves = [gradients(run)(x[at : at + ROWS], w, groups[:EXPERTS]) for at in (0, ROWS)]
    dx, dw = gradients(parts)(x, w, groups)
    assert np.array_equal(dx, np.concatenate([half[0] for half in halves]))
    summed = np.asarray(halves[0][1]) + np.asarray(halves[1][1])
    np.testing.assert_allclose(dw, summed, atol=1e-6 * np.abs(summed).max())


@pytest.mark.slow(fast_cases=["gb300-nvfp4"])
@pytest.mark.parametrize("recipe", ["bf16", "nvfp4"])
@pytest.mark.parametrize("chip", ["h200", "gb300"])
def test_program_sharded_by_xla_has_no_pallas_kernel(chip, recipe):
    """Each kernel reads a whole array of one device. `LinearProblem.partitioned_by_xla` leaves out those of qdot; on
    one device both programs have kernels."""
    shapes = ((512, 256), jnp.bfloat16), ((4, 256, 256), jnp.float32), ((4,), jnp.int32)
    x, w, groups = (jax.ShapeDtypeStruct(*each) for each in shapes)
    run = gradients(functools.partial(grouped, recipe=recipe))

    def kernels(devices):
        mesh = Mesh(np.array(jax.devices("cpu")[:devices]), ("data",), axis_types=(AxisType.Auto,))
        with jax.set_mesh(mesh), ops.compile_for(device_by_name(chip)):
            return set(re.findall("mpmd_map|pallas_call", str(jax.make_jaxpr(run)(x, w, groups))))

    assert not kernels(2)
    assert kernels(1) or (chip, recipe) == ("gb300", "bf16")  # whose grouped GEMMs are XLA's


@pytest.mark.slow
def test_on_explicit_axes_the_result_lies_as_its_rows():
    x, w, groups = given()
    mesh = Mesh(np.array(jax.devices("cpu")[:2]), ("data",), axis_types=(AxisType.Explicit,))
    expected, (dx, dw) = jax.jit(grouped)(x, w, groups), gradients(grouped)(x, w, groups)
    with jax.set_mesh(mesh):
        placed = [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in ((x, P("data")), (w, P()), (groups, P()))]
        made, (dx_made, dw_made) = jax.jit(grouped)(*placed), gradients(grouped)(*placed)
    assert made.sharding.spec == P("data", None) == dx_made.sharding.spec
    assert np.array_equal(made, expected) and np.array_equal(dx_made, dx)
    np.testing.assert_allclose(dw_made, dw, atol=1e-6 * np.abs(dw).max())  # of float32 sums in another order
