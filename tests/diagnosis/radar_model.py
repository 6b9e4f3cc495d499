"""The small Llama and its batches on which the radar is tried."""

import jax
import jax.numpy as jnp
import numpy as np

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
