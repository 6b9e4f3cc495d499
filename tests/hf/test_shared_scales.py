"""Oracles: the forward pass itself (`models.quantize_weights`), the recipe without sharing, and the engines' rule that
a fused group has one tensor scale."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from halfbyte import models
from halfbyte.formats import PackedQTensor
from halfbyte.hf import ExportModel, export_model
from halfbyte.hf.exporter import fused_mismatches
from halfbyte.hf.hf_folder import HfFolder
from halfbyte.recipes import policy, recipe

from .conftest import LLAMA

SHARED, OWN = recipe("nvfp4_shared_scales"), recipe("nvfp4")


def resolve(chosen, linears="all_linear"):
    return policy(linears, chosen).resolve(models.linear_sites(LLAMA), LLAMA.layers)


@pytest.fixture(scope="module")
def params():
    return jax.jit(lambda key: models.init(LLAMA, key))(jax.random.key(3))


@pytest.mark.slow
def test_exported_codes_are_those_of_the_forward_pass(params, tmp_path):
    resolved = resolve(SHARED)
    made = export_model(ExportModel(LLAMA, params), tmp_path / "out", to="compressed-tensors", resolved=resolved)
    assert made.mismatches == [] and fused_mismatches(LLAMA, params, resolve(OWN)) != []
    ready = jax.jit(lambda p: models.quantize_weights(LLAMA, p, resolved))(params)
    scales = set()
    with HfFolder(tmp_path / "out") as folder:
        for name, theirs in (("q", "q_proj"), ("k", "k_proj"), ("v", "v_proj")):
            codes = ready["layers"]["attention"][name].fprop
            assert isinstance(codes, PackedQTensor)
            module = f"model.layers.1.self_attn.{theirs}"
            np.testing.assert_array_equal(folder.read(f"{module}.weight_packed"), np.asarray(codes.packed[1]).T)
            scales.add(float(folder.read(f"{module}.weight_global_scale")[0]))
            assert float(codes.amax[1]) == max(float(jnp.abs(params["layers"]["attention"][n][1]).max()) for n in "qkv")
    assert len(scales) == 1


def test_prequantized_layer_equals_quantizing_in_the_layer(params):
    """Inside the layer (training) and once for all layers (generation): the same codes, so the same loss."""
    cfg = LLAMA.replace(layers=1)
    one = {**params, "layers": jax.tree.map(lambda stack: stack[:1], params["layers"])}
    weights = {role: getattr(SHARED, role) for role in ("fprop_w", "dgrad_w")}  # the rest compiles sooner in bf16
    chosen = dataclasses.replace(recipe("bf16"), name="weights", shared_scales=True, **weights)
    resolved = policy("mlp", chosen).resolve(models.linear_sites(cfg), 1)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, cfg.vocab_size, (2, 32)), jnp.int32)
    ctx = models.ModelContext(policy=resolved, key=jax.random.key(0))

    @jax.jit
    def run(p):
        return jax.value_and_grad(lambda p: models.loss(cfg, p, {"tokens": tokens, "targets": tokens}, ctx)[0])(p)

    loss, grads = run(one)
    ready = jax.jit(lambda p: models.quantize_weights(cfg, p, resolved))(one)
    again = jax.jit(lambda p: models.loss(cfg, p, {"tokens": tokens, "targets": tokens}, ctx)[0])(ready)
    assert float(loss) == float(again)
    assert all(bool(jnp.isfinite(g).all()) and float(jnp.abs(g).max()) > 0 for g in jax.tree.leaves(grads))


def test_unshareable_scales_are_refused():
    with pytest.raises(ValueError, match="shared_scales"):
        dataclasses.replace(recipe("nvfp4_rht_everywhere"), shared_scales=True)


def test_fused_mismatch_is_any_difference_of_amaxes(params):
    ones = jax.tree.map(jnp.ones_like, params)
    assert fused_mismatches(LLAMA, ones, resolve(OWN)) == []
    ones["layers"]["attention"]["q"] = ones["layers"]["attention"]["q"].at[1].multiply(1.5)
    (found,) = fused_mismatches(LLAMA, ones, resolve(OWN))
    assert "q_proj" in found.group and (found.layer, found.ratio) == (1, 1.5)
