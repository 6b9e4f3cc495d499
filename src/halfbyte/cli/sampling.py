"""A few words from freshly trained weights, for the end of a run."""

from typing import Any

import jax

from halfbyte import models
from halfbyte.evaluation import Generator, LanguageModel, Sampling
from halfbyte.train.config import TrainConfig


def sample_text(
    config: TrainConfig, params: Any, dataset: Any, *, prompt: str = "The", tokens: int = 60
) -> tuple[str, str]:
    """(prompt, continuation): drawn at temperature 0.7 from the 40 likeliest tokens, in bf16, with the run's seed."""
    local = jax.device_put(jax.device_get(params), jax.local_devices()[0])
    model = LanguageModel(config.model, local, dataset.tokenizer(), models.Context(), dataset.seq_len)
    sampling = Sampling(temperature=0.7, top_k=40, seed=config.seed)
    written = Generator(model, sampling).write(prompt, max_tokens=min(tokens, config.model.max_seq - 8))
    return prompt, written.text
