"""qdot: y = x W with its three GEMMs quantized, in anyone's model.

    fprop  y  = Q(x)  Q(W)          contracts the inputs
    dgrad  dx = Q(dy) Q(W)^T        contracts the outputs
    wgrad  dw = Q(x)^T Q(dy)        contracts the tokens

Each Q is an operand policy of the recipe, with its own tensor scale and its own random bits. The rounding has no
gradient of its own: it passes straight through. What the backward pass keeps of x is wgrad's operand, packed: 4.5 bits
a number under NVFP4; and of W its codes.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding

from halfbyte.ops.linear import Linear, LinearPlan, plan_linear, quantized, token_block, token_view
from halfbyte.ops.surroundings import anywhere
from halfbyte.ops.weight import QWeight, check_kept
from halfbyte.recipe import Recipe
from halfbyte.sharding import WeightSharding


@dataclasses.dataclass(frozen=True)
class Plan:
    """The linear's plan, and the dtype of y."""

    linear: LinearPlan
    out_dtype: jnp.dtype


@anywhere
def qdot(
    x: jax.Array, w: jax.Array | QWeight, *, recipe: Recipe, key: jax.Array | None = None, backend: str = "auto",
    weight_sharding: WeightSharding | None = None, out_sharding: NamedSharding | None = None,
    out_dtype: jnp.dtype | None = None, weights_kept: str = "master",
) -> jax.Array:  # fmt: skip
    """x [..., inputs] times w [inputs, outputs], in x's dtype; every GEMM, forward and backward, as the recipe says.

    float32 sums, the tensor scales applied to them, one rounding to the result's dtype. The weight gradient has w's
    dtype. `key` is a typed key, folded by the caller with step, layer and site; it is needed where the recipe rounds
    stochastically. `w` may be a `QWeight`; `weights_kept` as for `mlp`. NaN or infinity in an operand makes the whole
    result NaN.
    """
    check_kept(weights_kept)
    _check(x, w, recipe)
    tokens = token_view(x, token_block(recipe))
    linear = plan_linear(tokens, w, recipe, backend=backend, sharding=weight_sharding, weights_kept=weights_kept)
    weight = quantized(linear, w, key)
    plan = Plan(linear, jnp.dtype(out_dtype or x.dtype))
    y = _qdot(plan, tokens, weight.anchor, (weight.fprop, weight.dgrad), key)
    y = y.reshape(*x.shape[:-1], w.shape[1])  # [tokens..., outputs] -> [..., outputs]
    return y if out_sharding is None else lax.with_sharding_constraint(y, out_sharding)


def _check(x: jax.Array, weight: jax.Array | QWeight, recipe: Recipe) -> None:
    if x.dtype not in (jnp.bfloat16, jnp.float32):
        raise TypeError(f"qdot takes bfloat16 or float32, got x of {x.dtype}; convert with astype first")
    if len(weight.shape) != 2 or x.ndim == 0 or x.shape[-1] != weight.shape[0]:
        raise ValueError(f"qdot contracts the last axis of x with the first of w, got x {x.shape} and w {weight.shape}")
    if isinstance(weight, QWeight) and weight.recipe != recipe:
        raise ValueError(
            f"this QWeight was made under recipe {weight.recipe.name}, qdot was asked for {recipe.name}; "
            f"quantize the weight again"
        )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _qdot(plan: Plan, x, anchor, codes, key):
    linear = Linear.of(plan.linear, anchor, codes, key)
    (row,) = linear.quantize(x, "fprop_x")
    return linear.fprop(row, plan.out_dtype)


def _qdot_fwd(plan: Plan, x, anchor, codes, key):
    linear = Linear.of(plan.linear, anchor, codes, key)
    weight = linear.keep()
    row, column = linear.quantize(x, "fprop_x", "wgrad_x", kept=("wgrad_x",))
    return linear.fprop(row, plan.out_dtype), (column, weight, key, jnp.zeros((0,), x.dtype))


def _qdot_bwd(plan: Plan, residuals, dy):
    column, weight, key, like_x = residuals
    linear = Linear.restore(plan.linear, weight, key, after=dy)
    dy_row, dy_column = linear.quantize(dy, "dgrad_dy", "wgrad_dy")
    dx = linear.dgrad(dy_row, like_x.dtype)
    return dx, linear.wgrad(linear.load(column, "wgrad_x"), dy_column), None, None


_qdot.defvjp(_qdot_fwd, _qdot_bwd)
