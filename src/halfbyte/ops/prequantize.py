"""Quantizes stacked weights before the layer loop, so that an iteration starts with the all-gather of codes.

If a weight is all-gathered, its codes are sent. Inside the loop the chain from the master weight to gathered codes
(amax, its all-reduce, quantization, all-gather) takes as long as the attention that it should overlap with, and the
backward pass repeats a part of it. Codes of all layers are small compared with the other memory of a step (4.25 bits
per element of this device's shard under NVFP4). The passes and the bits are those that each iteration would compute.
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
    """One linear of the layers in the loop: recipe, backend and sharding."""

    recipe: Recipe
    backend: str
    placement: Placement

    def should_prequantize(self, ndim: int) -> bool:
        """Returns True if the weight is all-gathered as codes that the loop does not change, for x of `ndim` dims.

        The codes draw no random bits, and their scale is the weight's own: neither shared nor from an amax history.
        """
        policies = [getattr(self.recipe, role) for role in WEIGHT_ROLES]
        deterministic = all(policy.format.quantized and not policy.stochastic for policy in policies)
        own_scale = not self.recipe.shared_scales and not self.recipe.amax_history_len
        return deterministic and own_scale and bool(axes_in(self.placement.shards(ndim).weight_storage_axes))


def prequantize_stacked_weights(
    stacks: Mapping[str, jax.Array], x: jax.ShapeDtypeStruct, sites: Mapping[str, LoopLinear]
) -> dict[str, QWeight]:
    """Quantizes stacked weights [layers, inputs, outputs] to stacked QWeights, each by the passes of its linear.

    x [tokens..., features] is the input of a layer. Passes with `batches_weights` quantize all layers in one launch: a
    loop would copy each weight out of its stack and its codes into theirs. Others quantize layer by layer.
    """
    mesh = next(iter(sites.values())).placement.mesh
    in_specs = {name: PartitionSpec(None, *sites[name].placement.w) for name in stacks}

    def local(parts: dict[str, jax.Array]) -> dict[str, QWeight]:
        plans = {name: _plan(w[0], x, sites[name]) for name, w in parts.items()}

        def layer(weights: dict[str, jax.Array]) -> dict[str, QWeight]:
            return {name: _codes(w, plans[name]) for name, w in weights.items()}

        batched = {name: w for name, w in parts.items() if plans[name].choice.weight_quantize_passes.batches_weights}
        looped = {name: w for name, w in parts.items() if name not in batched}
        return (jax.vmap(layer)(batched) if batched else {}) | (lax.map(layer, looped) if looped else {})

    def on_mesh(out_specs: object) -> dict[str, QWeight]:
        stacked: dict[str, QWeight] = shard_map_over(local, mesh, (in_specs,), out_specs)(
            lax.stop_gradient(dict(stacks))
        )
        return stacked

    shapes = jax.eval_shape(lambda: on_mesh(PartitionSpec()))
    specs = {name: weight_specs(qweight, sites[name].placement.w, lead=1) for name, qweight in shapes.items()}
    return {name: dataclasses.replace(qweight, master=stacks[name]) for name, qweight in on_mesh(specs).items()}


def _plan(w: jax.Array, x: jax.ShapeDtypeStruct, site: LoopLinear) -> LinearPlan:
    """Returns the plan of a linear; w is this device's shard of one layer's weight."""
    shards = site.placement.shards(x.ndim)
    tokens = tuple(n // num_shards(axes) for n, axes in zip(x.shape, shards.token_axes, strict=False))
    x_shape = jax.ShapeDtypeStruct((*tokens, w.shape[0]), x.dtype)
    return plan_linear(x_shape, w, site.recipe, ExecutionConfig(site.backend), shards)


def _codes(w: jax.Array, plan: LinearPlan) -> QWeight:
    """Returns the codes of one layer's weight, without the master."""
    passes = plan.choice.weight_quantize_passes
    qweight = quantize_weight_shard(
        w, plan.recipe, None, cut=plan.sharding.w, passes=passes, packed=plan.problem.gathered
    )
    return dataclasses.replace(qweight, master=None)
