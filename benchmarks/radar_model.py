"""The small Llama, its batches and its training, on which the radar is tried: by radar_defects.py, and by tests."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from halfbyte.models import LlamaConfig
from halfbyte.recipe import recipe
from halfbyte.train import LogConfig, TrainConfig, create_state, jit_train_step, resolve, run_mesh

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


def trained(seed: int, *, steps: int, recipe_name: str, policy: str, rows: int = 4) -> dict:
    """Weights after `steps` steps of `rows` sequences."""
    config = dataclasses.replace(CONFIG, seed=seed, steps=steps, batch=rows, recipe=recipe_name, policy=policy, mesh="")
    mesh = run_mesh(config, jax.devices()[:1])
    step = jit_train_step(config, resolve(MODEL, policy, recipe(recipe_name)), mesh)
    state = create_state(config, mesh)
    for place in range(steps):
        state, _ = step(state, batch_of(seed, place, rows))
    return state.params
