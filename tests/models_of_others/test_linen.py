"""A Flax Linen transformer layer through dot_general: both layers of its MLP, as published; keys from a Linen rng
stream.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest

from halfbyte.ops import dot_general

pytestmark = pytest.mark.slow


class Layer(nn.Module):
    """Pre-norm attention and MLP, built from Linen's own layers."""

    dot: object

    @nn.compact
    def __call__(self, x):
        mask = nn.make_causal_mask(jnp.ones(x.shape[:2]))
        x = x + nn.MultiHeadDotProductAttention(num_heads=2)(nn.LayerNorm()(x), mask=mask)
        up = nn.Dense(64, dot_general=self.dot, name="up")(nn.LayerNorm()(x))
        return x + nn.Dense(32, dot_general=self.dot, name="down")(nn.gelu(up))


class Model(nn.Module):
    dot: object

    @nn.compact
    def __call__(self, tokens):
        x = Layer(self.dot, name="layer")(nn.Embed(32, 32)(tokens))
        return nn.Dense(32, name="head")(nn.LayerNorm()(x))


def loss_in(made, dots=None):
    model = Model(dot_general(made, key="quantize") if dots is None else dots)

    def loss(params, tokens, key):
        logits = model.apply(params, tokens[:, :-1], rngs={"quantize": key})
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    return loss


@pytest.fixture(scope="module")
def params():
    return Model(jax.lax.dot_general).init(jax.random.key(0), jnp.zeros((1, 16), jnp.int32))


def test_trained_100_steps(verdict, text, params):
    verdict(loss_in, params, text, control=False)


def test_quantized_sites(text, nvfp4, params):
    dots = dot_general(nvfp4, key="quantize")
    jax.eval_shape(loss_in(nvfp4, dots), params, *text(jax.random.key(0)), jax.random.key(0))
    assert [(call.site, call.recipe) for call in dots.calls] == [("layer/up", "nvfp4"), ("layer/down", "nvfp4")]
