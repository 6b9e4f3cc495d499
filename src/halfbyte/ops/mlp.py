"""The MLP as one op: y = (a(x Wg) * (x Wu)) Wd, with its nine GEMMs quantized and its own VJP.

It computes what three `qdot`s around the activation compute, bit for bit, but as one op it quantizes x once for gate
and up, lets the passes hold the activation, and decides what the backward pass keeps:

| mode    | kept of the activations             | computed again in the backward pass |
|---------|-------------------------------------|-------------------------------------|
| `fast`  | wgrad's operand of x (packed), g, u | h                                   |
| `input` | x as it came, its maxima            | the operands of x, g, u, h          |

`input` is for a caller whose remat policy makes x again, and then keeps nothing at all. In a loop over layers `fast`
can keep g and u in stacks of the caller's (`mlp_in_stacks`), from which kernels read them without a copy.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from halfbyte.kernels.stacks import Layer, array_of
from halfbyte.ops.activation import SILU, Activation
from halfbyte.ops.execution import ALONE, Execution
from halfbyte.ops.linear import Linear, with_linears
from halfbyte.ops.operand import Owed, add_rounded, name_saved
from halfbyte.ops.passes import GatedPasses, Made, Passes, Read
from halfbyte.ops.problem import check_dtype, check_weight
from halfbyte.ops.shards import Placement, axes_of, gather, gathered_in
from halfbyte.ops.sharing import first_wanting, maxima_of_x, once_each, operands_of_x
from halfbyte.ops.surroundings import own_key
from halfbyte.ops.weight import QWeight, Weight
from halfbyte.recipe import LinearKey, Recipe, as_recipe, site_key

SITES = ("gate", "up", "down")
MODES = ("fast", "input")
BOTH = ("fprop_x", "wgrad_x")  # the operands of x
Place = tuple[jax.Array, jax.Array, jax.Array]  # the stacks of g and of u, and the number of the layer
Recipes = Recipe | str | Mapping[str, Recipe | str]


@dataclasses.dataclass(frozen=True)
class Middle:
    """What lies between the linears: the activation, and what of it is kept."""

    activation: Activation = SILU
    mode: str = "fast"

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}, got {self.mode!r}")

    def fused(self, linears: Sequence[Linear]) -> GatedPasses | None:
        """The passes that hold the activation, if one set of them serves all three linears."""
        recipes = [linear.plan.recipe for linear in linears]
        return fused_passes([linear.passes for linear in linears], self.activation, recipes)

    def in_place(self, linears: Sequence[Linear], place: Place | None) -> bool:
        """Whether g and u are kept at `place`: if kernels write and read them there. XLA has stacks of its own."""
        fused = self.fused(linears)
        return place is not None and fused is not None and fused.keeps_in_stacks


SWIGLU = Middle()


def fused_passes(passes: Sequence[Passes], activation: Activation, recipes: Sequence[Recipe]) -> GatedPasses | None:
    """The passes of the linears, if they are the same and hold the activation under these recipes; else None."""
    first = passes[0]
    several = any(each != first for each in passes) or any(recipe.remainder for recipe in recipes)
    if not isinstance(first, GatedPasses) or several:
        return None
    return first if first.unfused(activation, recipes) is None else None


def mlp(
    x: jax.Array, gate: Weight, up: Weight, down: Weight, *, recipe: Recipes, key: jax.Array | None = None,
    mode: str = "fast", backend: str = "auto", activation: Activation = SILU,
    placements: Mapping[str, Placement] | None = None, weights_kept: str = "master", sharded: bool = False,
) -> jax.Array:  # fmt: skip
    """Gated MLP of x [..., embed] with gate, up [embed, hidden] and down [hidden, embed], in x's dtype.

    `recipe`, or its name, is one for all three linears or one each by the names gate, up, down; `key` is folded by
    those names. `mode` chooses what the backward pass keeps. Weights stay as packed codes; where a backend has none but
    a carrier, it is made again from the `master`, or with `weights_kept="codes"` stays, for a master that is itself a
    copy. With `placements` every device of their mesh computes its part, by the same kernels as a single one; `sharded`
    as for `qdots`.
    """
    placed = None if placements is None else tuple(placements[site] for site in SITES)
    execution = Execution(backend, placed, weights_kept, sharded)
    middle = Middle(activation, mode)
    return mlp_in_stacks(x, (gate, up, down), None, recipe=recipe, key=key, middle=middle, execution=execution)[0]


def mlp_in_stacks(
    x: jax.Array, weights: tuple[Weight, Weight, Weight], place: Place | None, *, recipe: Recipes,
    key: jax.Array | tuple[LinearKey | None, ...] | None = None, middle: Middle = SWIGLU, execution: Execution = ALONE,
) -> tuple[jax.Array, Place | None]:  # fmt: skip
    """(`mlp` with the weights of gate, up and down, `place` with g and u written there); `key`: one for all, or a tuple
    of one each. The backward pass reads g and u at the cotangent of `place`: those of its stacks
    [layers, *x.shape[:-1], hidden] must be the stacks, as `stacks.hand_back` gives them. On a mesh both lie as gate's
    result, which must be cut over all axes. Where no kernel would read them there, or without a place, it stays as it
    came, and they are kept as usual.
    """
    recipes = _recipes(recipe)
    _check(x, weights, recipes)
    if not isinstance(key, tuple):
        own = own_key(key, recipes, (x, *weights))
        key = tuple(None if own is None else site_key(own, site) for site in SITES)
    specs: tuple[Any, Any] = (), ()
    if execution.placements is not None:
        first, _, last = placed = execution.placements
        _check_placements(placed, x.ndim)
        at = None if place is None else (*[PartitionSpec(None, *first.y)] * 2, PartitionSpec())
        specs = (first.x, at), (last.y, at)

    def products(tokens: jax.Array, linears: tuple[Linear, ...], place: Place | None) -> tuple[jax.Array, Place | None]:
        y, place = _mlp(middle, tokens, linears, place)
        return y if y.ndim == x.ndim else y.reshape(x.shape), place  # [tokens..., embed] -> [..., embed]

    given = (x, place)
    y, place = with_linears(products, given, weights, key, recipes=recipes, execution=execution, specs=specs)
    return y.astype(x.dtype), place


def _check_placements(placements: Sequence[Placement], ndim: int) -> None:
    """Gate and up read one x, and down reads h where it is."""
    gate, up, down = (p.shards(ndim) for p in placements)
    if (gate.x, gate.x_lead) != (up.x, up.x_lead) or len({p.mesh for p in placements}) > 1:
        raise ValueError(f"placements: gate and up have one mesh and one x, got {placements[0]} and {placements[1]}")
    if not gate.dy == up.dy == down.x or any(axes_of(cut) for cut in (gate.y_lead, up.y_lead, down.x_lead)):
        raise ValueError(
            f"placements: gate's and up's y must be cut as down's x, their tokens as x's, "
            f"got {placements[0].y}, {placements[1].y} and {placements[2].x}"
        )


def _recipes(recipe: Recipe | str | Mapping[str, Recipe | str]) -> tuple[Recipe, ...]:
    if not isinstance(recipe, Mapping):
        return (as_recipe(recipe, "mlp"),) * 3
    if set(recipe) != set(SITES):
        raise ValueError(f"mlp takes one recipe, or one each for {', '.join(SITES)}; got {', '.join(recipe)}")
    return tuple(as_recipe(recipe[site], f"mlp, {site}") for site in SITES)


def _check(x: jax.Array, weights: Sequence[Weight], recipes: tuple[Recipe, ...]) -> None:
    check_dtype(x, "mlp")
    gate, up, down = (w.shape for w in weights)
    if x.ndim == 0 or x.shape[-1:] != gate[:1] or gate != up or down != gate[::-1]:
        raise ValueError(
            f"mlp needs x [..., embed], gate and up [embed, hidden], down [hidden, embed]; "
            f"got x {x.shape}, gate {gate}, up {up}, down {down}"
        )
    for site, weight, recipe in zip(SITES, weights, recipes, strict=True):
        check_weight(weight, "mlp", site)
        if isinstance(weight, QWeight) and weight.recipe != recipe:
            raise ValueError(
                f"mlp: the QWeight of {site} was made under recipe {weight.recipe.name}, and the op was asked for "
                f"{recipe.name}; quantize the weight again"
            )


def _operand_of_h(
    middle: Middle, g: Read, u: Read, linears: Sequence[Linear], place: Place | None
) -> tuple[Made, Place | None]:
    """(down's operand of h for fprop, `place` with g and u written there where they are kept there)."""
    fused, down = middle.fused(linears), linears[2]
    requests = [down.request("fprop_x")]
    if place is None or not middle.in_place(linears, place):
        made = fused.activate(g, u, requests) if fused else down.quantize(middle.activation.forward(g, u), "fprop_x")
        return made[0], place
    layers = _layers(place, g.shape[:-1])
    if fused:
        made, stacks = fused.activate_into(g, u, requests, layers)
    else:
        made = down.quantize(middle.activation.forward(g, u), "fprop_x")
        stacks = tuple(at.filled(y) for at, y in zip(layers, (g, u), strict=True))
    g_stack, u_stack = (s.reshape(p.shape) for s, p in zip(stacks, place[:2], strict=True))
    return made[0], (g_stack, u_stack, place[2])


def _operands_of_gradients(middle: Middle, g: Read, u: Read, dh: Read, linears: Sequence[Linear]):
    """The operands of dg and du for dgrad and wgrad, and of h for wgrad."""
    gate, up, down = linears
    dg_wanted, du_wanted = ([site.request(role) for role in ("dgrad_dy", "wgrad_dy")] for site in (gate, up))
    h_wanted, fused = [down.request("wgrad_x")], middle.fused(linears)
    if fused:
        return fused.activate_backward(g, u, dh, dg_wanted, du_wanted, h_wanted)
    g, u = array_of(g), array_of(u)
    dg, du = middle.activation.backward(g, u, dh)
    h = middle.activation.forward(g, u)
    made = gate.passes.quantize(dg, dg_wanted), up.passes.quantize(du, du_wanted)
    return *made, down.passes.quantize(h, h_wanted)


def _owing(middle: Middle, linears: Sequence[Linear]) -> bool:
    """Whether whoever holds the activation takes what GEMMs owe to g, u and dh."""
    fused = middle.fused(linears)
    return fused is not None and fused.takes_owed


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
def _mlp(middle: Middle, x: jax.Array, linears: tuple[Linear, ...], place: Place | None):
    """y = h Wd with h = a(g) u, g = x Wg, u = x Wu."""
    (gate, up, down), owing = linears, _owing(middle, linears)
    inside = gathered_in(x, gate.plan.shards)
    (x_gate,), (x_up,) = operands_of_x(inside, (gate, up), ("fprop_x",))
    g, u = gate.fprop(x_gate, x.dtype, owing=owing), up.fprop(x_up, x.dtype, owing=owing)
    h, place = _operand_of_h(middle, g, u, linears, place)
    return down.fprop(h, x.dtype), place


def _mlp_fwd(middle, x, linears, place):
    (gate, up, down), owing = linears, _owing(middle, linears)
    kept = tuple(site.kept(fprop_again=middle.mode == "input") for site in linears)
    inside, again = gathered_in(x, gate.plan.shards), middle.mode == "input"
    maxima = maxima_of_x(inside, (gate, up), BOTH) if again else []
    (x_gate, *gate_column), (x_up, *up_column) = operands_of_x(
        inside, (gate, up), BOTH[:1] if again else BOTH, kept=("wgrad_x",), maxima=maxima
    )
    g, u = gate.fprop(x_gate, x.dtype, owing=owing), up.fprop(x_up, x.dtype, owing=owing)
    h, place = _operand_of_h(middle, g, u, linears, place)
    y = down.fprop(h, x.dtype)
    if again:
        return (y, place), ((x, maxima), kept)
    columns = once_each((gate, up), "wgrad_x", [*gate_column, *up_column])
    products = _beside((g, u), place) if middle.in_place(linears, place) else name_saved((g, u))
    return (y, place), ((columns, products), kept)


def _restored(middle, saved, linears, dtype):
    """((wgrad's operands of x for gate and for up), g and u as they were kept): loaded, or made again from x."""
    (gate, up, _), owing = linears, _owing(middle, linears)
    if middle.mode == "fast":
        columns, products = saved
        kept = [columns[first] for first in first_wanting((gate, up), "wgrad_x")]
        return [site.load(column, "wgrad_x") for site, column in zip((gate, up), kept, strict=True)], products
    x, maxima = saved
    inside = gathered_in(x, gate.plan.shards)
    (x_gate, gate_column), (x_up, up_column) = operands_of_x(inside, (gate, up), BOTH, maxima=maxima)
    return (gate_column, up_column), (gate.fprop(x_gate, dtype, owing=owing), up.fprop(x_up, dtype, owing=owing))


def _mlp_bwd(middle, residuals, gradients):
    saved, kept = residuals
    dy, place = gradients  # the cotangents of stacks are stacks
    gate, up, down = linears = [site.restored(after=dy) for site in kept]
    (x_gate, x_up), products = _restored(middle, saved, linears, dy.dtype)
    inside = gather(dy, down.plan.shards.y_lead)
    g, u = _taken(products, place[:2], inside.shape[:-1]) if middle.in_place(linears, place) else products
    dy_row, dy_column = down.quantize(inside, "dgrad_dy", "wgrad_dy")
    dh = down.dgrad(dy_row, dy.dtype, owing=_owing(middle, linears))
    made = _operands_of_gradients(middle, g, u, dh, linears)
    (dg_row, dg_column), (du_row, du_column), (h_column,) = made
    pairs = (x_gate, dg_column), (x_up, du_column), (h_column, dy_column)
    dw = tuple(site.wgrad(*pair) for site, pair in zip(linears, pairs, strict=True))
    dx = add_rounded(gate.dgrad(dg_row, dy.dtype, beside=dw), up.dgrad(du_row, dy.dtype, beside=dw))
    gradients = (site.gradient(each, *pair) for site, each, pair in zip(linears, dw, pairs, strict=True))
    return dx, tuple(gradients), place


_mlp.defvjp(_mlp_fwd, _mlp_bwd)
