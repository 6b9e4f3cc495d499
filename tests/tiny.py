"""The tiny models of train, models, evaluation and hf, and the smallest run that has everything: grouped heads, all
dims multiples of 16. What does not ask for a second layer takes ONE_LAYER."""

import dataclasses

from halfbyte.models import LlamaConfig
from halfbyte.ops.rope import RopeScaling
from halfbyte.train import CheckpointConfig, LogConfig, OptimizerConfig, TrainConfig, ValidationConfig

MODEL = LlamaConfig(
    name="tiny", vocab_size=64, embed=32, mlp=64, layers=2, heads=4, kv_heads=2, head_dim=16, max_seq=64
)
ONE_LAYER = MODEL.replace(layers=1)
# What a large one has: rotary scaling and, in `models` and `hf`, a vocabulary that is no power of two.
LLAMA = LlamaConfig(
    name="tiny", vocab_size=96, embed=64, mlp=96, layers=2, heads=4, kv_heads=2, head_dim=16, max_seq=128,
    rope_theta=10_000.0, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 16),
)  # fmt: skip


ONE_LINEAR = "mlp/down"
"""A policy for runs that ask what a step does with 4 bits, not with which linears: what is quantized is most of what is
traced and compiled."""


def tiny(**changes) -> TrainConfig:
    """A run of six steps on synthetic data, without validation."""
    base = TrainConfig(
        name="tiny",
        model=MODEL,
        data="synthetic",
        steps=6,
        batch=8,
        seq=32,
        # A constant rate: runs of other lengths are the same program, which one of the tests compiles for all.
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup=1, schedule="constant"),
        validation=ValidationConfig(at_end=False, batches=1),
        checkpoint=CheckpointConfig(every=2, keep_last=2),
        log=LogConfig(tensorboard=False),
    )
    return dataclasses.replace(base, **changes)
