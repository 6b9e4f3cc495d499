"""An NNX MLP through dot_general, its random bits from an NNX rng stream that is part of the model."""

import jax.numpy as jnp
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


def test_sites_are_those_named_with_at(nvfp4):
    model = Model(nvfp4, nnx.Rngs(params=0, quantize=1))
    nnx.eval_shape(lambda model: model(jnp.ones((128, 32))), model)
    calls = [(call.site, call.recipe) for call in model.first.dot_general.calls]
    assert calls == [("first", "nvfp4"), ("second", "nvfp4")]
