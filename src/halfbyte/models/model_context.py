"""Context of a forward pass and of one layer: precision policy, random keys, mesh, residual stacks, backend.

The keys of a model's linears are derived for all layers of a segment at once, before its first layer. One fold of a key
is a hundred scalar instructions, and mixing its words fifty more. Batched, an unrolled program of sixteen layers
compiles in less than half the time, and no layer folds a key or slices one out of a table: kernels index the table.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from halfbyte import ops
from halfbyte.distributed import DEFAULT_RULES, LogicalAxisRules, axis_size, manual_axes, with_logical_constraint
from halfbyte.formats import HashedKey
from halfbyte.kernels.mosaic_launch import StackSlice
from halfbyte.models.config import LlamaConfig
from halfbyte.models.param_spec import ParamSpec
from halfbyte.models.params import linear_sites
from halfbyte.ops.moe_dispatch import ExpertLoad
from halfbyte.recipes import (
    RANDOM_STREAMS,
    LayerSegment,
    LinearKey,
    Policy,
    Recipe,
    ResolvedPolicy,
    layer_key,
    site_keys,
    stream_key_words,
)

Axes = tuple[str | None, ...]


StreamWords = dict[str, jax.Array | dict[str, jax.Array]]
RESIDUAL_STREAM_AXES: Axes = ("batch", "residual_seq", "width")  # of the residual stream
REMAT_POLICIES = ("none", "dots", "full", "quantized")


EXPERT_PREFIX = "mlp/expert_"


@dataclasses.dataclass(frozen=True)
class ModelContext:
    """Configuration of a forward pass. Created inside the jitted step, because `key` belongs to the step.

    policy: recipes by segment of layers (None: everything in bf16).
    key: the step's key; needed only if a recipe rounds stochastically and gradients are taken.
    remat: which residuals are saved.
        `none`: all that the backward pass reads. `dots`: the outputs of GEMMs and of attention. `full`: each layer's
        input. `quantized`: the inputs of both norms, q, k, v and the output of fused attention; norms, operands, gate
        and up are rematerialized (and attention, if XLA computes it).
    compute_dtype: of activations. bfloat16, or float32 to compare with another implementation.
    loss_chunk: tokens per device whose logits are in memory at one time (None: about 1 GiB of logits).
    unroll: layers per scan iteration.
    reduce_dtype: dtype in which gradients of matrices are reduce-scattered over fsdp.
    stacked: save gate and up of scanned layers, and the inputs of their norms, in stacks that kernels read in place;
        for a pass whose gradient is taken.
    delayed_amaxes: float32 [layers, linears, 3], in the order of `linear_sites`: amaxes of earlier steps that scale the
        linears with an amax history. None: each tensor is scaled by its own amax.
    """

    policy: ResolvedPolicy | None = None
    key: jax.Array | None = None
    mesh: Mesh | None = None
    rules: LogicalAxisRules = DEFAULT_RULES
    backend: str = "auto"
    remat: str = "none"
    attention: str = "auto"
    compute_dtype: Any = jnp.bfloat16
    loss_chunk: int | None = None
    unroll: int = 1
    reduce_dtype: str = "float32"
    stacked: bool = False
    delayed_amaxes: jax.Array | None = None

    @property
    def is_scanned(self) -> bool:
        """True if each scan iteration runs one layer, so that passes of two layers are never in one computation."""
        return self.unroll == 1

    @property
    def uses_stacked_residuals(self) -> bool:
        """True if layers save their residuals in stacks (`ResidualStacks`)."""
        return self.stacked and uses_stacked_residuals(self.unroll, self.remat)

    @property
    def on_mesh(self) -> bool:
        """True if there is more than one device."""
        return self.mesh is not None and self.mesh.size > 1

    def __post_init__(self) -> None:
        if self.remat not in REMAT_POLICIES:
            raise ValueError(f"remat must be one of {', '.join(REMAT_POLICIES)}, got {self.remat!r}")
        if self.policy is not None and any(recipe.quantized for recipe in self.policy.non_layer_recipes.values()):
            paths = ", ".join(path for path, recipe in self.policy.non_layer_recipes.items() if recipe.quantized)
            raise ValueError(
                f"policy: {paths} would be quantized, but only linears inside layers can be; "
                "narrow the rule's pattern to layers/*"
            )

    def constrain(self, x: jax.Array, *axes: str | None) -> jax.Array:
        """Constrains x to the sharding of its dims' logical `axes`."""
        return with_logical_constraint(x, axes, self.mesh, self.rules)


