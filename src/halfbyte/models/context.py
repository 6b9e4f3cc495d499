"""What a forward pass needs beside parameters and batch: precision policy, random key, mesh, and how much to keep for
the backward pass.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from halfbyte import ops
from halfbyte.kernels.stacks import Layer
from halfbyte.models.config import LlamaConfig
from halfbyte.models.params import linear_sites
from halfbyte.models.spec import ParamSpec
from halfbyte.nn.routing import Load
from halfbyte.recipe import LinearKey, Policy, Recipe, Resolved, Segment
from halfbyte.sharding import DEFAULT_RULES, Rules, axis_size, constrain, outer_axes

Axes = tuple[str | None, ...]
BETWEEN: Axes = ("batch", "residual_seq", "width")  # of the stream between blocks
REMAT = ("none", "dots", "full", "quantized")


def inside(features: str | None) -> Axes:
    """The logical axes of an activation inside a block, whose last dim is `features`."""
    return ("batch", "seq", features)


@dataclasses.dataclass(frozen=True)
class Context:
    """How a model runs. Made inside the jitted step, because `key` is that step's.

    policy: recipes by segment of layers (None: everything in bf16).
    key: the step's key; needed only if a recipe rounds stochastically and gradients are taken.
    remat: `none` keeps what the backward pass reads; `dots` keeps the outputs of GEMMs and of attention; `full` keeps
    each layer's input;
        `quantized` keeps the inputs of both norms, q, k, v and fused attention's output, and makes norms, operands,
        gate and up again (and attention, where XLA computes it).
    compute_dtype: of activations. bfloat16, or float32 to compare with another implementation.
    loss_chunk: a device's tokens whose logits exist at one time (None: about 1 GiB of them).
    unroll: layers a scan iteration.
    reduce_dtype: what gradients of matrices travel in when they are scattered over fsdp.
    stacked: keep the MLPs' products of looped layers, and what their norms read, in stacks that kernels read in place;
    for a pass whose gradient is taken.
    amaxes: float32 [layers, linears, 3], what linears with a history are scaled by (`ops.Remembered`), in the order of
    `linear_sites`; None: each tensor by its own.
    """

    policy: Resolved | None = None
    key: jax.Array | None = None
    mesh: Mesh | None = None
    rules: Rules = DEFAULT_RULES
    backend: str = "auto"
    remat: str = "none"
    attention: str = "auto"
    compute_dtype: Any = jnp.bfloat16
    loss_chunk: int | None = None
    unroll: int = 1
    reduce_dtype: str = "float32"
    stacked: bool = False
    amaxes: jax.Array | None = None

    @property
    def looped(self) -> bool:
        """Whether layers are turns of a loop, one each: their passes cannot meet in one piece of program."""
        return self.unroll == 1

    @property
    def keeps_stacks(self) -> bool:
        """Whether layers may keep what kernels read in stacks (`Stacks`)."""
        return self.stacked and keeps_stacks(self.unroll, self.remat)

    @property
    def on_mesh(self) -> bool:
        """Whether there is more than one device."""
        return self.mesh is not None and self.mesh.size > 1

    def __post_init__(self) -> None:
        if self.remat not in REMAT:
            raise ValueError(f"remat must be one of {', '.join(REMAT)}, got {self.remat!r}")
        if self.policy is not None and any(recipe.quantized for recipe in self.policy.outside.values()):
            paths = ", ".join(path for path, recipe in self.policy.outside.items() if recipe.quantized)
            raise ValueError(
                f"policy: {paths} would be quantized, but only linears inside layers can be; "
                "narrow the rule's pattern to layers/*"
            )

    def constrain(self, x: jax.Array, *axes: str | None) -> jax.Array:
        """`x`, held to the sharding of its dims' logical `axes`."""
        return constrain(x, axes, self.mesh, self.rules)


PLAIN = Context()  # bf16, one device


class Watch(Protocol):
    """Sees what the linears of a layer are given, "group/name" by "group/name", and may stand in its way."""

    def into(self, site: str, x: jax.Array) -> jax.Array:
        """x, as that linear reads it."""

    def out_of(self, site: str, y: jax.Array) -> jax.Array:
        """y, as that linear gives it."""


@dataclasses.dataclass
class Stacks:
    """Where layers of a loop keep gate's and up's results and, by group, what norms read, [layers, ...] each; and which
    layer this one is. MLP and norms take them and leave them with their own written (`ops.mlp_in_stacks`,
    `nn.norm.forked_norm`). Without stacks of theirs they keep their own.
    """

    both: tuple[jax.Array, jax.Array] | None
    norms: dict[str, jax.Array]
    at: jax.Array

    def of_norm(self, group: str) -> Layer | None:
        """Where the norm of `group` keeps what it reads."""
        return Layer(self.norms[group], self.at) if group in self.norms else None


@dataclasses.dataclass(frozen=True)
class Masters:
    """The weights of all layers as they rest, by group and name, [layers, ...] each; those of this layer as it was
    given them; and which layer it is.
    """

    stacks: dict[str, dict[str, Any]]
    own: dict[str, dict[str, Any]]
    at: jax.Array

    def place(self, group: str, name: str, weight: Any) -> Layer | None:
        """Where that weight lies; None for one that was made of it."""
        lies = isinstance(weight, jax.Array) and weight is self.own[group][name]
        return Layer(self.stacks[group][name], self.at) if lies else None


