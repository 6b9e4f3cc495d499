"""The MLP as one op: y = (a(x Wg) * (x Wu)) Wd, with its nine GEMMs quantized and its own VJP.

It computes what three `qdot`s around the activation compute, bit for bit, but as one op it quantizes x once for gate
and up, lets the passes hold the activation, and decides what the backward pass keeps:

| mode    | kept of the activations             | computed again in the backward pass |
|---------|-------------------------------------|-------------------------------------|
| `fast`  | wgrad's operand of x (packed), g, u | h                                   |
| `input` | x as it came                        | the operands of x, g, u, h          |

`input` is for a caller whose remat policy makes x again, and then keeps nothing at all. In a loop over layers `fast`
can keep g and u in stacks of the caller's (`mlp_in_stacks`), from which kernels read them without a copy.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from halfbyte.ops.activation import SILU, Activation
from halfbyte.ops.linear import (
    Linear,
    LinearPlan,
    gathered_back,
    gathered_in,
    once_each,
    operands_of_x,
    places_of,
    prepare,
)
from halfbyte.ops.operand import Owed, add_rounded, name_saved
from halfbyte.ops.passes import Made, Passes, Read
from halfbyte.ops.qdot import on_mesh
from halfbyte.ops.shards import WHOLE, Placement, Shards, axes_of
from halfbyte.ops.stacks import Layer, array_of
from halfbyte.ops.weight import QWeight, check_kept, weight_specs
from halfbyte.recipe import Recipe, as_recipe, site_key

SITES = ("gate", "up", "down")
MODES = ("fast", "input")
Place = tuple[jax.Array, jax.Array, jax.Array]  # the stacks of g and of u, and the number of the layer


def fused_passes(passes: Sequence[Passes], activation: Activation, recipes: Sequence[Recipe]) -> Passes | None:
    """The passes of the linears, if they are the same and hold the activation under these recipes; else None."""
    first = passes[0]
    return first if all(each == first for each in passes) and first.unfused(activation, recipes) is None else None


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is settled before tracing: the three linears, the activation, and what is kept."""

    linears: tuple[LinearPlan, ...]
    activation: Activation
    mode: str

    def fused_passes(self) -> Passes | None:
        """The passes that hold the activation, if one set of them serves all three linears."""
        passes = [plan.choice.passes for plan in self.linears]
        return fused_passes(passes, self.activation, [plan.recipe for plan in self.linears])

    def in_place(self, place: Any) -> bool:
        """Whether g and u are kept at `place`: if kernels write and read them there. XLA has stacks of its own."""
        fused = self.fused_passes()
        return place is not None and fused is not None and fused.keeps_in_stacks


def mlp(
    x: jax.Array, gate: jax.Array | QWeight, up: jax.Array | QWeight, down: jax.Array | QWeight, *,
    recipe: Recipe | str | Mapping[str, Recipe | str], key: jax.Array | None = None, mode: str = "fast",
    backend: str = "auto", activation: Activation = SILU, placements: Mapping[str, Placement] | None = None,
    weights_kept: str = "master", sharded: bool = False,
) -> jax.Array:  # fmt: skip
    """Gated MLP of x [..., embed] with gate, up [embed, hidden] and down [hidden, embed], in x's dtype.

    `recipe`, or its name, is one for all three linears or one each by the names gate, up, down; `key` is folded by
    those names. `mode` chooses what the backward pass keeps. Weights stay as packed codes; where a backend has none but
    a carrier, it is made again from the `master`, or with `weights_kept="codes"` stays, for a master that is itself a
    copy. With `placements` every device of their mesh computes its part, by the same kernels as a single one; `sharded`
    as for `qdots`.
    """
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
    options: dict[str, Any] = {"backend": backend, "activation": activation, "kept": weights_kept, "sharded": sharded}
    return _mlp_of(x, (gate, up, down), None, recipe, key, placements, mode=mode, **options)[0]