DEFAULT_CONTEXT = ModelContext()  # bf16, one device


class LinearObserver(Protocol):
    """Observes inputs and outputs of a layer's linears; what it returns replaces them. A site is "group/name"."""

    def on_input(self, site: str, x: jax.Array) -> jax.Array:
        """Returns the x that the linear reads."""

    def on_output(self, site: str, y: jax.Array) -> jax.Array:
        """Returns the y that the linear returns."""


@dataclasses.dataclass
class ResidualStacks:
    """Residual stacks of scanned layers, [layers, ...] each: outputs of gate and up and, by group, inputs of norms.

    The MLP (`ops.mlp_with_stacked_residuals`) and the norms replace them by stacks in which slice `layer_index` is
    written. An op that has no stack here saves its own residuals.
    """

    gate_up: tuple[jax.Array, jax.Array] | None
    norms: dict[str, jax.Array]
    layer_index: jax.Array

    def norm_stack(self, group: str) -> StackSlice | None:
        """Returns the stack slice for the input of the norm of `group`, or None."""
        return StackSlice(self.norms[group], self.layer_index) if group in self.norms else None


@dataclasses.dataclass(frozen=True)
class StackedMasterWeights:
    """Stacked master weights by group and name, [layers, ...] each, and the slices that this layer was given."""

    stacks: dict[str, dict[str, Any]]
    layer_weights: dict[str, dict[str, Any]]
    layer_index: jax.Array

    def stack_slice(self, group: str, name: str, weight: Any) -> StackSlice | None:
        """Returns the stack slice of `weight`; None if it is not the master weight itself but derived from it."""
        is_master = isinstance(weight, jax.Array) and weight is self.layer_weights[group][name]
        return StackSlice(self.stacks[group][name], self.layer_index) if is_master else None


