"""AdamW (Loshchilov and Hutter, arXiv 1711.05101) from optax's parts, on float32 master weights.

    m <- b1 m + (1 - b1) g;   v <- b2 v + (1 - b2) g^2;   w <- w - rate(step) * (m^ / (sqrt(v^) + eps) + weight_decay
    * w)

The rate is read from the step of the train state, not from a counter of our own, so a skipped step does not shift the
schedule. m and v may be kept in bfloat16; the arithmetic is float32 either way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from halfbyte.later import later

from .config import OptimizerConfig

if TYPE_CHECKING:
    import optax
else:
    optax = later("optax")


def adamw(config: OptimizerConfig, decay_mask: Any) -> optax.GradientTransformation:
    """Direction of descent for a rate of 1: Adam, plus decay where `decay_mask` (a tree of bools, like the
    parameters) is true."""
    return optax.chain(
        scale_by_adam(config),
        optax.add_decayed_weights(config.weight_decay, mask=decay_mask),
    )


def scale_by_adam(config: OptimizerConfig) -> optax.GradientTransformation:
    """Adam's direction, with its moments kept in the dtypes of `config`."""
    inner = optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps)

    def stored(state: optax.ScaleByAdamState) -> optax.ScaleByAdamState:
        return state._replace(mu=_cast(state.mu, config.mu_dtype), nu=_cast(state.nu, config.nu_dtype))

    def init(params: Any) -> optax.ScaleByAdamState:
        return stored(inner.init(params))

    def update(grads: Any, state: optax.ScaleByAdamState, params: Any = None) -> tuple[Any, optax.ScaleByAdamState]:
        wide = state._replace(mu=_cast(state.mu, "float32"), nu=_cast(state.nu, "float32"))
        with jax.numpy_dtype_promotion("standard"):  # optax mixes its int32 count with floats
            updates, wide = inner.update(grads, wide, params)
        return updates, stored(wide)

    return optax.GradientTransformation(init, update)


def _cast(tree: Any, dtype: str) -> Any:
    return jax.tree.map(lambda leaf: leaf.astype(dtype), tree)


def clip_by_norm(grads: Any, norm: jax.Array, limit: float) -> Any:
    """Gradients scaled so that their global norm, given as `norm`, is at most `limit`; unchanged when limit is 0."""
    if not limit:
        return grads
    factor = jnp.minimum(1.0, limit / jnp.maximum(norm, 1e-12))
    return jax.tree.map(lambda g: g * factor.astype(g.dtype), grads)


def global_norm(tree: Any) -> jax.Array:
    """Euclidean norm over all leaves, summed in float32."""
    squares = [jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(tree)]
    return jnp.sqrt(sum(squares, start=jnp.zeros((), jnp.float32)))


def apply(params: Any, updates: Any, rate: jax.Array) -> Any:
    """Master weights after one step: `params - rate * updates`, in the dtype of the parameters."""
    return jax.tree.map(lambda p, u: (p - rate * u).astype(p.dtype), params, updates)
