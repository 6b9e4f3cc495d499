"""An NNX MLP through dot_general, its random bits from an NNX rng stream that is part of the model."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from halfbyte.ops import dot_general


class Model(nnx.Module):
    def __init__(self, made, rngs):
        dot = dot_general(made, key=rngs.quantize)
        self.first = nnx.Linear(32, 32, dot_general=dot.at("first"), rngs=rngs)
        self.second = nnx.Linear(32, 32, dot_general=dot.at("second"), rngs=rngs)
        self.head = nnx.Linear(32, 16, rngs=rngs)

    def __call__(self, x):
        return self.head(nnx.relu(self.second(nnx.relu(self.first(x)))))


def model_in(made):
    return Model(made, nnx.Rngs(params=0, quantize=1))


def loss_in(made):
    graph, _, rest = nnx.split(model_in(made), nnx.Param, ...)

    def loss(params, x, y, key):
        stream = jax.tree.map(lambda leaf: key if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf, rest)
        return jnp.mean((nnx.merge(graph, params, stream)(x) - y) ** 2)

    return loss


@pytest.mark.slow
def test_trained_100_steps(verdict, regression, nvfp4):
    verdict(loss_in, nnx.state(model_in(nvfp4), nnx.Param), regression, control=False)


def test_quantized_sites(regression, nvfp4):
    model, (x, _) = model_in(nvfp4), regression(jax.random.key(0))
    nnx.eval_shape(lambda model: model(x), model)
    assert [(call.site, call.recipe) for call in model.first.dot_general.calls] == [
        ("first", "nvfp4"),
        ("second", "nvfp4"),
    ]
