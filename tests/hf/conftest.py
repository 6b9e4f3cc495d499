"""Models small enough to compile in seconds, with what large ones have, as folders that `transformers` itself wrote."""

import sys
from pathlib import Path

import numpy as np
import pytest

from halfbyte.hf import hf_config

sys.path.insert(0, str(Path(__file__).parents[1]))
from tiny import LLAMA

QWEN3 = LLAMA.replace(rope_scaling=None, rope_theta=1e6, norm_eps=1e-6, head_dim=32, qk_norm=True, tied=True)
MODELS = {
    "llama": LLAMA,
    "llama-tied": LLAMA.replace(tied=True),
    "qwen3": QWEN3,
    "qwen3-untied": QWEN3.replace(tied=False),
}


@pytest.fixture(autouse=True, scope="module")
def _small_models(quick_compiles, float32_products):
    """Compiling is most of what these tests cost; they compare to the last digits."""


@pytest.fixture(scope="session")
def transformers():
    """Over a PyTorch that warns in each linear, as it does on a CPU without bfloat16 units."""
    torch = pytest.importorskip("torch", reason="needs the extra `interop`")
    transformers = pytest.importorskip("transformers", reason="needs the extra `interop`")
    linear = torch.nn.functional.linear

    def warns(*args):
        torch._C._warn()
        return linear(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "linear", warns)
        yield transformers


@pytest.fixture(params=MODELS, scope="session")
def cfg(request):
    return MODELS[request.param]


@pytest.fixture(scope="session")
def theirs(transformers, cfg):
    """Their model with random weights of theirs, norms included, rounded to bfloat16."""
    import torch

    torch.manual_seed(0)
    fields = hf_config.config_to_hf(cfg)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**fields))
    with torch.no_grad():
        for value in model.parameters():
            fan_in = value.shape[-1]
            value.normal_(1.0 if value.ndim == 1 else 0.0, 0.2 if value.ndim == 1 else fan_in**-0.5)
    return model.to(torch.bfloat16).eval()


@pytest.fixture(scope="session")
def written(theirs, cfg, tmp_path_factory):
    """The folder that `save_pretrained` made of it, in several shards."""
    folder = tmp_path_factory.mktemp("theirs") / "model"
    theirs.save_pretrained(folder, max_shard_size="40KB")
    return folder


@pytest.fixture(scope="session")
def tokens(cfg):
    return np.random.default_rng(0).integers(0, cfg.vocab_size, (2, 40))


def their_logits(model, tokens):
    import torch

    with torch.no_grad():
        return model(torch.from_numpy(np.asarray(tokens))).logits.float().numpy()