def mlp_in_stacks(
    x: jax.Array, gate: jax.Array | QWeight, up: jax.Array | QWeight, down: jax.Array | QWeight, place: Place, *,
    recipe: Recipe | str | Mapping[str, Recipe | str], key: jax.Array | None = None, backend: str = "auto",
    activation: Activation = SILU, placements: Mapping[str, Placement] | None = None, weights_kept: str = "master",
    sharded: bool = False,
) -> tuple[jax.Array, Place]:  # fmt: skip
    """(`mlp` of mode `fast`, `place` with g and u written there). The backward pass reads them at the cotangent of
    `place`: those of its stacks [layers, *x.shape[:-1], hidden] must be the stacks, as `stacks.hand_back` gives them.
    On a mesh both lie as gate's result, which must be cut over all axes. Where no kernel would read them there, `place`
    stays as it came, and they are kept as usual.
    """
    options: dict[str, Any] = {"backend": backend, "activation": activation, "kept": weights_kept, "sharded": sharded}
    return _mlp_of(x, (gate, up, down), place, recipe, key, placements, mode="fast", **options)


def _mlp_of(
    x: jax.Array, weights: tuple[Any, ...], place: Place | None, recipe: Any, key: jax.Array | None,
    placements: Mapping[str, Placement] | None, *, kept: str, sharded: bool, **options: Any,
) -> tuple[jax.Array, Any]:  # fmt: skip
    check_kept(kept)
    recipes = _recipes(recipe)
    _check(x, weights, recipes)
    keys = tuple(None if key is None else site_key(key, site) for site in SITES)
    run: Any = functools.partial(_local, recipes=recipes, kept=kept, **options)
    if placements is None:
        return run((x, place), weights, keys, shards=(WHOLE,) * 3, sharded=sharded)
    placed = [placements[site] for site in SITES]
    run = functools.partial(run, shards=_shards(placed, x.ndim))
    specs = [weight_specs(w, p.w) for w, p in zip(weights, placed, strict=True)]
    at = None if place is None else (*[PartitionSpec(None, *placed[0].y)] * 2, PartitionSpec())
    sides = (placed[0].x, at), (placed[2].y, at)
    y, place = on_mesh(run, placed[0].mesh, specs, *sides, (x, place), weights, keys)
    return y.astype(x.dtype), place


def _shards(placements: Sequence[Placement], ndim: int) -> tuple[Shards, ...]:
    """Those of gate, up and down, which read one x and leave h where it is."""
    gate, up, down = shards = tuple(p.shards(ndim) for p in placements)
    if (gate.x, gate.x_lead) != (up.x, up.x_lead) or len({p.mesh for p in placements}) > 1:
        raise ValueError(f"placements: gate and up have one mesh and one x, got {placements[0]} and {placements[1]}")
    if not gate.dy == up.dy == down.x or any(axes_of(cut) for cut in (gate.y_lead, up.y_lead, down.x_lead)):
        raise ValueError(
            f"placements: gate's and up's y must be cut as down's x, their tokens as x's, "
            f"got {placements[0].y}, {placements[1].y} and {placements[2].x}"
        )
    return shards


def _local(
    given: tuple[jax.Array, Any], weights: tuple, keys: tuple, *, activation: Activation, mode: str, **planned: Any
) -> tuple[jax.Array, Any]:
    x, place = given
    tokens, plans, anchors, codes = prepare(x, weights, keys, **planned)
    y, place = _mlp(Plan(plans, activation, mode), tokens, anchors, codes, keys, place)
    # [tokens..., embed] -> [..., embed]
    return y if y.ndim == x.ndim else y.reshape(x.shape), place


def _recipes(recipe: Recipe | str | Mapping[str, Recipe | str]) -> tuple[Recipe, ...]:
    if not isinstance(recipe, Mapping):
        return (as_recipe(recipe, "mlp"),) * 3
    if set(recipe) != set(SITES):
        raise ValueError(f"mlp takes one recipe, or one each for {', '.join(SITES)}; got {', '.join(recipe)}")
    return tuple(as_recipe(recipe[site], f"mlp, {site}") for site in SITES)


