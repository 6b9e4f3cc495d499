"""Divergence guard: checks the metrics of each step, and finds the first value that is not finite.

A bad step is skipped, or it is a fault that needs a rollback. Faults are: loss or gradients that are not finite several
times in a row, weights that are not finite (no later step can fix them), weights that differ from those that the last
step wrote (a memory error), gradients that are zero several times in a row, and, if configured, a loss far above its
median.
"""

import dataclasses
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from halfbyte import models
from halfbyte.checkpoint import named_leaves
from halfbyte.recipes import ResolvedPolicy, step_key
from halfbyte.train.optimizers import global_norm
from halfbyte.train.train_config import TrainConfig
from halfbyte.train.train_step import Batch, gradients, make_model_context

MAX_CONSECUTIVE_OVERFLOWS = 25
"""Steps in a row that dynamic loss scaling may skip."""
WINDOW = 64
MIN_WINDOW = 16
"""Size of the window of losses for the median, and the losses needed before a spike is detected."""


class TrainingFault(Exception):
    """Raised if the run cannot continue after a step: a memory error in the weights (`in_memory`), or a divergence."""

    def __init__(self, step: int, reason: str, *, in_memory: bool = False):
        super().__init__(reason)
        self.step, self.reason, self.in_memory = step, reason, in_memory


@dataclass(frozen=True)
class Rollback:
    """One rollback, stored in checkpoints and in manifest.json.

    `recipe` is the recipe of the steps since then, "" for that of the run; `skipped` the number of skipped batches.
    """

    step: int
    at: int
    reason: str
    recipe: str
    skipped: int


@dataclass
class DivergenceGuard:
    """Checks the metrics of every step, in order."""

    config: TrainConfig
    skipped: float = 0.0
    consecutive_skips: int = 0
    steps_without_gradient: int = 0
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def check_step(self, step: int, values: Mapping[str, float]) -> str | None:
        """Returns None, or a sentence if the step was skipped and the run continues. Raises TrainingFault."""
        skipped_now = values["skipped"] > self.skipped
        self.skipped = values["skipped"]
        if values["weights_intact"] < 1:
            raise TrainingFault(
                step,
                f"step {step}: the weights are not those that the step before has written: memory has changed them",
                in_memory=True,
            )
        if values["weights_not_finite"]:
            count = int(values["weights_not_finite"])
            raise TrainingFault(step, f"step {step}: {count} weights are not finite, and no step can mend them")
        self.consecutive_skips = self.consecutive_skips + 1 if skipped_now else 0
        if skipped_now:
            return self._skip(step, values)
        self._check_zero_gradient(step, values)
        self._check_loss_spike(step, values["loss"])
        self.losses.append(values["loss"])
        return None

    def _skip(self, step: int, values: Mapping[str, float]) -> str:
        scaled = self.config.loss_scale.mode == "dynamic"
        allowed = max(MAX_CONSECUTIVE_OVERFLOWS if scaled else 0, self.config.guard.max_skipped_steps)
        what = f"loss {values['loss']:g}, gradient norm {values['grad_norm']:g}"
        if self.consecutive_skips > allowed:
            times = f", {self.consecutive_skips} steps in a row" if self.consecutive_skips > 1 else ""
            raise TrainingFault(step, f"step {step}: {what}{times}")
        then = "loss scale halved" if scaled else f"{self.consecutive_skips} of at most {allowed} in a row"
        return f"step {step}: {what}; STEP SKIPPED, weights unchanged ({then})"

    def _check_zero_gradient(self, step: int, values: Mapping[str, float]) -> None:
        self.steps_without_gradient = self.steps_without_gradient + 1 if values["grad_norm"] == 0 else 0
        if self.steps_without_gradient > self.config.guard.max_skipped_steps:
            raise TrainingFault(
                step,
                f"step {step}: loss {values['loss']:g}, and the gradient has been 0 for {self.steps_without_gradient} "
                "steps: nothing is learnt; a weight that is far too large does so, and so does data without a target",
            )

    def _check_loss_spike(self, step: int, loss: float) -> None:
        limit = self.config.guard.spike_threshold
        if not limit or len(self.losses) < MIN_WINDOW:
            return
        usual = statistics.median(self.losses)
        if loss > limit * usual:
            raise TrainingFault(
                step, f"step {step}: LOSS SPIKE, {loss:.4f} is {loss / usual:.1f} times the median {usual:.4f}"
            )

    def restart(self, skipped: float) -> None:
        """Resets the guard after a return to a checkpoint; `skipped` is the count of skipped steps in it."""
        self.skipped, self.consecutive_skips, self.steps_without_gradient = skipped, 0, 0
        self.losses.clear()