@dataclasses.dataclass(frozen=True)
class LayerContext:
    """Context of one layer of one segment: recipes by path, and the keys of its linears by site.

    A linear without a key draws no random bits. `watch` observes the linears; of a gated MLP that is one op it sees
    only the inputs of gate and up, and the output of down. A router appends its experts' load to `expert_loads`.
    """

    ctx: ModelContext
    specs: dict[str, Any]
    recipes: dict[str, Recipe]
    keys: Mapping[str, LinearKey]
    watch: LinearObserver | None = None
    stacks: ResidualStacks | None = None
    expert_loads: list[ExpertLoad] | None = None
    masters: StackedMasterWeights | None = None

    def recipe(self, group: str, name: str) -> Recipe:
        """Returns the recipe of linear `name` of `group`."""
        return self.recipes[f"layers/{group}/{name}"]

    def observe_input(self, x: jax.Array, group: str, names: Iterable[str]) -> jax.Array:
        """Returns x as the linears `names` of `group` read it."""
        if self.watch is not None:
            for name in names:
                x = self.watch.on_input(f"{group}/{name}", x)
        return x

    def observe_output(self, y: jax.Array, group: str, name: str) -> jax.Array:
        """Returns y, the output of linear `name` of `group`."""
        return y if self.watch is None else self.watch.on_output(f"{group}/{name}", y)

    @property
    def shares_scales(self) -> bool:
        """True if weights of this segment share a tensor scale."""
        return any(recipe.shared_scales for recipe in self.recipes.values())

    def constrain_weight(self, group: str, name: str, w: jax.Array) -> jax.Array:
        """Constrains a linear's weight, and thereby its gradient, to the sharding at rest."""
        spec: ParamSpec = self.specs["layers"][group][name]
        return self.ctx.constrain(w, *spec.axes[1:])

    def io_axes(self, group: str, name: str) -> tuple[Axes, Axes]:
        """Returns the logical axes of the linear's input and output."""
        spec: ParamSpec = self.specs["layers"][group][name]
        x, y = (RESIDUAL_STREAM_AXES if axis == "embed" else block_activation_axes(axis) for axis in spec.axes[-2:])
        return x, y

    def placement(self, group: str, name: str) -> ops.Placement:
        """Returns the placement of the linear: mesh and PartitionSpecs of input, weight and output."""
        mesh, rules = self.ctx.mesh, self.ctx.rules
        assert mesh is not None, "on one device nothing is placed"
        spec: ParamSpec = self.specs["layers"][group][name]
        x, y = self.io_axes(group, name)
        x_spec, w_spec, y_spec = (rules.spec(axes, mesh) for axes in (x, spec.axes[1:], y))
        return ops.Placement(mesh, x_spec, w_spec, y_spec, self.ctx.reduce_dtype, manual_axes())

    @property
    def on_mesh(self) -> bool:
        """True if there is more than one device."""
        return self.ctx.on_mesh

    def shards_evenly(self, x: jax.Array | jax.ShapeDtypeStruct, *axes: Axes) -> bool:
        """Returns True if the mesh divides the batch and sequence dims of x evenly under each of these logical axes.

        It does not divide the single position of a decoding step.
        """
        mesh, rules = self.ctx.mesh, self.ctx.rules
        sizes = [axis_size(mesh, rules.mesh_axes(name)) for dims in axes for name in dims[:-1] if name is not None]
        return all(n % size == 0 for n, size in zip(x.shape[:-1] * len(axes), sizes, strict=True))

    def backend(self, *recipes: Recipe) -> str:
        """Returns the backend for linears with these recipes: "auto" if none of them quantizes, else the run's."""
        plain = not any(recipe.quantized for recipe in recipes) and self.ctx.backend != "reference"
        return "auto" if plain else self.ctx.backend

    def execution(
        self, x: jax.Array | jax.ShapeDtypeStruct, group: str, names: Sequence[str], weights: Mapping[str, Any]
    ) -> ops.ExecutionConfig:
        """Returns the execution config of the linears `names` of `group` with these weights.

        On a mesh that divides x evenly, each linear runs on the shards in place. Unrolled layers save weight codes for
        the backward pass, as XLA saves the bf16 cast of weights.
        """
        placed = None
        if self.on_mesh and self.shards_evenly(x, *(axes for name in names for axes in self.io_axes(group, name))):
            placed = tuple(self.placement(group, name) for name in names)
        backend = self.backend(*(self.recipe(group, name) for name in names))
        saved = "master" if self.ctx.is_scanned else "codes"
        layers = None
        if self.masters is not None:
            layers = tuple(self.masters.stack_slice(group, name, weights[name]) for name in names)
        return ops.ExecutionConfig(
            backend, placed, weight_residual=saved, partitioned_by_xla=self.on_mesh, stack_slices=layers
        )


def block_activation_axes(features: str | None) -> Axes:
    """Returns the logical axes of an activation inside a block whose last dim is `features`."""
    return ("batch", "seq", features)


def is_scanned(cfg: LlamaConfig, unroll: int) -> bool:
    """Returns True if layers run in a scan, `unroll` of them per iteration (0: all, without a loop)."""
    return 0 < unroll < cfg.layers


def uses_stacked_residuals(unroll: int, remat: str) -> bool:
    """Returns True if layers may save residuals in stacks: one layer per scan iteration, nothing rematerialized."""
    return unroll == 1 and remat == "none"


