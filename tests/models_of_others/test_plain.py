"""A plain-JAX transformer (stacked parameters, scan over layers, remat) through apply_recipe. Oracles: the sites
written down here, and the same training in bf16."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from halfbyte.ops import apply_recipe
from halfbyte.recipes import Policy, Rule

pytestmark = pytest.mark.slow

SHAPES = {
    "embed": (32, 32),
    "head": (32, 32),
    "layers": {"qkv": (2, 32, 96), "out": (2, 32, 32), "up": (2, 32, 64), "down": (2, 64, 32)},
}


def _init(shape, seed):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) * shape[-2] ** -0.5, jnp.float32)


PARAMS = {name: _init(SHAPES[name], i) for i, name in enumerate(("embed", "head"))}
PARAMS["layers"] = {name: _init(shape, 10 + i) for i, (name, shape) in enumerate(SHAPES["layers"].items())}


def norm(x):
    return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)


def layer(x, p):
    q, k, v = jnp.split(norm(x) @ p["qkv"], 3, -1)
    scores = jnp.einsum("bqd,bkd->bqk", q, k) / 32**0.5
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[1:], bool)), scores, -1e9)
    x = x + jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(scores), v) @ p["out"]
    return x + jax.nn.silu(norm(x) @ p["up"]) @ p["down"]


def plain(params, tokens):
    x = params["embed"][tokens[:, :-1]]
    x, _ = jax.lax.scan(lambda x, p: (jax.checkpoint(layer)(x, p), None), x, params["layers"])
    logp = jax.nn.log_softmax(norm(x) @ params["head"])
    return -jnp.take_along_axis(logp, tokens[:, 1:, None], -1).mean()


def some(made):
    """One weight inside the scanned and rematerialised layer, one outside."""
    return Policy("some", (Rule("layers/down", made), Rule("head", made)))


def loss_in(made):
    return lambda params, tokens, key: apply_recipe(plain, some(made), key=key, show=None)(params, tokens)


def test_quantized_sites(text, nvfp4):
    report = apply_recipe(plain, some(nvfp4), key=jax.random.key(0)).report(PARAMS, *text(jax.random.key(0)))
    assert [(site.path, site.num_executions) for site in report.replaced] == [("layers/down", 2), ("head", 1)]
    assert [(site.path, site.skip_reason) for site in report.skipped] == [
        ("layers/qkv", "no rule matches layers/qkv"),
        (None, "it has batch dims, so no operand is a single weight"),
        (None, "it has batch dims, so no operand is a single weight"),
        ("layers/out", "no rule matches layers/out"),
        ("layers/up", "no rule matches layers/up"),
    ]


def test_trained_100_steps(verdict, text):
    verdict(loss_in, PARAMS, text, control=True)