def _check(x: jax.Array, weights: Sequence[jax.Array | QWeight], recipes: tuple[Recipe, ...]) -> None:
    if x.dtype not in (jnp.bfloat16, jnp.float32):
        raise TypeError(f"mlp takes bfloat16 or float32, got x of {x.dtype}; convert with astype first")
    gate, up, down = (w.shape for w in weights)
    if x.ndim == 0 or x.shape[-1:] != gate[:1] or gate != up or down != gate[::-1]:
        raise ValueError(
            f"mlp needs x [..., embed], gate and up [embed, hidden], down [hidden, embed]; "
            f"got x {x.shape}, gate {gate}, up {up}, down {down}"
        )
    for site, weight, recipe in zip(SITES, weights, recipes, strict=True):
        if isinstance(weight, QWeight) and weight.recipe != recipe:
            raise ValueError(
                f"mlp: the QWeight of {site} was made under recipe {weight.recipe.name}, and the op was asked for "
                f"{recipe.name}; quantize the weight again"
            )


def _linears(plan: Plan, anchors, codes, keys) -> tuple[Linear, ...]:
    return tuple(Linear.of(*parts) for parts in zip(plan.linears, anchors, codes, keys, strict=True))


def _products(plan: Plan, gate: Linear, up: Linear, x_gate: Made, x_up: Made, dtype: jnp.dtype) -> tuple[Read, Read]:
    """g and u, as whoever holds the activation takes them."""
    if _owing(plan):
        return gate.fprop_owing(x_gate, dtype), up.fprop_owing(x_up, dtype)
    return gate.fprop(x_gate, dtype), up.fprop(x_up, dtype)


def _owing(plan: Plan) -> bool:
    fused = plan.fused_passes()
    return fused is not None and fused.takes_owed


def _of_h(plan: Plan, g: Read, u: Read, down: Linear, place: Any) -> tuple[Made, Any]:
    """(down's operand of h for fprop, `place` with g and u written there where they are kept there)."""
    fused, requests = plan.fused_passes(), [down.request("fprop_x")]
    layers = _layers(place, g.shape[:-1]) if plan.in_place(place) else []
    if fused and layers:
        made, stacks = fused.activate_into(g, u, requests, layers)
    else:
        activate = fused.activate if fused else functools.partial(_activate, plan, down)
        made, stacks = activate(g, u, requests), tuple(at.filled(y) for at, y in zip(layers, (g, u), strict=False))
    return made[0], (*(s.reshape(p.shape) for s, p in zip(stacks, place, strict=False)), place[2]) if layers else place


def _activate(plan: Plan, down: Linear, g: jax.Array, u: jax.Array, requests: Any) -> list[Made]:
    return down.passes.quantize(plan.activation.forward(g, u), requests)


def _of_gradients(plan: Plan, g: Read, u: Read, dh: Read, linears: Sequence[Linear]):
    """The operands of dg and du for dgrad and wgrad, and of h for wgrad."""
    gate, up, down = linears
    dg_wanted, du_wanted = ([site.request(role) for role in ("dgrad_dy", "wgrad_dy")] for site in (gate, up))
    h_wanted, fused = [down.request("wgrad_x")], plan.fused_passes()
    if fused:
        return fused.activate_backward(g, u, dh, dg_wanted, du_wanted, h_wanted)
    g, u = array_of(g), array_of(u)
    dg, du = plan.activation.backward(g, u, dh)
    h = plan.activation.forward(g, u)
    made = gate.passes.quantize(dg, dg_wanted), up.passes.quantize(du, du_wanted)
    return *made, down.passes.quantize(h, h_wanted)


def _layers(place: Place, lead: tuple[int, ...]) -> list[Layer]:
    """Where g and u [*lead, hidden] of a layer lie."""
    return [Layer(stack, place[2]).reshape(*lead, stack.shape[-1]) for stack in place[:2]]


