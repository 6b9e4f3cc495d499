"""Where numbers stopped being numbers: a bad step is computed again, and the batch, the weights, the forward pass layer
by layer and the gradients of every site are looked at, in that order. The first that is not finite is named.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from halfbyte import models
from halfbyte.checkpoint import named_leaves
from halfbyte.optim import global_norm
from halfbyte.recipe import Resolved, step_key

from .config import TrainConfig
from .step import Batch, gradients, make_context


def locate(config: TrainConfig, resolved: Resolved, mesh: Mesh, params: Any, batch: Batch, *, step: jax.Array) -> str:
    """One sentence: the first place where a value is not finite. `params` are the weights now, which a skipped step has
    left as they were."""
    found = _in_batch(config, batch) or _in_tree(params, "weight") or _in_forward(config, mesh, params, batch)
    if found:
        return found
    key = step_key(config.rounding_seed, step)
    grads, sums = jax.jit(
        lambda params, batch: gradients(config, resolved, mesh, params, batch, key=key, scale=jnp.float32(1.0))
    )(params, batch)
    found = _in_tree(grads, "gradient") or _too_large(grads)
    if found is None and not np.isfinite(float(sums["nll_sum"])):
        found = "the loss under the recipe, while the same forward pass in plain precision is finite"
    return found or "nowhere when the step is computed again: a passing fault of the device, or of the weights before"


def _in_batch(config: TrainConfig, batch: Batch) -> str | None:
    for name, least in (("tokens", 0), ("targets", -1)):
        low, high = int(jnp.min(batch[name])), int(jnp.max(batch[name]))
        if low < least or high >= config.model.vocab_size:
            return f"the batch: {name} from {low} to {high}, outside the vocabulary of {config.model.vocab_size}"
    return None


@jax.jit
def _counts(tree: Any) -> Any:
    """How many values are not finite, by layer (the first dim)."""
    return jax.tree.map(lambda x: jnp.sum(~jnp.isfinite(x).reshape(x.shape[0], -1), axis=1, dtype=jnp.int32), tree)


def _in_tree(tree: Any, what: str) -> str | None:
    """The first site, in the order of the model, and the layers of it that are not finite."""
    for path, counts in named_leaves(jax.device_get(_counts(tree))).items():
        bad = np.flatnonzero(counts)
        if len(bad):
            where = f", layer {_span(bad)}" if path.startswith("layers/") else ""
            return f"the {what} of {path}{where}: {int(counts.sum())} values are not finite"
    return None


def _too_large(grads: Any) -> str | None:
    """The site and layer of the largest gradient, where each is finite and the norm of all of them is not."""
    if np.isfinite(float(jax.jit(global_norm)(grads))):
        return None
    sizes = jax.jit(lambda tree: jax.tree.map(lambda x: jnp.max(jnp.abs(x).reshape(x.shape[0], -1), axis=1), tree))
    largest = named_leaves(jax.device_get(sizes(grads)))
    path = max(largest, key=lambda name: float(np.max(largest[name])))
    where = f", layer {int(np.argmax(largest[path]))}" if path.startswith("layers/") else ""
    return f"the norm of the gradients: that of {path}{where} reaches {float(np.max(largest[path])):.1e}"


def _span(layers: np.ndarray) -> str:
    first, last = int(layers[0]), int(layers[-1])
    return str(first) if first == last else f"{first} to {last}"


def _in_forward(config: TrainConfig, mesh: Mesh, params: Any, batch: Batch) -> str | None:
    """The first layer after which the loss is not finite, by halving, in plain precision."""
    layers = config.model.layers
    if _forward_is_finite(config, mesh, params, batch, layers):
        return None
    good, bad = 0, layers
    while bad - good > 1:
        middle = (good + bad) // 2
        if _forward_is_finite(config, mesh, params, batch, middle):
            good = middle
        else:
            bad = middle
    return f"the forward pass of layer {bad - 1}: its output is not finite, its input is"


def _forward_is_finite(config: TrainConfig, mesh: Mesh, params: Any, batch: Batch, layers: int) -> bool:
    model = dataclasses.replace(config.model, layers=layers)
    short = {**params, "layers": jax.tree.map(lambda leaf: leaf[:layers], params["layers"])}
    context = make_context(dataclasses.replace(config, model=model), None, mesh, None)
    total, _ = jax.jit(lambda params, batch: models.loss_sum(model, params, batch, context))(short, batch)
    return bool(np.isfinite(float(total)))