def layer_segments(cfg: LlamaConfig, ctx: ModelContext) -> tuple[LayerSegment, ...]:
    """Returns the segments of the policy, or one in bf16. ValueError if it was resolved for another layer count."""
    resolved = ctx.policy or Policy("bf16", ()).resolve(linear_sites(cfg), cfg.layers)
    stops = [segment.stop for segment in resolved.segments]
    if not stops or stops[-1] != cfg.layers:
        raise ValueError(
            f"policy {resolved.policy!r} was resolved for {stops[-1] if stops else 0} layers, "
            f"but {cfg.name} has {cfg.layers}; resolve it again"
        )
    return resolved.segments


def keys_of_layers(key: jax.Array | None, recipes: Mapping[str, Recipe], layers: jax.Array) -> dict[str, jax.Array]:
    """Returns the keys [layers] of the linears of `recipes` by site ("mlp/up"), derived from the step's key.

    `layers` are the layers' indices in the model.
    """
    if key is None:
        return {}
    groups = _group_by_path_length([path.removeprefix("layers/") for path in recipes])
    return {site: k for sites in groups for site, k in zip(sites, _keys(key, sites, layers), strict=True)}


def stream_words_of_layers(key: jax.Array | None, recipes: Mapping[str, Recipe], layers: jax.Array) -> StreamWords:
    """Returns by site the key words of each random stream by name, [layers, 2]; of experts the key [layers].

    Sites that draw no random bits are left out. Experts derive their own streams.
    """
    if key is None:
        return {}
    drawing = {path: recipe for path, recipe in recipes.items() if recipe.stochastic}
    experts = {path: recipe for path, recipe in drawing.items() if path.startswith(f"layers/{EXPERT_PREFIX}")}
    drawn: StreamWords = {**keys_of_layers(key, experts, layers)}
    for sites in _group_by_path_length([path.removeprefix("layers/") for path in drawing if path not in experts]):
        words = jax.vmap(jax.vmap(stream_key_words))(_keys(key, sites, layers))  # [sites, layers, 9, 2]
        drawn |= {site: {name: words[i, :, n] for n, name in enumerate(RANDOM_STREAMS)} for i, site in enumerate(sites)}
    # Without the barrier XLA folds the keys again in every layer.
    words_of_sites: StreamWords = lax.optimization_barrier(drawn)
    return words_of_sites


def _group_by_path_length(sites: Sequence[str]) -> list[list[str]]:
    """Groups sites by the length of their key path."""
    return [
        [site for site in sites if len(key_path(site)) == length]
        for length in sorted({len(key_path(s)) for s in sites})
    ]


def _keys(step: jax.Array, sites: Sequence[str], layers: jax.Array) -> jax.Array:
    """Returns the keys [sites, layers] of sites of equal key path length: one fold per name of the path."""

    def of_layer(number: jax.Array) -> jax.Array:
        layer_keys = jnp.broadcast_to(layer_key(step, number), (len(sites),))
        return functools.reduce(site_keys, zip(*map(key_path, sites), strict=True), layer_keys)

    return jax.vmap(of_layer, out_axes=1)(layers)


def stream_words_of_layer(drawn: StreamWords, index: jax.Array) -> dict[str, LinearKey]:
    """Returns the keys of the linears of layer `index` of the segment, by site."""

    def of_linear(stacked: jax.Array | dict[str, jax.Array]) -> LinearKey:
        if isinstance(stacked, dict):
            return {name: HashedKey(words, index) for name, words in stacked.items()}
        return lax.dynamic_index_in_dim(stacked, index, keepdims=False)

    return {site: of_linear(stacked) for site, stacked in drawn.items()}


def key_path(site: str) -> tuple[str, ...]:
    """Returns the names that are folded into a layer's key for a linear; a fused gated MLP adds the op's name."""
    group, _, name = site.partition("/")
    if group != "mlp" or site.startswith(EXPERT_PREFIX):
        return (f"layers/{site}",)
    op, _, linear = name.rpartition("_")
    return (f"layers/mlp/{op}" if op else "layers/mlp", linear)
