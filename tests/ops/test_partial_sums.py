"""dx of one x that several linears read under tensor parallelism. Oracles: what travels, and one device's dx."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import halfbyte as hb
from halfbyte import ops
from halfbyte.ops.linear import Execution
from halfbyte.ops.qdot import qdots
from halfbyte.sharding import make_mesh

TOKENS, EMBED, HIDDEN = 64, 64, 128


def linears(execution):
    def total(x, weights):
        recipes = (hb.recipe("nvfp4_no_sr"),) * 3
        made = qdots(x, weights, recipes=recipes, keys=(None,) * 3, execution=execution)
        return sum(jnp.sum(y.astype(jnp.float32) ** 2) for y in made)

    return total


def gated(execution):
    def total(x, weights):
        gate, up, down = weights[0], weights[1], weights[2].T
        placed = execution.placements and dict(zip(("gate", "up", "down"), execution.placements, strict=True))
        y = hb.mlp(x, gate, up, down, recipe="nvfp4_no_sr", placements=placed)
        return jnp.sum(y.astype(jnp.float32) ** 2)

    return total


@pytest.mark.parametrize("loss, down, scatters", [(linears, False, 1), (gated, True, 2)], ids=["qkv", "mlp"])
def test_sums_of_one_x_travel_once_and_are_right(loss, down, scatters):
    mesh = make_mesh({"tensor": 4}, jax.devices("cpu")[:4])
    into = ops.Placement(mesh, P("tensor"), P(None, "tensor"), P(None, "tensor"))
    out = ops.Placement(mesh, P(None, "tensor"), P("tensor"), P("tensor"))
    placed = Execution(placements=(into, into, out if down else into))
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(TOKENS, EMBED)), jnp.bfloat16)
    weights = tuple(jnp.asarray(rng.normal(size=(EMBED, HIDDEN)), jnp.float32) / 8 for _ in range(3))
    gradient = jax.jit(jax.grad(loss(placed)))
    assert str(jax.make_jaxpr(gradient)(x, weights)).count("reduce_scatter[") == scatters  # down's y is another
    alone = jax.jit(jax.grad(loss(Execution())))(x, weights).astype(jnp.float32)
    found = gradient(x, weights).astype(jnp.float32)
    # In one rounding instead of five: not the same bits, and no further from them than those roundings.
    assert np.abs(found - alone).max() <= 2**-7 * np.abs(alone).max()