def find_first_nonfinite(
    config: TrainConfig, resolved: ResolvedPolicy, mesh: Mesh, params: Any, batch: Batch, *, step: jax.Array
) -> str:
    """Recomputes a bad step and returns, as one clause, where the first value is not finite.

    Looks at the batch, the weights, the forward pass layer by layer and the gradients of every site, in this order.
    `params` are the current weights, which a skipped step has not changed.
    """
    location = (
        _nonfinite_in_batch(config, batch)
        or _nonfinite_in_tree(params, "weight")
        or _nonfinite_in_forward(config, mesh, params, batch)
    )
    if location:
        return location
    key = step_key(config.rounding_seed, step)
    grads, sums = jax.jit(
        lambda params, batch: gradients(config, resolved, mesh, params, batch, key=key, scale=jnp.float32(1.0))
    )(params, batch)
    location = _nonfinite_in_tree(grads, "gradient") or _too_large(grads)
    if location is None and not np.isfinite(float(sums["nll_sum"])):
        location = "the loss under the recipe, while the same forward pass in plain precision is finite"
    return (
        location or "nowhere when the step is computed again: a passing fault of the device, or of the weights before"
    )


def _nonfinite_in_batch(config: TrainConfig, batch: Batch) -> str | None:
    for name, least in (("tokens", 0), ("targets", -1)):
        low, high = int(jnp.min(batch[name])), int(jnp.max(batch[name]))
        if low < least or high >= config.model.vocab_size:
            return f"the batch: {name} from {low} to {high}, outside the vocabulary of {config.model.vocab_size}"
    return None


@jax.jit
def _nonfinite_counts(tree: Any) -> Any:
    """Counts the values that are not finite, by layer (the first dim)."""
    return jax.tree.map(lambda x: jnp.sum(~jnp.isfinite(x).reshape(x.shape[0], -1), axis=1, dtype=jnp.int32), tree)


def _nonfinite_in_tree(tree: Any, what: str) -> str | None:
    """Names the first site, in the order of the model, and its layers that are not finite."""
    for path, counts in named_leaves(jax.device_get(_nonfinite_counts(tree))).items():
        bad = np.flatnonzero(counts)
        if len(bad):
            where = f", layer {_span(bad)}" if path.startswith("layers/") else ""
            return f"the {what} of {path}{where}: {int(counts.sum())} values are not finite"
    return None


def _too_large(grads: Any) -> str | None:
    """Names site and layer of the largest gradient if each is finite and their norm is not."""
    if np.isfinite(float(jax.jit(global_norm)(grads))):
        return None
    amaxes_of = jax.jit(lambda tree: jax.tree.map(lambda x: jnp.max(jnp.abs(x).reshape(x.shape[0], -1), axis=1), tree))
    amaxes = named_leaves(jax.device_get(amaxes_of(grads)))
    path = max(amaxes, key=lambda name: float(np.max(amaxes[name])))
    where = f", layer {int(np.argmax(amaxes[path]))}" if path.startswith("layers/") else ""
    return f"the norm of the gradients: that of {path}{where} reaches {float(np.max(amaxes[path])):.1e}"


def _span(layers: np.ndarray) -> str:
    first, last = int(layers[0]), int(layers[-1])
    return str(first) if first == last else f"{first} to {last}"


def _nonfinite_in_forward(config: TrainConfig, mesh: Mesh, params: Any, batch: Batch) -> str | None:
    """Names the first layer after which the loss is not finite, by bisection, without quantization."""
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
    context = make_model_context(dataclasses.replace(config, model=model), None, mesh, None)
    total, _ = jax.jit(lambda params, batch: models.loss_sum(model, params, batch, context))(short, batch)
    return bool(np.isfinite(float(total)))
