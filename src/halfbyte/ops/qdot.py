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

from halfbyte.ops.backends import BACKENDS, check_training, choose, problem_of
from halfbyte.ops.backends.gemm import dgrad_axes, fprop_axes, wgrad_axes
from halfbyte.ops.operand import Operand, keep_named
from halfbyte.ops.passes import ask
from halfbyte.ops.weight import QWeight, check_kept, keep_weight, quantize_weight, remake_weight, weight_operand
from halfbyte.recipe import Recipe
from halfbyte.sharding import WeightSharding


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is settled before tracing."""

    backend: str
    recipe: Recipe
    sharding: WeightSharding | None
    weight_dtype: jnp.dtype
    out_dtype: jnp.dtype
    weights_kept: str


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
    sharding = w.sharding if isinstance(w, QWeight) else weight_sharding
    _check(x, w, recipe)
    tokens = token_view(x, recipe)
    chosen = choose(backend, problem_of(recipe, tokens, w, sharding))
    weight = w
    if not isinstance(weight, QWeight):
        weight = quantize_weight(weight, recipe=recipe, key=key, weight_sharding=sharding, passes=chosen.passes)
    plan = Plan(chosen.name, recipe, sharding, weight.anchor.dtype, jnp.dtype(out_dtype or x.dtype), weights_kept)
    y = _linear(plan, tokens, weight.anchor, (weight.fprop, weight.dgrad), key).reshape(*x.shape[:-1], w.shape[1])
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


def token_view(x: jax.Array, recipe: Recipe) -> jax.Array:
    """x as [tokens..., inputs] such that blocks of tokens lie along the next to last axis: unchanged if they fit there,
    else with all leading dims made one.
    """
    if x.ndim == 1:
        return x[None]
    block = token_block(recipe)
    return x if x.shape[-2] % block == 0 else x.reshape(-1, x.shape[-1])


def token_block(recipe: Recipe) -> int:
    """How many tokens wgrad's operands block together."""
    policies = (recipe.wgrad_x, recipe.wgrad_dy)
    return max(max(16 if p.hadamard else 1, p.format.block or 1) for p in policies)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _linear(plan: Plan, x, anchor, codes, key):
    (row,) = BACKENDS[plan.backend].passes.quantize(x, [ask(plan.recipe, "fprop_x", key)])
    return _fprop(plan, row, x, anchor, codes)


def _fprop(plan: Plan, left: Operand, like: jax.Array, anchor, codes) -> jax.Array:
    right = weight_operand(QWeight(anchor, codes[0], codes[1], plan.recipe, plan.sharding), "fprop_w")
    return BACKENDS[plan.backend].gemm(left, right, fprop_axes(like), plan.out_dtype)


def _linear_fwd(plan: Plan, x, anchor, codes, key):
    recipe, backend = plan.recipe, BACKENDS[plan.backend]
    check_training(plan.backend, recipe, x, anchor, plan.sharding)
    row, column = backend.passes.quantize(x, [ask(recipe, "fprop_x", key), ask(recipe, "wgrad_x", key, kept=True)])
    kept = keep_named(column)
    weight = QWeight(anchor, codes[0], codes[1], recipe, plan.sharding)
    masters = not recipe.dgrad_w.format.quantized
    stays = keep_weight(weight, backend.passes, kept=plan.weights_kept, masters=masters)
    return _fprop(plan, row, x, anchor, codes), (kept, stays, key, jnp.zeros((0,), x.dtype))


def _linear_bwd(plan: Plan, residuals, dy):
    kept, stays, key, like_x = residuals
    recipe, backend = plan.recipe, BACKENDS[plan.backend]
    weight = weight_operand(remake_weight(stays, backend.passes, after=dy), "dgrad_w")
    row, column = backend.passes.quantize(dy, [ask(recipe, "dgrad_dy", key), ask(recipe, "wgrad_dy", key)])
    dx = backend.gemm(row, weight, dgrad_axes(dy), like_x.dtype)
    dw = backend.gemm(backend.passes.load(kept, recipe.wgrad_x), column, wgrad_axes(dy), plan.weight_dtype)
    if plan.sharding is not None:
        dw = lax.with_sharding_constraint(dw, plan.sharding.stored)
    return dx, dw, None, None


_linear.defvjp(_linear_fwd, _linear_bwd)
