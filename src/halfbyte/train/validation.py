"""Validation loss, source by source: mean negative log-likelihood over every scored token, in nats."""

from collections.abc import Callable
from typing import Any

import numpy as np
from jax.sharding import Mesh

from .source import Source, batches


def validate(source: Source, mesh: Mesh, evaluate: Callable[[Any], Any]) -> dict[str, float]:
    """Loss by source name, and `all`: the mean over the tokens of all sources. Empty where the data set has no
    validation rows."""
    results, nll_total, tokens_total = {}, 0.0, 0.0
    for name, start in source.validation(mesh).items():
        loader = start()
        sums = [evaluate(batch) for batch in batches(loader, mesh, batch=source.config.batch)]
        loader.close()
        nll, tokens = (float(sum(np.asarray(part[i], np.float64) for part in sums)) for i in (0, 1))
        results[name] = nll / max(tokens, 1.0)
        nll_total, tokens_total = nll_total + nll, tokens_total + tokens
    return {**results, "all": nll_total / max(tokens_total, 1.0)} if results else {}