@dataclasses.dataclass(frozen=True)
class LayerContext:
    """A `Context` inside one layer of one segment: recipes by path, and the keys of its linears by site
    (`models.keys`; without one a linear draws nothing).

    `watch` sees what linears are given. Of a gated MLP that is one op, only the ends are seen: the inputs of gate and
    up, and down's result. A router leaves the load of its experts in `routed`.
    """

    ctx: Context
    specs: dict[str, Any]
    recipes: dict[str, Recipe]
    keys: Mapping[str, LinearKey]
    watch: Watch | None = None
    stacks: Stacks | None = None
    routed: list[Load] | None = None
    masters: Masters | None = None

    def recipe(self, group: str, name: str) -> Recipe:
        """The recipe of linear `name` of `group`."""
        return self.recipes[f"layers/{group}/{name}"]

    def into(self, x: jax.Array, group: str, names: Iterable[str]) -> jax.Array:
        """x, as the linears `names` of `group` read it."""
        if self.watch is not None:
            for name in names:
                x = self.watch.into(f"{group}/{name}", x)
        return x

    def out_of(self, y: jax.Array, group: str, name: str) -> jax.Array:
        """y, the result of linear `name` of `group`."""
        return y if self.watch is None else self.watch.out_of(f"{group}/{name}", y)

    @property
    def shares_scales(self) -> bool:
        """Whether weights of this segment share a tensor scale."""
        return any(recipe.shared_scales for recipe in self.recipes.values())

    def at_rest(self, group: str, name: str, w: jax.Array) -> jax.Array:
        """That linear's weight, held to where it rests; and so is its gradient."""
        spec: ParamSpec = self.specs["layers"][group][name]
        return self.ctx.constrain(w, *spec.axes[1:])

    def ends(self, group: str, name: str) -> tuple[Axes, Axes]:
        """The logical axes of what that linear reads and of what it gives."""
        spec: ParamSpec = self.specs["layers"][group][name]
        x, y = (BETWEEN if axis == "embed" else inside(axis) for axis in spec.axes[-2:])
        return x, y

    def placement(self, group: str, name: str) -> ops.Placement:
        """How that linear lies on the mesh."""
        mesh, rules = self.ctx.mesh, self.ctx.rules
        assert mesh is not None, "on one device nothing is placed"
        spec: ParamSpec = self.specs["layers"][group][name]
        x, y = self.ends(group, name)
        at_x, at_w, at_y = (rules.spec(axes, mesh) for axes in (x, spec.axes[1:], y))
        return ops.Placement(mesh, at_x, at_w, at_y, self.ctx.reduce_dtype, outer_axes())

    @property
    def on_mesh(self) -> bool:
        """Whether there is more than one device."""
        return self.ctx.on_mesh

    def divides(self, x: jax.Array, *axes: Axes) -> bool:
        """Whether the mesh cuts the positions and sequences of x evenly, wherever they have these logical axes: a
        decoder's single position it does not.
        """
        mesh, rules = self.ctx.mesh, self.ctx.rules
        sizes = [axis_size(mesh, rules.mesh_axes(name)) for each in axes for name in each[:-1] if name is not None]
        return all(n % size == 0 for n, size in zip(x.shape[:-1] * len(axes), sizes, strict=True))

    def backend(self, *recipes: Recipe) -> str:
        """The run's backend. Those with formats of their own are not for linears that quantize nothing: XLA's are."""
        plain = not any(recipe.quantized for recipe in recipes) and self.ctx.backend != "reference"
        return "auto" if plain else self.ctx.backend

    def execution(self, x: jax.Array, group: str, names: Sequence[str], weights: Mapping[str, Any]) -> ops.Execution:
        """How the linears `names` of `group` with these weights are computed: on a mesh each where it lies, if that
        divides x. Without a loop codes are kept for the backward pass, as XLA keeps what bf16's are cast to.
        """
        placed = None
        if self.on_mesh and self.divides(x, *(axes for name in names for axes in self.ends(group, name))):
            placed = tuple(self.placement(group, name) for name in names)
        backend = self.backend(*(self.recipe(group, name) for name in names))
        kept = "master" if self.ctx.looped else "codes"
        layers = None
        if self.masters is not None:
            layers = tuple(self.masters.place(group, name, weights[name]) for name in names)
        return ops.Execution(backend, placed, weights_kept=kept, sharded=self.on_mesh, layers=layers)


def in_loop(cfg: LlamaConfig, unroll: int) -> bool:
    """Whether layers are turns of a loop at all, `unroll` of them each (0: all, and no loop)."""
    return 0 < unroll < cfg.layers


def keeps_stacks(unroll: int, remat: str) -> bool:
    """Whether a step's layers may keep what kernels read in stacks: those of a loop, of which nothing is made again."""
    return unroll == 1 and remat == "none"


def segments(cfg: LlamaConfig, ctx: Context) -> tuple[Segment, ...]:
    """The segments of the policy, or one in bf16; a policy resolved for another number of layers is a ValueError."""
    resolved = ctx.policy or Policy("bf16", ()).resolve(linear_sites(cfg), cfg.layers)
    stops = [segment.stop for segment in resolved.segments]
    if not stops or stops[-1] != cfg.layers:
        raise ValueError(
            f"policy {resolved.policy!r} was resolved for {stops[-1] if stops else 0} layers, "
            f"but {cfg.name} has {cfg.layers}; resolve it again"
        )
    return resolved.segments
