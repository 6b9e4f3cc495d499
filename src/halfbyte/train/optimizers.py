"""Optimizers on optax: AdamW, Muon, learning-rate schedules and clipping, on float32 master weights.

Schedules are functions of the step of the train state, float32, not of a counter of the optimizer: a skipped step does
not shift them. Each optimizer returns the direction of descent for a learning rate of 1; `apply_updates` scales it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp

from halfbyte.io.lazy_import import lazy_module

if TYPE_CHECKING:
    import optax
else:
    optax = lazy_module("optax")

STATE_DTYPES = ("float32", "bfloat16")
RMS = 0.2  # of an update, whatever the matrix's shape: section 2.2 of arXiv 2502.16982
Schedule = Callable[[jax.Array], jax.Array]


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW or Muon on float32 master weights, a learning-rate schedule, and a clip of the global gradient norm."""

    name: Literal["adamw", "muon"] = "adamw"
    """muon: matrices of linears by Muon, all else by AdamW, under one learning rate."""
    learning_rate: float = 3e-4
    """The peak, reached after warm-up."""
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """wsd: warm-up, stable, then a linear decay over the last `decay` part of the run."""
    warmup: float = 0.02
    """Steps if 1 or more, else a fraction of the run."""
    decay: float = 0.2
    """wsd only. Steps if 1 or more, else a fraction of the run."""
    final: float = 0.1
    """Learning rate at the last step, as a fraction of the peak."""
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    momentum: float = 0.95
    """Muon's, of a matrix; b1 and b2 are AdamW's."""
    weight_decay: float = 0.1
    """Decoupled; matrices only (norms are masked)."""
    clip: float = 1.0
    """Largest global gradient norm; 0 turns the clip off."""
    mu_dtype: Literal["float32", "bfloat16"] = "float32"
    nu_dtype: Literal["float32", "bfloat16"] = "float32"

    def __post_init__(self) -> None:
        ranges = {
            "name": (self.name in ("adamw", "muon"), "adamw or muon"),
            "learning_rate": (self.learning_rate > 0, "above 0"),
            "warmup": (self.warmup >= 0, "0 or more"),
            "decay": (self.decay > 0, "above 0"),
            "final": (0 <= self.final <= 1, "between 0 and 1"),
            "b1": (0 <= self.b1 < 1, "in [0, 1)"),
            "b2": (0 <= self.b2 < 1, "in [0, 1)"),
            "eps": (self.eps > 0, "above 0"),
            "momentum": (0 <= self.momentum < 1, "in [0, 1)"),
            "weight_decay": (self.weight_decay >= 0, "0 or more"),
            "clip": (self.clip >= 0, "0 (off) or more"),
            "schedule": (self.schedule in ("cosine", "wsd", "constant"), "cosine, wsd or constant"),
            "mu_dtype": (self.mu_dtype in STATE_DTYPES, "float32 or bfloat16"),
            "nu_dtype": (self.nu_dtype in STATE_DTYPES, "float32 or bfloat16"),
        }
        for name, (holds, condition) in ranges.items():
            value = getattr(self, name)
            if not holds or (isinstance(value, float) and not math.isfinite(value)):
                raise ValueError(f"optimizer.{name} must be {condition}, got {value!r}")


def adamw(config: OptimizerConfig, decay_mask: Any) -> optax.GradientTransformation:
    """Returns AdamW (Loshchilov and Hutter, arXiv 1711.05101) with decoupled weight decay where `decay_mask` is true.

    `decay_mask` is a tree of bools with the structure of the parameters.

        m <- b1 m + (1 - b1) g;   v <- b2 v + (1 - b2) g^2
        w <- w - rate(step) * (m^ / (sqrt(v^) + eps) + weight_decay * w)
    """
    return optax.chain(
        scale_by_adam(config),
        optax.add_decayed_weights(config.weight_decay, mask=decay_mask),
    )


def muon(config: OptimizerConfig, decay_mask: Any, *, matrices: Any) -> optax.GradientTransformation:
    """Returns Muon (arXiv 2502.16982, https://kellerjordan.github.io/posts/muon) for `matrices`, Adam for the others.

    `matrices` and `decay_mask` are trees of bools with the structure of the parameters. `matrices` is true for the
    matrices of linears, `decay_mask` for the parameters with weight decay.

        m <- b m + (1 - b) g;   O = newton_schulz(Nesterov's m)
        w <- w - rate(step) * (0.2 sqrt(max(in, out)) O + weight_decay * w)

    O has singular values near 1, so its elements have a root mean square of 1 / sqrt(max(in, out)). Times 0.2
    sqrt(max(in, out)) it has the usual length of AdamW's update: one learning rate and one weight decay serve both.
    Each layer's matrix of a stack, and each expert's, is orthogonalized separately.
    """
    labels = jax.tree.map(lambda is_matrix: "muon" if is_matrix else "adam", matrices)
    return optax.chain(
        optax.partition({"muon": _scale_by_muon(config), "adam": scale_by_adam(config)}, labels),
        optax.add_decayed_weights(config.weight_decay, mask=decay_mask),
    )


