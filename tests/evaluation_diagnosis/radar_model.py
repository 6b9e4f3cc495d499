"""The small Llama and its batches on which the radar is tried, and twenty healthy models of other kinds."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from halfbyte import models
from halfbyte.models import LlamaConfig
from halfbyte.train import LogConfig, TrainConfig

MODEL = LlamaConfig(
    name="probe", vocab_size=256, embed=64, mlp=128, layers=2, heads=4, kv_heads=2, head_dim=16, max_seq=64
)
CONFIG = TrainConfig(
    name="probe", model=MODEL, recipe="bf16", policy="all_linear", data="synthetic", steps=1000, batch=16, seq=64,
    log=LogConfig(tensorboard=False),
)  # fmt: skip


def batch_of(seed: int, place: int = 0, rows: int = CONFIG.batch) -> dict[str, jax.Array]:
    """Tokens of a Zipf law, each row half copied, so that there is something to learn."""
    random = np.random.default_rng([seed, place])
    tokens = (random.zipf(1.3, (rows, CONFIG.seq)) % MODEL.vocab_size).astype(np.int32)
    tokens[:, 32:] = tokens[:, :32]
    named = {
        "tokens": tokens,
        "targets": np.roll(tokens, -1, axis=1),
        "segments": np.ones_like(tokens),
        "positions": np.tile(np.arange(CONFIG.seq, dtype=np.int32), (rows, 1)),
    }
    return {name: jnp.asarray(value) for name, value in named.items()}


HEALTHY_MODELS = (
    ("demo", "nvfp4", "mlp"),
    ("llama-60m", "nvfp4", "all_linear"),
    ("llama-125m", "mxfp4", "mlp"),
    ("llama-350m", "fp8", "all_linear"),
    ("qwen3-0.6b", "nvfp4", "mlp"),
    ("llama3.2-1b", "halfbyte", "mlp"),
    ("qwen3-1.7b", "mxfp8", "mlp"),
    ("llama3-8b", "nvfp4_no_rht", "mlp"),
    ("qwen3-8b", "nvfp4_sr_everywhere", "mlp"),
    ("llama3.1-70b", "nvfp4_4over6_mse", "mlp"),
    ("llama3.1-405b", "nvfp4", "mlp/down"),
    ("moe-demo", "nvfp4", "mlp"),
    ("mixtral-8x7b", "mxfp4", "mlp"),
    ("olmoe-1b-7b", "nvfp4", "mlp"),
    ("qwen3-30b-a3b", "nvfp4_no_sr", "mlp"),
    ("demo", "quartet2", "mlp"),
    ("llama-60m", "tetrajet2", "mlp"),
    ("qwen3-0.6b", "nvfp4_remainder", "mlp"),
    ("llama3.2-1b", "nvfp4_shared_scales", "mlp"),
    ("llama-125m", "fp4_one_scale", "mlp"),
)
"""Preset, recipe and policy; `tiny_config` has the sizes."""


def tiny_config(preset: str, recipe: str, policy: str) -> TrainConfig:
    """A run of the preset's kind (norms, heads per kv head, tied embeddings, experts) at the sizes of a test."""
    kind = models.preset(preset)
    experts = {"experts": 4, "experts_per_token": min(2, kind.experts_per_token)} if kind.experts else {}
    heads = {"heads": 4, "kv_heads": max(1, 4 * kind.kv_heads // kind.heads), "head_dim": 32}
    sizes = {"vocab_size": 256, "embed": 128, "mlp": 128, "layers": 2, "max_seq": 64}
    return dataclasses.replace(CONFIG, model=kind.replace(**sizes, **heads, **experts), recipe=recipe, policy=policy)