def _beside(products: tuple[Read, Read], place: Place) -> tuple[Any, ...]:
    """What the backward pass needs beside the stacks: what is owed to g and u, and the number of the layer."""
    return *(p.factor if isinstance(p, Owed) else None for p in products), place[2]


def _taken(beside: tuple[Any, ...], stacks: tuple[jax.Array, jax.Array], lead: tuple[int, ...]) -> list[Read]:
    """g and u [*lead, hidden] of a layer, where they lie."""
    *owed, number = beside
    layers: list[Read] = list(_layers((*stacks, number), lead))
    return [p if factor is None else Owed(p, factor) for p, factor in zip(layers, owed, strict=True)]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mlp(plan: Plan, x, anchors, codes, keys, place):
    gate, up, down = _linears(plan, anchors, codes, keys)
    (x_gate,), (x_up,) = operands_of_x(gathered_in(x, gate.plan.shards), (gate, up), ("fprop_x",))
    h, place = _of_h(plan, *_products(plan, gate, up, x_gate, x_up, x.dtype), down, place)
    return down.fprop(h, x.dtype), place


def _mlp_fwd(plan: Plan, x, anchors, codes, keys, place):
    gate, up, down = _linears(plan, anchors, codes, keys)
    weights = tuple(site.keep(fprop_again=plan.mode == "input") for site in (gate, up, down))
    roles = ("fprop_x",) if plan.mode == "input" else ("fprop_x", "wgrad_x")
    inside = gathered_in(x, gate.plan.shards)
    operands = operands_of_x(inside, (gate, up), roles, kept=("wgrad_x",))
    g, u = _products(plan, gate, up, operands[0][0], operands[1][0], x.dtype)
    h, place = _of_h(plan, g, u, down, place)
    y = down.fprop(h, x.dtype)
    if plan.mode == "input":
        return (y, place), (x, weights, keys)
    columns = once_each((gate, up), "wgrad_x", [made[1] for made in operands])
    kept = _beside((g, u), place) if plan.in_place(place) else name_saved((g, u))
    return (y, place), ((columns, kept), weights, keys)


def _restored(plan: Plan, saved, gate: Linear, up: Linear, dtype: jnp.dtype):
    """((wgrad's operands of x for gate and for up), g and u as they were kept): loaded, or made again from x."""
    if plan.mode == "fast":
        columns, products = saved
        kept = [columns[i] for i in places_of((gate, up), "wgrad_x")]
        return [site.load(column, "wgrad_x") for site, column in zip((gate, up), kept, strict=True)], products
    x = gathered_in(saved, gate.plan.shards)
    (x_gate, gate_column), (x_up, up_column) = operands_of_x(x, (gate, up), ("fprop_x", "wgrad_x"))
    return (gate_column, up_column), _products(plan, gate, up, x_gate, x_up, dtype)


def _mlp_bwd(plan: Plan, residuals, gradients):
    saved, weights, keys = residuals
    dy, place = gradients  # the cotangents of stacks are stacks
    parts = zip(plan.linears, weights, keys, strict=True)
    gate, up, down = linears = [Linear.restore(p, w, k, after=dy) for p, w, k in parts]
    (x_gate, x_up), products = _restored(plan, saved, gate, up, dy.dtype)
    back = gathered_back(dy, down.plan.shards)
    g, u = _taken(products, place[:2], back.shape[:-1]) if plan.in_place(place) else products
    dy_row, dy_column = down.quantize(back, "dgrad_dy", "wgrad_dy")
    dh = down.dgrad_owing(dy_row, dy.dtype) if _owing(plan) else down.dgrad(dy_row, dy.dtype)
    (dg_row, dg_column), (du_row, du_column), (h_column,) = _of_gradients(plan, g, u, dh, linears)
    dw = gate.wgrad(x_gate, dg_column), up.wgrad(x_up, du_column), down.wgrad(h_column, dy_column)
    dx = add_rounded(gate.dgrad(dg_row, dy.dtype), up.dgrad(du_row, dy.dtype))
    return dx, dw, None, None, place


_mlp.defvjp(_mlp_fwd, _mlp_bwd)
