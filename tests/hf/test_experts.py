"""Models with experts as folders of theirs, both ways. Oracle: `transformers`, its files and its float32 logits."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from halfbyte import models
from halfbyte.formats import NVFP4, quantize
from halfbyte.hf import hf_config
from halfbyte.hf.exporter import ExportModel, export_model, write_hf_folder
from halfbyte.hf.hf_folder import HfFolder
from halfbyte.hf.import_model import import_hf_folder
from halfbyte.hf.load_weights import load_params
from halfbyte.hf.tensor_layouts import unquantized_groups
from halfbyte.recipes import policy, recipe

from .conftest import LLAMA, their_logits

QWEN = LLAMA.replace(
    rope_scaling=None, norm_eps=1e-6, head_dim=32, qk_norm=True, mlp=48, experts=8, experts_per_token=3, norm_topk=True
)
EXPERTS = {
    "qwen3-moe": QWEN,
    "qwen3-moe not normalised": QWEN.replace(norm_topk=False),
    "olmoe": QWEN.replace(head_dim=16, joint_qk_norm=True, norm_topk=False, norm_eps=1e-5),
    "mixtral": QWEN.replace(head_dim=16, qk_norm=False, norm_eps=1e-5),
}


def initial(cfg):
    return jax.jit(lambda key: models.init(cfg, key))(jax.random.key(0))


@pytest.fixture(params=EXPERTS, scope="module")
def cfg(request):
    return EXPERTS[request.param]


@pytest.fixture(scope="module")
def folder(transformers, cfg, tmp_path_factory):
    """What `save_pretrained` makes of a model with random weights of theirs, norms included."""
    import torch

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**hf_config.config_to_hf(cfg))
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for value in model.parameters():
            value.normal_(float(value.ndim == 1), 0.2 if value.ndim == 1 else value.shape[-1] ** -0.5)
    made = tmp_path_factory.mktemp("theirs") / "model"
    model.float().eval().save_pretrained(made)
    return made


@pytest.mark.slow
def test_logits_agree_in_and_out(transformers, folder, cfg, tmp_path):
    with HfFolder(folder) as opened:
        assert hf_config.config_from_hf(opened.config, cfg.name) == cfg
        params = load_params(opened, cfg)
    tokens = np.random.default_rng(0).integers(0, cfg.vocab_size, (2, 40))
    load = transformers.AutoModelForCausalLM.from_pretrained
    expected = their_logits(load(folder, dtype="float32"), tokens)
    run = jax.jit(models.apply, static_argnums=(0, 3))
    ours = run(cfg, params, {"tokens": jnp.asarray(tokens, jnp.int32)}, models.ModelContext(compute_dtype=jnp.float32))
    np.testing.assert_allclose(ours, expected, atol=1e-5 * np.abs(expected).max())
    write_hf_folder(
        tmp_path / "out", unquantized_groups(cfg, params, np.dtype(np.float32)), hf_config.config_to_hf(cfg), {}
    )
    assert np.array_equal(their_logits(load(tmp_path / "out", dtype="float32"), tokens), expected)


def spoil(folder, out, *, config=(), tensor=None):
    """A copy of `folder` with fields of config.json changed (None: removed), one tensor renamed or of another shape."""
    from safetensors.numpy import load_file, save_file

    shutil.copytree(folder, out)
    fields = json.loads((out / "config.json").read_text())
    for name, value in config:
        fields.pop(name) if value is None else fields.update({name: value})
    (out / "config.json").write_text(json.dumps(fields))
    if tensor is not None:
        tensors = load_file(out / "model.safetensors")
        value = tensors.pop(tensor[0])
        if tensor[1] is not None:
            tensors[tensor[0]] = np.ascontiguousarray(tensor[1](value))
        save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


@pytest.mark.slow
def test_bad_folder_of_experts_is_refused_by_reason(transformers, tmp_path):
    cfg = QWEN
    params = initial(cfg)
    good = tmp_path / "good"
    write_hf_folder(good, unquantized_groups(cfg, params, np.dtype(np.float32)), hf_config.config_to_hf(cfg), {})
    up = "model.layers.1.mlp.experts.7.up_proj.weight"
    bad = {
        up: {"tensor": (up, None)},
        "experts.7.up_proj": {"tensor": (up, lambda value: value[:16])},
        "norm_topk_prob": {"config": [("norm_topk_prob", None)]},
        "experts_per_token": {"config": [("num_experts_per_tok", 9)]},
        "mlp.gate": {"config": [("num_experts", 4)]},
        "mlp_only_layers": {"config": [("mlp_only_layers", [0])]},
    }
    for number, (word, how) in enumerate(bad.items()):
        with pytest.raises(ValueError, match=word):
            import_hf_folder(spoil(good, tmp_path / f"bad{number}", **how), tmp_path / f"run{number}")


@pytest.mark.slow
@pytest.mark.parametrize("to", ["compressed-tensors", "modelopt"])
def test_exported_experts_are_the_codes_that_fprop_multiplies(tmp_path, to):
    """And the router is among what engines are told to leave alone."""
    cfg, chosen = QWEN.replace(mlp=64), recipe("nvfp4")
    params = initial(cfg)
    resolved = policy("experts", chosen).resolve(models.linear_sites(cfg), cfg.layers)
    export_model(ExportModel(cfg, params), tmp_path / "out", to=to, dtype="float32", resolved=resolved)
    with HfFolder(tmp_path / "out") as opened:
        back = load_params(opened, cfg)
        assert any(name.endswith("mlp.gate") for name in _ignored(opened.config))
    made = jax.jit(lambda w: quantize(w, NVFP4, block=chosen.fprop_w.block, axis=-2).dequantize())
    for name in ("expert_gate", "expert_down"):
        weight, read = params["layers"]["mlp"][name][1, 5], back["layers"]["mlp"][name][1, 5]
        assert np.array_equal(made(weight), read)
    assert np.array_equal(params["layers"]["mlp"]["router"], back["layers"]["mlp"]["router"])


@pytest.mark.parametrize("field", [{"router": "sigmoid"}, {"shared_experts": 1}])
def test_layer_without_an_hf_family_is_not_exported(tmp_path, field):
    cfg = QWEN.replace(**field)
    with pytest.raises(ValueError, match=f"export.*no word for {next(iter(field))}"):
        export_model(ExportModel(cfg, models.abstract_params(cfg)), tmp_path / "out", to="hf", dtype="float32")
    assert not (tmp_path / "out").exists()


def _ignored(fields):
    found = fields["quantization_config"]
    return found.get("ignore") or found["exclude_modules"]


@pytest.mark.parametrize("field", ["rms_norm_eps", "rope_theta", "head_dim", "tie_word_embeddings", "hidden_act"])
def test_missing_field_has_the_default_of_transformers(transformers, cfg, field):
    """Each family has defaults of its own. Here head_dim is one that a default can say."""
    fields = hf_config.config_to_hf(cfg.replace(head_dim=cfg.embed // cfg.heads))
    fields.pop(field, None)
    said = transformers.AutoConfig.for_model(**fields).to_dict()
    assert hf_config.config_from_hf(fields) == hf_config.config_from_hf(said)
