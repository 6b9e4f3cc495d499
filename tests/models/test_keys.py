"""Keys of many layers at once. Oracle: the keys of one linear of one layer, folded by hand."""

import functools

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest

from halfbyte import models
from halfbyte.formats import key_words
from halfbyte.models.model_context import keys_of_layers, stream_words_of_layer, stream_words_of_layers
from halfbyte.recipes import GEMM_ROLES, ROLES, layer_key, policy, recipe, role_key, signs_key, site_key, step_key

STEP = step_key(3, 5)
CFG = models.LlamaConfig(
    name="tiny", vocab_size=64, embed=32, mlp=64, layers=2, heads=4, kv_heads=2, head_dim=16, max_seq=64
)
WAYS = {
    "layers/attention/q": ("layers/attention/q",),
    "layers/mlp/up": ("layers/mlp", "up"),
    "layers/mlp/shared_down": ("layers/mlp/shared", "down"),
    "layers/mlp/expert_gate": ("layers/mlp/expert_gate",),
}


def words(key):
    return np.asarray(jax.random.key_data(key)).tolist()


def pair(key):
    return [int(word) for word in key_words(key)]


def by_hand(path, layer):
    return functools.reduce(site_key, WAYS[path], layer_key(STEP, layer))


@pytest.mark.slow
@pytest.mark.parametrize("path", WAYS)
def test_keys_of_layers_are_those_folded_by_hand(path):
    keys = keys_of_layers(STEP, {path: recipe("nvfp4")}, jnp.arange(2, 5))
    (site,) = keys
    assert path == f"layers/{site}"
    assert words(keys[site]) == [words(by_hand(path, layer)) for layer in (2, 3, 4)]


@pytest.mark.slow
def test_stream_words_are_those_of_the_key_of_the_linear():
    drawn = stream_words_of_layers(STEP, {path: recipe("nvfp4") for path in WAYS}, jnp.arange(2, 5))
    here = stream_words_of_layer(drawn, jnp.int32(1))
    for path in WAYS:
        found, own = here[path.removeprefix("layers/")], by_hand(path, 3)
        if "expert_" in path:
            assert words(found) == words(own)
            continue
        assert [pair(role_key(found, role)) for role in ROLES] == [pair(role_key(own, role)) for role in ROLES]
        assert [pair(signs_key(found, gemm)) for gemm in GEMM_ROLES] == [
            pair(signs_key(own, gemm)) for gemm in GEMM_ROLES
        ]


def test_no_key_is_folded_without_random_bits():
    nearest = {"layers/attention/q": recipe("bf16"), "layers/mlp/up": recipe("fp8")}
    assert stream_words_of_layers(STEP, nearest, jnp.arange(2)) == {}
    assert stream_words_of_layers(None, {"layers/mlp/up": recipe("nvfp4")}, jnp.arange(2)) == {}


@pytest.mark.slow
def test_no_layer_folds_a_key():
    """Without a loop each fold would be compiled once a layer: a hundred instructions of one number, and the mixing of
    its words as many again for two keys."""
    chosen = policy("all_linear", "nvfp4").resolve(models.linear_sites(CFG), CFG.layers)
    batch = {name: jnp.zeros((1, 32), jnp.int32) for name in ("tokens", "targets")}

    def loss(params, key):
        ctx = models.ModelContext(policy=chosen, key=key, unroll=CFG.layers, backend="reference")
        return models.loss(CFG, params, batch, ctx)[0]

    program = jax.make_jaxpr(jax.grad(loss))(jax.eval_shape(lambda: models.init(CFG, STEP)), STEP)
    whole = list(equations(program.jaxpr))
    layers = [each.params["jaxpr"].jaxpr for each in whole if each.params.get("name") == "body"]
    assert len(layers) == 2 * CFG.layers  # forward and backward
    inside = [each.primitive.name for layer in layers for each in equations(layer)]
    assert "random_fold_in" in {each.primitive.name for each in whole}
    assert "random_fold_in" not in inside and "dot_general" in inside
    scalars = [each for layer in layers for each in equations(layer) if str(each.outvars[0].aval) == "uint32[]"]
    assert not [each for each in scalars if each.primitive.name == "mul"]


def equations(jaxpr):
    for each in jaxpr.eqns:
        yield each
        for inner in jax.extend.core.jaxprs_in_params(each.params):
            yield from equations(inner)
