"""State of dynamic scaling: the amax history of delayed scaling (FP8), and the loss scale of float16.

Neither holds a scale per tensor: a quantization pass computes its scale from the amax that the history predicts.
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from halfbyte.models import linear_sites
from halfbyte.train.precision_phases import phases
from halfbyte.train.train_config import LARGEST_SCALE, SMALLEST_SCALE, LossScaleConfig, TrainConfig

AmaxHistory = dict[str, jax.Array]
STATE_ITEM = "delayed"  # in checkpoints
LossScaleState = dict[str, jax.Array]


def amax_history_len(config: TrainConfig) -> int:
    """Returns the length of the amax history of the run's recipes, in any phase; 0 if none has one."""
    resolved = [phase.resolved(config) for phase in phases(config)]
    recipes = (recipe for policy in resolved for segment in policy.segments for recipe in segment.recipes.values())
    lengths = sorted({recipe.amax_history_len for recipe in recipes} - {0})
    if len(lengths) > 1:
        raise ValueError(f"a run keeps one length of history, got recipes with {lengths}; give them all the same")
    return lengths[0] if lengths else 0


def initial_amax_history(config: TrainConfig) -> AmaxHistory | None:
    """Returns the state of delayed scaling at step 0: `amaxes` A float32 [layers, linears, 3], by x, W and dy, and
    `history` [n, ...], the newest last; None without a recipe that has a history.

    Under a recipe with a history of n steps, step t scales a tensor by what the steps before have seen:

        A_t = max(a_(t-1), ..., a_(t-n)),  S_t = fp8_max / A_t

    A step's a is the amax of the whole tensor, over all devices and microbatches. If the maximum is 0 or not finite, A
    does not change; its initial value is 0, for which S is 1. A skipped step changes nothing. This is the rule of
    Transformer Engine's update kernel (common/recipe/delayed_scaling.cu, with margin 0 and the algorithm `max`).

    a is only known while a pass runs, that of dy in the backward pass: it is returned as the cotangent of A
    (`ops.quantized_weight.DelayedScalingWeight`).
    """
    steps, shape = amax_history_len(config), (config.model.layers, len(linear_sites(config.model)), 3)
    if not steps:
        return None
    return {"amaxes": jnp.zeros(shape, jnp.float32), "history": jnp.zeros((steps, *shape), jnp.float32)}


def update_amax_history(delayed: AmaxHistory | None, seen: jax.Array | None) -> AmaxHistory | None:
    """Returns the history after a step with the amaxes `seen`; they are 0 for linears that were not quantized."""
    if delayed is None or seen is None:
        return delayed
    history = jnp.concatenate([delayed["history"][1:], seen[None]])
    amax = jnp.max(history, axis=0)
    amaxes = jnp.where(jnp.isfinite(amax) & (amax > 0), amax, delayed["amaxes"])
    return {"amaxes": amaxes, "history": history}


def history_template_of_checkpoint(leaves: Mapping[str, Mapping[str, Any]], where: NamedSharding) -> Any:
    """Returns the shapes of the amax history in a checkpoint with these leaves; None if it has none."""
    saved = {
        name.removeprefix(f"{STATE_ITEM}/"): leaf for name, leaf in leaves.items() if name.startswith(f"{STATE_ITEM}/")
    }
    shaped = {n: jax.ShapeDtypeStruct(tuple(leaf["shape"]), leaf["dtype"], sharding=where) for n, leaf in saved.items()}
    return shaped or None


def adapt_history(config: TrainConfig, stored: AmaxHistory | None, where: NamedSharding) -> AmaxHistory | None:
    """Returns the history of a run whose config may have changed since it `stored` one: the same if its shapes match,
    else None, or the initial one.
    """
    initial = functools.partial(initial_amax_history, config)
    expected = jax.eval_shape(initial)
    if expected is None:
        return None
    shapes = {name: leaf.shape for name, leaf in (stored or {}).items()}
    is_same = shapes == {name: leaf.shape for name, leaf in expected.items()}
    return stored if is_same else jax.jit(initial, out_shardings=where)()


def update_loss_scale(config: LossScaleConfig, scaler: LossScaleState, finite: jax.Array) -> LossScaleState:
    """Returns the loss scale after a step whose gradients were all finite, or not. An overflow skips the step and
    halves the scale; `growth_interval` good steps double it.

    Multiplying a tensor by 2^k multiplies its amax by 2^k, hence divides NVFP4's tensor scale by 2^k, and leaves block
    scales and 4-bit codes unchanged: the scale protects bf16 and fp8 gradients from underflow without touching the
    4-bit ones.
    """
    skipped = scaler["skipped"] + jnp.where(finite, 0, 1).astype(jnp.int32)
    if config.mode == "off":
        return {**scaler, "skipped": skipped}
    good = scaler["good_steps"] + 1
    grow = finite & (good >= config.growth_interval)
    factor = jnp.where(finite, jnp.where(grow, 2.0, 1.0), 0.5).astype(jnp.float32)
    scale = jnp.clip(scaler["scale"] * factor, SMALLEST_SCALE, LARGEST_SCALE)
    return {"scale": scale, "good_steps": jnp.where(finite & ~grow, good, 0).astype(jnp.int32), "skipped": skipped}
