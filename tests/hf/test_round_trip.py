"""Oracles: `transformers` (its files, its logits) and the safetensors library (its reading of ours)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open

from halfbyte import models
from halfbyte.distributed import make_mesh
from halfbyte.hf import hf_config
from halfbyte.hf.exporter import assign_shards, write_hf_folder
from halfbyte.hf.hf_folder import HfFolder, TensorToWrite
from halfbyte.hf.load_weights import load_params
from halfbyte.hf.tensor_layouts import TensorGroup, unquantized_groups

from .conftest import their_logits

BF16 = np.dtype(jnp.bfloat16)


def raw_tensors(folder):
    """name -> (dtype, shape, bytes), as the safetensors library reads them."""
    import torch

    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a dict)
                value = tensors.get_tensor(name)
                content = value.contiguous().view(torch.uint8).numpy().tobytes()
                found[name] = (str(value.dtype), tuple(value.shape), content)
    return found


@pytest.fixture(scope="module")
def imported(written, cfg):
    with HfFolder(written) as folder:
        assert hf_config.config_from_hf(folder.config, cfg.name) == cfg
        return load_params(folder, cfg)


@pytest.mark.slow(fast_cases=["llama-tied", "qwen3-untied"])
def test_names_and_bytes_come_back(imported, written, cfg, tmp_path):
    parts = unquantized_groups(cfg, imported, BF16)
    write_hf_folder(tmp_path / "out", parts, hf_config.config_to_hf(cfg), {}, shard_bytes=30_000)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 2
    assert raw_tensors(tmp_path / "out") == raw_tensors(written)


@pytest.mark.slow
def test_logits_of_an_export_agree(imported, transformers, written, cfg, tokens, tmp_path):
    write_hf_folder(tmp_path / "out", unquantized_groups(cfg, imported, BF16), hf_config.config_to_hf(cfg), {})
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="float32")
    expected = their_logits(loaded, tokens)
    original = transformers.AutoModelForCausalLM.from_pretrained(written, dtype="float32")
    np.testing.assert_array_equal(expected, their_logits(original, tokens))
    batch, run = {"tokens": jnp.asarray(tokens, jnp.int32)}, jax.jit(models.apply, static_argnums=(0, 3))
    exact = run(cfg, imported, batch, models.ModelContext(compute_dtype=jnp.float32))
    np.testing.assert_allclose(exact, expected, atol=5e-5)  # float32 sums of up to 128 terms in another order
    rounded = np.asarray(run(cfg, imported, batch, models.ModelContext()))
    error = rounded - expected  # logits of unit variance, activations rounded to 2^-9 some twenty times
    assert np.sqrt(np.mean(error**2)) < 0.02 and np.abs(error).max() < 0.1


@pytest.mark.slow(fast_cases=["llama-tied"])
def test_activation_is_exported_and_imported_by_name(imported, transformers, cfg, tokens, tmp_path):
    gelu = cfg.replace(activation="gelu")
    fields = hf_config.config_to_hf(gelu)
    assert hf_config.config_from_hf(fields, cfg.name) == gelu
    write_hf_folder(tmp_path / "out", unquantized_groups(gelu, imported, BF16), fields, {})
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="float32")
    batch, run = {"tokens": jnp.asarray(tokens, jnp.int32)}, jax.jit(models.apply, static_argnums=(0, 3))
    exact = run(gelu, imported, batch, models.ModelContext(compute_dtype=jnp.float32))
    np.testing.assert_allclose(exact, their_logits(loaded, tokens), atol=5e-5)  # as above
    with pytest.raises(ValueError, match="relu2"):
        hf_config.config_to_hf(cfg.replace(activation="relu2"))


@pytest.mark.slow
def test_mesh_reads_the_same(imported, written, cfg):
    mesh = make_mesh({"fsdp": 2, "tensor": 2}, jax.devices("cpu")[:4])
    with HfFolder(written) as folder:
        spread = load_params(folder, cfg, mesh=mesh)
    wanted = models.param_shardings(cfg, mesh)
    for path, value in models.flatten_specs(spread).items():
        assert value.sharding.is_equivalent_to(models.flatten_specs(wanted)[path], value.ndim)
        np.testing.assert_array_equal(value, models.flatten_specs(imported)[path])


def test_shards_are_filled_to_their_size():
    parts = [TensorGroup((TensorToWrite(str(n), BF16, (8,)),), lambda: ()) for n in range(5)]
    assert [len(shard) for shard in assign_shards(parts, 2 * parts[0].nbytes)] == [2, 2, 1]
