"""Rows to the devices of their experts and back. Oracle: NumPy over all rows, no devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from halfbyte.distributed import make_mesh, parse_mesh, shard_map_over
from halfbyte.ops.moe_dispatch import ExpertRoute, all_to_all_combine, all_to_all_dispatch

pytestmark = pytest.mark.usefixtures("quick_compiles")  # rows move; the few numbers that are computed are exact

DEVICES, OWN, WIDTH = 8, 6, 3
MESHES = ("expert=8", "fsdp=2,expert=4")


def through(text, do, owners, *rows):
    """`do(route, *parts)` on each device of a mesh, results one after another."""
    mesh = make_mesh(parse_mesh(text), jax.devices("cpu")[:DEVICES])
    axes = tuple(axis for axis, size in mesh.shape.items() if size > 1)
    local = lambda owners, *parts: do(ExpertRoute.of(owners, axes), *parts)  # noqa: E731
    cut = (P(), *(P(axes) for _ in rows))
    return np.asarray(jax.jit(shard_map_over(local, mesh, cut, P(axes)))(owners, *rows))


@pytest.fixture(params=["uneven", "all to one", "nowhere"])
def owners(request):
    """The device of each pair; with `nowhere` a third of them have none."""
    random = np.random.default_rng(0)
    if request.param == "all to one":
        return jnp.full(DEVICES * OWN, 3, jnp.int32)
    found = random.integers(0, DEVICES - 2, DEVICES * OWN)  # two devices get nothing
    if request.param == "nowhere":
        found[::3] = DEVICES
    return jnp.asarray(found, jnp.int32)


@functools.cache
def pairs():
    return jnp.asarray(np.random.default_rng(1).normal(size=(DEVICES * OWN, WIDTH)), jnp.float32)


@pytest.mark.slow
@pytest.mark.parametrize("text", MESHES)
def test_rows_come_in_the_order_of_pairs_and_go_back(text, owners):
    x = np.asarray(pairs())
    arrived = through(text, lambda route, x: all_to_all_dispatch(x, route), owners, pairs()).reshape(DEVICES, -1, WIDTH)
    for device, rows in enumerate(arrived):
        own = x[np.asarray(owners) == device]
        np.testing.assert_array_equal(rows[: len(own)], own)
        assert not rows[len(own) :].any()
    back = through(text, lambda route, x: all_to_all_combine(2 * all_to_all_dispatch(x, route), route), owners, pairs())
    np.testing.assert_array_equal(back, np.where((np.asarray(owners) < DEVICES)[:, None], 2 * x, 0))


@pytest.mark.slow(fast_cases=["all to one"])
def test_each_is_the_others_gradient(owners):
    """<dispatch x, g> = <x, collect g>, of numbers whose sums are exact."""

    def both(route, x, g):
        sent, pull = jax.vjp(lambda x: all_to_all_dispatch(x, route), x)
        came, back = jax.vjp(lambda g: all_to_all_combine(g, route), g)
        return jnp.concatenate([pull(g)[0], came, back(x)[0], sent])

    g = jnp.asarray(np.random.default_rng(2).integers(-9, 9, (DEVICES * DEVICES * OWN, WIDTH)), jnp.float32)
    found = through(MESHES[0], both, owners, pairs(), g).reshape(DEVICES, -1, WIDTH)
    pulled, collected, backed, dispatched = np.split(found, np.cumsum([OWN, OWN, OWN * DEVICES]), axis=1)
    np.testing.assert_array_equal(pulled, collected)
    np.testing.assert_array_equal(backed, dispatched)
    x = np.asarray(pairs()).reshape(DEVICES, OWN, WIDTH)
    left = np.sum(dispatched.astype(np.float64) * np.asarray(g, np.float64).reshape(dispatched.shape))
    assert left == pytest.approx(np.sum(x.astype(np.float64) * collected), rel=1e-12)
