"""Oracles: the compressed-tensors package and its ModelOpt converter, for what an NVFP4 export holds; `ops`, for what
the forward pass multiplies; `transformers`, for what the whole model computes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from halfbyte import models, ops
from halfbyte.hf import ExportModel, config_from_hf, export_model, load_params
from halfbyte.hf.hf_folder import HfFolder
from halfbyte.hf.tensor_layouts import hf_tensors
from halfbyte.recipes import policy, recipe

from .conftest import MODELS, their_logits

RECIPES = {"square blocks": "nvfp4", "rows": "nvfp4_no_2d"}
POLICY = "all_linear"


def resolve(cfg, name, linears=POLICY):
    return policy(linears, recipe(name)).resolve(models.linear_sites(cfg), cfg.layers)


@functools.partial(jax.jit, static_argnums=1)
def forward_codes(weight, name):
    """(codes [out, in], scales [out, in/16] as bytes, S, float32 values [out, in]) that fprop multiplies."""
    tensor = ops.quantize_weight(weight, recipe=recipe(name)).fprop.unpack()
    scales = jax.lax.bitcast_convert_type(tensor.scales, jnp.uint8).T
    scales = jnp.repeat(scales, weight.shape[1] // scales.shape[0], axis=0)
    return tensor.codes.T, scales, tensor.encode_scale, tensor.dequantize().T


@pytest.fixture(scope="module")
def cfg():
    return MODELS["llama"]


@pytest.fixture(scope="module")
def params(cfg):
    """float32 weights that no bfloat16 holds: what is quantized is the master weight."""
    return jax.jit(lambda key: models.init(cfg, key))(jax.random.key(1))


@pytest.fixture(scope="module", params=RECIPES)
def name(request):
    return RECIPES[request.param]


@pytest.fixture(scope="module")
def folders(cfg, params, name, tmp_path_factory):
    out = tmp_path_factory.mktemp("nvfp4")
    for to in ("compressed-tensors", "modelopt"):
        made = export_model(ExportModel(cfg, params), out / to, to=to, resolved=resolve(cfg, name))
        assert made.quantized == 7 * cfg.layers
    return {to: out / to for to in ("compressed-tensors", "modelopt")}


@pytest.fixture(scope="module")
def compressed_tensors(transformers):
    return pytest.importorskip("compressed_tensors", reason="needs the extra `interop`")


def loaded_state(folder):
    from safetensors.torch import load_file

    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


def check_state(state, cfg, params, name):
    """Codes, scales and global scale of each linear against those of the forward pass, bit for bit; and weights."""
    import torch
    from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor, unpack_fp4_from_uint8
    from compressed_tensors.quantization.quant_scheme import NVFP4A16, QuantizationScheme

    scheme = QuantizationScheme(targets=["Linear"], **NVFP4A16)
    flat = models.flatten_specs(params)
    for site in (site for site in hf_tensors(cfg) if site.transposed and site.layer is not None):
        codes, scales, encode_scale, values = forward_codes(flat[site.path][site.layer], name)
        theirs = {k: state[f"{site.module}.{k}"] for k in ("weight_packed", "weight_scale", "weight_global_scale")}
        elements = unpack_fp4_from_uint8(theirs["weight_packed"], *site.shape, dtype=torch.float32)
        table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
        ours = np.where(np.asarray(codes) & 8, -1, 1).astype(np.float32) * table[np.asarray(codes) & 7]
        np.testing.assert_array_equal(elements.numpy().view(np.uint32), ours.view(np.uint32), err_msg=site.module)
        np.testing.assert_array_equal(theirs["weight_scale"].view(torch.uint8), np.asarray(scales))
        assert float(theirs["weight_global_scale"]) == pytest.approx(float(encode_scale), rel=2**-23)
        weight = NVFP4PackedCompressor.decompress(theirs, scheme)["weight"]
        rounded = np.asarray(values.astype(jnp.bfloat16)).view(np.uint16)
        np.testing.assert_array_equal(weight.view(torch.uint16).numpy(), rounded, err_msg=site.module)


def test_compressed_tensors_reads_the_codes_of_the_forward_pass(compressed_tensors, folders, cfg, params, name):
    state = loaded_state(folders["compressed-tensors"])
    check_state(state, cfg, params, name)
    weight = models.flatten_specs(params)["layers/mlp/down"][1]
    assert float(state["model.layers.1.mlp.down_proj.weight_global_scale"]) == float(forward_codes(weight, name)[2])


def test_modelopt_converts_to_the_same(compressed_tensors, folders, cfg, params, name):
    from compressed_tensors.entrypoints.convert import ModelOptNvfp4Converter

    state = ModelOptNvfp4Converter(targets=["re:.*proj$"]).validate(loaded_state(folders["modelopt"]))
    check_state(state, cfg, params, name)


def test_transformers_computes_the_weight_only_forward(compressed_tensors, transformers, folders, cfg):
    import torch

    tokens = np.random.default_rng(0).integers(0, cfg.vocab_size, (2, 40))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folders["compressed-tensors"])
    their_logits(loaded, tokens)  # the first call decompresses, always to bfloat16
    theirs = their_logits(torch.nn.Module.float(loaded), tokens)
    run = jax.jit(models.apply, static_argnums=(0, 3))
    for kind in ("compressed-tensors", "modelopt"):
        with HfFolder(folders[kind]) as folder:
            read = load_params(folder, config_from_hf(folder.config))
        rounded = jax.tree.map(lambda w: w.astype(jnp.bfloat16).astype(jnp.float32), read)  # as they decompress it
        batch, exact = {"tokens": jnp.asarray(tokens, jnp.int32)}, models.ModelContext(compute_dtype=jnp.float32)
        np.testing.assert_allclose(run(cfg, rounded, batch, exact), theirs, atol=5e-5)
        np.testing.assert_allclose(run(cfg, read, batch, exact), theirs, atol=0.05)  # weights to 2^-9


@pytest.mark.slow(fast_cases=["square blocks"])
def test_quantized_linears_and_no_others_have_scales(folders, cfg, params, tmp_path):
    export_model(
        ExportModel(cfg, params), tmp_path / "mlp", to="compressed-tensors", resolved=resolve(cfg, "nvfp4", "mlp")
    )
    with HfFolder(tmp_path / "mlp") as folder:
        names = set(folder.entries)
        ignored = set(folder.config["quantization_config"]["ignore"])
    for site in (site for site in hf_tensors(cfg) if site.transposed):
        scaled = {f"{site.module}.{kind}" for kind in ("weight_packed", "weight_scale", "weight_global_scale")}
        if "mlp" in site.path:
            assert scaled <= names and site.name not in names and site.module not in ignored
        else:
            assert not scaled & names and site.name in names and site.module in ignored
