"""The linears of a layer, through `ops.qdot` and `ops.mlp`.

Under `compute_dtype=float32` a linear that the policy leaves alone is a plain float32 product: the bf16 recipe would
round its operands, and that mode exists to compare the model with another implementation to the last digits.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from halfbyte import ops
from halfbyte.models.context import LayerContext
from halfbyte.models.params import Params
from halfbyte.models.remat import named
from halfbyte.recipe import Recipe
from halfbyte.sharding import WeightSharding

MLP_SITES = ("gate", "up", "down")


def linear(x: jax.Array, weights: Params, here: LayerContext, group: str, name: str) -> jax.Array:
    """x [..., inputs] times weight `name` of `group` ("attention" or "mlp"), in x's dtype."""
    if here.tap is not None:
        return here.tap(x, weights[name], f"{group}/{name}")
    recipe, sharding = here.recipe(group, name), here.weight_sharding(group, name)
    if is_exact(x, recipe):
        return named(exact_dot(x, weights[name], sharding))
    key = here.site_key(f"{group}/{name}")
    return named(
        ops.qdot(
            x,
            weights[name],
            recipe=recipe,
            key=key,
            backend=here.backend(recipe),
            weight_sharding=sharding,
            weights_kept=here.weights_kept,
        )
    )


def swiglu_mlp(x: jax.Array, weights: Params, here: LayerContext) -> jax.Array:
    """(silu(x gate) * (x up)) down, in x's dtype."""
    recipes = {name: here.recipe("mlp", name) for name in MLP_SITES}
    if here.tap is not None or all(is_exact(x, recipe) for recipe in recipes.values()):
        gate, up = (linear(x, weights, here, "mlp", name) for name in ("gate", "up"))
        return linear(jax.nn.silu(gate) * up, weights, here, "mlp", "down")
    shardings = {name: s for name in MLP_SITES if (s := here.weight_sharding("mlp", name)) is not None}
    return ops.mlp(
        x,
        *(weights[name] for name in MLP_SITES),
        recipe=recipes,
        key=here.site_key("mlp"),
        mode="input" if here.ctx.remat == "quantized" else "fast",
        backend=here.backend(*recipes.values()),
        weight_shardings=shardings or None,
        weights_kept=here.weights_kept,
    )


def is_exact(x: jax.Array, recipe: Recipe) -> bool:
    """Whether this product is plain float32."""
    return x.dtype == jnp.float32 and not recipe.quantized


def exact_dot(x: jax.Array, w: jax.Array, sharding: WeightSharding | None) -> jax.Array:
    """x w in float32, with w gathered as a quantized one would be."""
    if sharding is not None:
        w = lax.with_sharding_constraint(w, sharding.stored)  # and so is its gradient
        w = lax.with_sharding_constraint(w, sharding.gathered)
    return jnp.dot(x, w.astype(x.dtype))