def scale_by_adam(config: OptimizerConfig) -> optax.GradientTransformation:
    """Returns the transformation to Adam's direction: moments in the dtypes of `config`, arithmetic in float32."""
    inner = optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps)

    def to_state_dtypes(state: optax.ScaleByAdamState) -> optax.ScaleByAdamState:
        return state._replace(mu=_cast(state.mu, config.mu_dtype), nu=_cast(state.nu, config.nu_dtype))

    def init(params: Any) -> optax.ScaleByAdamState:
        return to_state_dtypes(inner.init(params))

    def update(grads: Any, state: optax.ScaleByAdamState, params: Any = None) -> tuple[Any, optax.ScaleByAdamState]:
        f32_state = state._replace(mu=_cast(state.mu, "float32"), nu=_cast(state.nu, "float32"))
        with jax.numpy_dtype_promotion("standard"):  # optax mixes its int32 count with floats
            updates, f32_state = inner.update(grads, f32_state, params)
        return updates, to_state_dtypes(f32_state)

    return optax.GradientTransformation(init, update)


def learning_rate_schedule(config: OptimizerConfig, steps: int) -> Schedule:
    """Returns the schedule: step 0, 1, ... -> float32 rate.

    Warm-up rises linearly to the peak. The last step has `final` times the peak, except under "constant".
    """
    warmup = check_warmup(config, steps)
    body = _body(config, steps - warmup)
    rise = optax.linear_schedule(config.learning_rate / max(1, warmup), config.learning_rate, max(1, warmup - 1))
    joined = optax.join_schedules([rise, body], [warmup]) if warmup else body

    def rate(step: jax.Array) -> jax.Array:
        with jax.numpy_dtype_promotion("standard"):  # optax mixes the int32 step with floats
            return jnp.maximum(jnp.asarray(joined(step), jnp.float32), 0.0)  # a linear decay may round below 0

    return rate


def check_warmup(config: OptimizerConfig, steps: int) -> int:
    """Returns the steps of warm-up; raises ValueError if the run is shorter."""
    warmup = resolve_steps(config.warmup, steps)
    if warmup > steps:
        raise ValueError(
            f"optimizer.warmup of {warmup} steps is longer than the run of {steps} steps; lower it or raise --steps"
        )
    return warmup


def resolve_steps(value: float, steps: int) -> int:
    """Returns the steps of a length: a number of steps (1 or more) or a fraction of the run."""
    return round(value) if value >= 1 else round(value * steps)


def clip_by_norm(grads: Any, norm: jax.Array, limit: float) -> Any:
    """Scales gradients to a global norm of at most `limit`; `norm` is their norm. A limit of 0 changes nothing."""
    if not limit:
        return grads
    factor = jnp.minimum(1.0, limit / jnp.maximum(norm, 1e-12))
    return jax.tree.map(lambda g: g * factor.astype(g.dtype), grads)


def global_norm(tree: Any) -> jax.Array:
    """Returns the Euclidean norm over all leaves, summed in float32."""
    squares = [jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(tree)]
    return jnp.sqrt(sum(squares, start=jnp.zeros((), jnp.float32)))


def apply_updates(params: Any, updates: Any, rate: jax.Array) -> Any:
    """Returns the master weights after one step: `params - rate * updates`, in the dtype of the parameters."""
    return jax.tree.map(lambda p, u: (p - rate * u).astype(p.dtype), params, updates)


def _scale_by_muon(config: OptimizerConfig) -> optax.GradientTransformation:
    matrix = optax.contrib.MuonDimensionNumbers(-2, -1)  # the last two dims; those before count matrices
    inner = optax.contrib.scale_by_muon(
        beta=config.momentum, eps=config.eps, mu_dtype=config.mu_dtype,
        weight_dimension_numbers=lambda updates: jax.tree.map(lambda _: matrix, updates),
    )  # fmt: skip

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        with jax.numpy_dtype_promotion("standard"):  # optax mixes its int32 count with floats
            updates, state = inner.update(grads, state, params)
        return jax.tree.map(lambda u: u * (RMS * math.sqrt(max(u.shape[-2:]))), updates), state

    return optax.GradientTransformation(inner.init, update)


def _body(config: OptimizerConfig, steps: int) -> optax.Schedule:
    peak, last = config.learning_rate, max(1, steps - 1)
    if config.schedule == "constant":
        return optax.constant_schedule(peak)
    if config.schedule == "cosine":
        return optax.cosine_decay_schedule(peak, last, alpha=config.final)
    decay = min(resolve_steps(config.decay, steps), last)
    return optax.linear_schedule(peak, peak * config.final, decay, transition_begin=last - decay)


def _cast(tree: Any, dtype: str) -> Any:
    return jax.tree.map(lambda leaf: leaf.astype(dtype), tree)
