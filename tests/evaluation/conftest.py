"""A model small enough to compile in a second or two, over bytes, in float32: scores compare to the last digits."""

import jax
import jax.numpy as jnp
import pytest

from halfbyte import models
from halfbyte.data.tokenizer import byte_tokenizer
from halfbyte.evaluation import LanguageModel

CONFIG = models.LlamaConfig(
    name="tiny", vocab_size=288, embed=32, mlp=64, layers=2, heads=4, kv_heads=2, head_dim=16, max_seq=128,
    rope_theta=10_000.0,
)  # fmt: skip


@pytest.fixture(autouse=True, scope="session")
def _float32_products():
    """On a GPU float32 GEMMs are TF32 unless asked."""
    with jax.default_matmul_precision("float32"):
        yield


@pytest.fixture(autouse=True, scope="module")
def _quick(quick_compiles):
    """Compiling is most of what these tests cost."""


@pytest.fixture(scope="session")
def model():
    """Random weights with a head large enough that tokens differ in likelihood."""
    params = jax.jit(lambda key: models.init(CONFIG, key))(jax.random.key(0))
    params["head"] = params["head"] * 4.0
    return LanguageModel(CONFIG, params, byte_tokenizer(), models.ModelContext(compute_dtype=jnp.float32), seq=64)
