"""Every placement of a linear over two axes is right or refused.

Oracles: for all 1,331 placements, which rows and columns of the whole arrays JAX says that a device holds; for some of
them, the linear on one device.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from instruments import quick
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import halfbyte as hb
from halfbyte import ops
from halfbyte.ops.linear_sharding import dim_axes_of_spec

CUTS = (None, "f", "t", ("f", "t"), ("t", "f"))
SPECS = [P(a, b) for a, b in itertools.product(CUTS, CUTS) if not set(a or ()) & set(b or ())]


def mesh(shape, axes=("f", "t")):
    return Mesh(np.array(jax.devices("cpu")[: np.prod(shape)]).reshape(shape), axes)


def held(grid, spec, dim, gathered):
    """Which of 8 rows or columns each device has once the parts of its peers along `gathered` lie behind each other."""
    shape = (8, 8)
    index = {d: slices[dim] for d, slices in NamedSharding(grid, spec).devices_indices_map(shape).items()}
    own = np.array([np.arange(8)[index[d]] for d in grid.devices.flat]).reshape(*grid.devices.shape, -1)
    axes = [axis for axis in dim_axes_of_spec(spec, 2)[dim] if axis in gathered]
    whole = np.broadcast_to(own, own.shape)
    for axis in reversed(axes):  # the innermost first
        at = grid.axis_names.index(axis)
        joined = np.concatenate(np.moveaxis(whole, at, 0), axis=-1)
        whole = np.stack([joined] * grid.devices.shape[at], axis=at)
    return whole


def fits(grid, x, w, y):
    """Whether tokens, inputs and outputs that meet on a device are the same, by what each of the specs means."""
    inputs, outputs = dim_axes_of_spec(x, 2)[1], dim_axes_of_spec(y, 2)[1]
    if any(grid.shape[axis] > 1 for axis in set(inputs) & set(outputs)):
        return False
    stored = set("ft") - set(inputs) - set(outputs)
    pairs = (
        (held(grid, x, 0, outputs), held(grid, y, 0, inputs)),
        (held(grid, x, 1, ()), held(grid, w, 0, stored)),
        (held(grid, y, 1, ()), held(grid, w, 1, stored)),
    )
    return all(a.shape == b.shape and np.array_equal(a, b) for a, b in pairs)


def accepted(grid, x, w, y):
    try:
        ops.Placement(grid, x, w, y).shards(2)
    except ValueError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2, 2), (1, 4)], ids=str)
def test_what_fits_is_accepted_and_nothing_else(shape):
    grid = mesh(shape)
    told = {specs: accepted(grid, *specs) for specs in itertools.product(SPECS, SPECS, SPECS)}
    assert told == {specs: fits(grid, *specs) for specs in told}
    assert 0 < sum(told.values()) < len(told)


@functools.partial(jax.jit, static_argnums=(0, 1), compiler_options=quick)
def linear(recipe, placement, x, w, dy):
    y, pullback = jax.vjp(lambda x, w: hb.qdot(x, w, recipe=recipe, placement=placement), x, w)
    return y, *pullback(dy)


def assert_as_on_one_device(placement, recipe, *, width, tolerance):
    rng = np.random.default_rng(0)
    x, dy = (jnp.asarray(rng.normal(size=(96, width)), jnp.bfloat16) for _ in range(2))
    w = jnp.asarray(rng.normal(size=(width, width)), jnp.float32)
    results, wanted = linear(recipe, placement, x, w, dy), linear(recipe, None, x, w, dy)
    for name, got, want in zip(("y", "dx", "dw"), results, wanted, strict=True):
        got, want = (np.asarray(a, np.float64) for a in (got, want))
        assert np.linalg.norm(got - want) <= tolerance * np.linalg.norm(want), name


@pytest.mark.slow(fast_cases=["x2-w2-y2"])
@pytest.mark.parametrize(
    ("x", "w", "y"),
    [
        (P("f", "t"), P(("t", "f"), None), P("f")),
        (P(("f", "t")), P(None, ("t", "f")), P("f", "t")),
        (P(), P("f", "t"), P(None, "t")),  # gathered over an axis along which all compute the same
    ],
)
def test_results_are_those_of_one_device(x, w, y):
    # bf16 results of float32 sums in another order: a last digit here and there.
    assert_as_on_one_device(ops.Placement(mesh((2, 2)), x, w, y), hb.recipe("bf16"), width=96, tolerance=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("axes", [P(None, "t"), P()], ids=["inputs", "idle"])
def test_an_axis_of_three_devices(axes):
    """dy reaches the codes with all its digits: one in sixteen lost changes codes, 2e-2 and more of the results."""
    placement = ops.Placement(mesh((3,), ("t",)), axes, P(*axes[1:]), P())
    assert_as_on_one_device(placement, hb.recipe("nvfp4_no_sr"), width=96, tolerance=1e-3)


def test_linears_of_one_x_have_one_placement_of_it():
    grid, x, w = mesh((2, 2)), jnp.ones((32, 32), jnp.bfloat16), jnp.ones((32, 32))
    one, other = ops.Placement(grid, P("f"), P(), P("f")), ops.Placement(grid, P("t"), P(), P("t"))
    with pytest.raises(ValueError, match="one x"):
        ops.qdots(
            x,
            (w, w),
            recipes=(hb.recipe("bf16"),) * 2,
            keys=(None,) * 2,
            execution=ops.ExecutionConfig(placements=(one, other)),
        )


@pytest.mark.parametrize(
    ("up", "down"),
    [
        (("t", None, "t"), ("f", "t", None)),  # up reads another x
        (("f", None, None), ("f", "t", None)),  # u is cut otherwise than g
        (("f", None, "t"), ("t", None, "f")),  # h lies elsewhere
    ],
)
def test_an_mlp_whose_placements_do_not_chain(up, down):
    grid, x = mesh((2, 2)), jnp.ones((32, 32), jnp.bfloat16)

    def placed(lead, inputs, outputs):
        return ops.Placement(grid, P(lead, inputs), P(inputs, outputs), P(lead, outputs))

    placements = {"gate": placed("f", None, "t"), "up": placed(*up), "down": placed(*down)}
    with pytest.raises(ValueError, match="placement"):
        ops.mlp(x, *[jnp.ones((32, 32))] * 3, recipe="bf16", placements=placements)
