"""An Equinox MLP through apply_recipe. Equinox keeps a weight as [outputs, inputs] and puts it on the left: W @ x,
mapped.
"""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

from halfbyte.ops import apply_recipe
from halfbyte.recipes import Policy, Rule

pytestmark = pytest.mark.slow


@functools.cache
def model():
    return eqx.nn.MLP(32, 16, width_size=32, depth=2, key=jax.random.key(0))


def plain(model, x, y):
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


def hidden(made):
    return Policy("hidden layers", (Rule("layers/[01]/weight", made),))


def loss_in(made):
    def loss(params, x, y, key):
        return apply_recipe(plain, hidden(made), key=key, show=None)(eqx.combine(params, model()), x, y)

    return loss


def test_quantized_sites(regression, nvfp4):
    report = apply_recipe(plain, hidden(nvfp4), key=jax.random.key(0)).report(model(), *regression(jax.random.key(0)))
    assert [site.path for site in report.replaced] == ["layers/0/weight", "layers/1/weight"]
    assert [site.path for site in report.skipped] == ["layers/2/weight"]
    assert report.skipped[0].skip_reason == "no rule matches layers/2/weight"


def test_trained_100_steps(verdict, regression):
    verdict(loss_in, eqx.filter(model(), eqx.is_array), regression, control=True)
