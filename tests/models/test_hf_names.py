"""Oracle: `LlamaForCausalLM` of Hugging Face transformers, on random weights, in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from halfbyte import models
from halfbyte.models import hf_names


@pytest.fixture(scope="module")
def theirs():
    pytest.importorskip("torch", reason="needs the extra `interop`")
    return pytest.importorskip("transformers", reason="needs the extra `interop`")


def their_logits(transformers, cfg, params, tokens):
    import torch

    with torch.no_grad():
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**hf_names.config_to_hf(cfg)))
        state = {name: torch.from_numpy(value.copy()) for name, value in hf_names.to_hf(cfg, params).items()}
        if cfg.tied:
            state["lm_head.weight"] = state["model.embed_tokens.weight"]
        model.load_state_dict(state)
        return model.eval()(torch.from_numpy(np.asarray(tokens))).logits.float().numpy()


@pytest.mark.parametrize("tied", [False, True])
def test_logits_agree(theirs, tiny, tied):
    cfg = tiny.replace(tied=tied)
    params = jax.jit(lambda key: models.init(cfg, key))(jax.random.key(5))
    tokens = np.random.default_rng(0).integers(0, cfg.vocab_size, (2, 40))
    expected = their_logits(theirs, cfg, params, tokens)
    batch = {"tokens": jnp.asarray(tokens, jnp.int32)}
    run = jax.jit(models.apply, static_argnums=(0, 3))
    exact = run(cfg, params, batch, models.Context(compute_dtype=jnp.float32))
    np.testing.assert_allclose(exact, expected, atol=2e-5)
    rounded = run(cfg, params, batch, models.Context())
    error = np.asarray(rounded) - expected  # logits of unit variance, activations rounded to 2^-9 some twenty times
    assert np.sqrt(np.mean(error**2)) < 0.02 and np.abs(error).max() < 0.1


def test_without_rope_scaling(theirs, tiny):
    cfg = tiny.replace(rope_scaling=None, kv_heads=4)
    params = jax.jit(lambda key: models.init(cfg, key))(jax.random.key(6))
    tokens = np.random.default_rng(1).integers(0, cfg.vocab_size, (1, 40))
    ours = models.apply(
        cfg, params, {"tokens": jnp.asarray(tokens, jnp.int32)}, models.Context(compute_dtype=jnp.float32)
    )
    np.testing.assert_allclose(ours, their_logits(theirs, cfg, params, tokens), atol=2e-5)


def test_there_and_back(tiny, tiny_params):
    tensors = hf_names.to_hf(tiny, tiny_params)
    assert tensors["model.layers.1.mlp.down_proj.weight"].shape == (64, 96)
    back = hf_names.from_hf(tiny, tensors)
    assert jax.tree.all(jax.tree.map(np.array_equal, back, tiny_params))


@pytest.mark.parametrize("name", ["llama3.2-1b", "llama3-8b", "llama3.1-405b"])
def test_configs_there_and_back(name):
    cfg = models.preset(name)
    assert hf_names.config_from_hf(hf_names.config_to_hf(cfg), name) == cfg


def test_a_checkpoint_that_does_not_fit_is_refused(tiny, tiny_params):
    tensors = hf_names.to_hf(tiny, tiny_params)
    with pytest.raises(ValueError, match="layers/mlp/gate has shape"):
        hf_names.from_hf(tiny.replace(mlp=128), tensors)
    del tensors["model.layers.1.self_attn.k_proj.weight"]
    with pytest.raises(ValueError, match="no tensor 'model.layers.1.self_attn.k_proj.weight'"):
        hf_names.from_hf(tiny, tensors)


@pytest.mark.parametrize(
    "change", [{"hidden_act": "gelu"}, {"attention_bias": True}, {"rope_scaling": {"rope_type": "yarn"}}]
)
def test_a_config_that_is_no_llama_3_is_refused(tiny, change):
    with pytest.raises(ValueError, match="import: "):
        hf_names.config_from_hf(hf_names.config_to_hf(tiny) | change)
