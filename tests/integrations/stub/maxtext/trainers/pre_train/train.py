"""MaxText's trainer with the signatures of 0.2.5, for a stack of gated MLPs that is scanned over dim 1."""

import json
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
from jax import lax

WIDTH, HIDDEN, LAYERS, ROWS, LENGTH = 32, 32, 2, 4, 16
SHAPES = {"wi_0": (WIDTH, HIDDEN), "wi_1": (WIDTH, HIDDEN), "wo": (HIDDEN, WIDTH)}


def create_params():
    keys = jax.random.split(jax.random.key(0), 4)
    mlp = {
        name: {"kernel": jax.random.normal(key, (shape[0], LAYERS, shape[1])) / 4}
        for key, (name, shape) in zip(keys, SHAPES.items(), strict=False)
    }
    attention = {"query": {"kernel": jax.random.normal(keys[3], (WIDTH, LAYERS, WIDTH)) / 4}}
    return {"decoder": {"layers": {"mlp": mlp, "self_attention": attention}}}


def create_batch():
    return {"inputs": jax.random.normal(jax.random.key(1), (ROWS, LENGTH, WIDTH))}


def loss_fn(model, config, data, dropout_rng, params, sparsity_state=None, is_train=True):
    assert set(data) == {"inputs"}
    stacks = jax.tree.map(lambda w: jnp.moveaxis(w, 1, 0), model["decoder"]["layers"])

    def layer(x, w):
        x = x + x @ w["self_attention"]["query"]["kernel"]
        mlp = w["mlp"]
        hidden = jax.nn.silu(x @ mlp["wi_0"]["kernel"]) * (x @ mlp["wi_1"]["kernel"])
        return x + hidden @ mlp["wo"]["kernel"], None

    return jnp.mean(lax.scan(layer, data["inputs"], stacks)[0] ** 2), {}


def train_step(model, config, state_mesh_shardings, params_shardings, state, data, dropout_rng=None):
    count = config.gradient_accumulation_steps

    def microbatch(total, rows):
        (_, aux), grads = jax.value_and_grad(loss_fn, has_aux=True)(
            state.params, config, dict(rows), None, None, is_train=True
        )
        return jax.tree.map(jnp.add, total, grads), aux

    deal = lambda a: jnp.swapaxes(a.reshape(a.shape[0] // count, count, *a.shape[1:]), 0, 1)  # noqa: E731
    zeros = jax.tree.map(jnp.zeros_like, state.params)
    return lax.scan(microbatch, zeros, jax.tree.map(deal, data), length=count)[0]


def create_state(step):
    return SimpleNamespace(
        params=create_params(), optimizer=SimpleNamespace(step=SimpleNamespace(get_value=lambda: step))
    )


def main(argv):
    config = SimpleNamespace(gradient_accumulation_steps=2, init_weights_seed=0, quantization="")
    for argument in argv[2:]:
        name, _, value = argument.partition("=")
        setattr(config, name, value)
    step = jax.jit(lambda n, data: train_step(None, config, None, None, create_state(n), data))
    grads = step(jnp.int32(0), create_batch())
    print(json.dumps({"argv": argv, "finite": all(bool(jnp.isfinite(g).all()) for g in jax.tree.leaves(grads))}))
    sys.stdout.flush()
