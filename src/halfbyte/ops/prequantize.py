"""Weights of layers in a loop, quantized before the loop begins.

Where a weight is gathered, its codes travel, and they can only be sent once they are there: inside the loop the way
from the master weight to gathered codes (a maximum, its all-reduce, the codes, the gather) is as long as the attention
that it should hide behind, and the backward pass walks a part of it again. Codes of all layers are small beside what
else a step keeps (4.25 bits a number of this device's part under NVFP4), and with them a turn of the loop begins with
the gathers. The passes and the bits are those that each turn would have made.
"""

import dataclasses
from collections.abc import Mapping

import jax
from jax import lax
from jax.sharding import PartitionSpec

from halfbyte.distributed import shard_map_over
from halfbyte.ops.linear import quantize_weight_shard
from halfbyte.ops.linear_plan import ExecutionConfig, LinearPlan, plan_linear
from halfbyte.ops.linear_sharding import Placement, axes_in, num_shards
from halfbyte.ops.quantized_weight import QWeight, weight_specs
from halfbyte.recipes import WEIGHT_ROLES, Recipe


@dataclasses.dataclass(frozen=True)
class LoopLinear:
    """One linear of the loop's layers: its recipe, who serves it, and how it lies on the mesh."""

    recipe: Recipe
    backend: str
    placement: Placement

    def should_prequantize(self, ndim: int) -> bool:
        """Whether the weight is gathered, before x of `ndim` dims meets it, as codes that its layer's turn has nothing
        to add to: no random bits, and a scale of its own.
        """
        policies = [getattr(self.recipe, role) for role in WEIGHT_ROLES]
        codes = all(policy.format.quantized and not policy.stochastic for policy in policies)
        own = not self.recipe.shared_scales and not self.recipe.amax_history_len
        return codes and own and bool(axes_in(self.placement.shards(ndim).weight_storage_axes))


def prequantize_stacked_weights(
    stacks: Mapping[str, jax.Array], x: jax.ShapeDtypeStruct, sites: Mapping[str, LoopLinear]
) -> dict[str, QWeight]:
    """Stacked weights [layers, inputs, outputs] -> stacked QWeights, each by the passes of its linear; x [tokens...,
    features] is what a layer reads. Kernels that read all layers' weights where they lie do so at once: a loop would
    copy each out of its stack, and its codes into theirs. The others take one layer after another.
    """
    mesh = next(iter(sites.values())).placement.mesh
    given = {name: PartitionSpec(None, *sites[name].placement.w) for name in stacks}

    def local(parts: dict[str, jax.Array]) -> dict[str, QWeight]:
        plans = {name: _plan(w[0], x, sites[name]) for name, w in parts.items()}

        def layer(weights: dict[str, jax.Array]) -> dict[str, QWeight]:
            return {name: _codes(w, plans[name]) for name, w in weights.items()}

        at_once = {name: w for name, w in parts.items() if plans[name].choice.weight_quantize_passes.batches_weights}
        rest = {name: w for name, w in parts.items() if name not in at_once}
        return (jax.vmap(layer)(at_once) if at_once else {}) | (lax.map(layer, rest) if rest else {})

    def on_mesh(out_specs: object) -> dict[str, QWeight]:
        made: dict[str, QWeight] = shard_map_over(local, mesh, (given,), out_specs)(lax.stop_gradient(dict(stacks)))
        return made

    shapes = jax.eval_shape(lambda: on_mesh(PartitionSpec()))
    specs = {name: weight_specs(made, sites[name].placement.w, lead=1) for name, made in shapes.items()}
    return {name: dataclasses.replace(made, master=stacks[name]) for name, made in on_mesh(specs).items()}


def _plan(w: jax.Array, x: jax.ShapeDtypeStruct, site: LoopLinear) -> LinearPlan:
    """The linear of which w is this device's part of one layer's weight."""
    shards = site.placement.shards(x.ndim)
    tokens = tuple(n // num_shards(axes) for n, axes in zip(x.shape, shards.token_axes, strict=False))
    inside = jax.ShapeDtypeStruct((*tokens, w.shape[0]), x.dtype)
    return plan_linear(inside, w, site.recipe, ExecutionConfig(site.backend), shards)


def _codes(w: jax.Array, plan: LinearPlan) -> QWeight:
    """The codes alone of one layer's weight."""
    passes = plan.choice.weight_quantize_passes
    made = quantize_weight_shard(w, plan.recipe, None, cut=plan.sharding.w, passes=passes, packed=plan.problem.gathered)
    return dataclasses.replace(made, master=None)
