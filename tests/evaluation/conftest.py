"""A model small enough to compile in a second or two, over bytes, in float32: scores compare to the last digits."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from halfbyte import models
from halfbyte.data.tokenizer import byte_tokenizer
from halfbyte.evaluation import LanguageModel

sys.path.insert(0, str(Path(__file__).parents[1]))
from tiny import MODEL

CONFIG = MODEL.replace(vocab_size=288, max_seq=128, rope_theta=10_000.0)


@pytest.fixture(autouse=True, scope="module")
def _small_models(quick_compiles, float32_products):
    """Compiling is most of what these tests cost; they compare to the last digits."""


@pytest.fixture(scope="session")
def model():
    """Random weights with a head large enough that tokens differ in likelihood."""
    params = jax.jit(lambda key: models.init(CONFIG, key))(jax.random.key(0))
    params["head"] = params["head"] * 4.0
    return LanguageModel(CONFIG, params, byte_tokenizer(), models.ModelContext(compute_dtype=jnp.float32), seq=64)
