"""The MLP as one op: y = (a(x Wg) * (x Wu)) Wd, with its nine GEMMs quantized and its own VJP.

It computes what three `qdot`s around the activation compute, bit for bit, but as one op it quantizes x once for gate
and up, lets the passes hold the activation, and decides what the backward pass keeps:

| mode    | kept of the activations             | computed again in the backward pass |
|---------|-------------------------------------|-------------------------------------|
| `fast`  | wgrad's operand of x (packed), g, u | h                                   |
| `input` | x as it came                        | the operands of x, g, u, h          |

`input` is for a caller whose remat policy makes x again, and then keeps nothing at all.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from halfbyte.ops.activation import SILU, Activation
from halfbyte.ops.linear import Linear, LinearPlan, plan_linear, quantized, token_block, token_view
from halfbyte.ops.operand import name_saved
from halfbyte.ops.passes import Made, Passes
from halfbyte.ops.weight import QWeight, check_kept
from halfbyte.recipe import Recipe, site_key
from halfbyte.sharding import WeightSharding

SITES = ("gate", "up", "down")
MODES = ("fast", "input")


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is settled before tracing: the three linears, the activation, and what is kept."""

    linears: tuple[LinearPlan, ...]
    activation: Activation
    mode: str

    def fused_passes(self) -> Passes | None:
        """The passes that hold the activation: those of all three linears, if they know it; else None."""
        return fused_passes(self.linears, self.activation)


def fused_passes(linears: Sequence[LinearPlan], activation: Activation) -> Passes | None:
    """The passes of the one backend of gate, up and down, if they compute `activation` too; else None."""
    passes = linears[0].choice.passes
    alone = len({plan.choice.name for plan in linears}) == 1
    return passes if alone and passes.unfused(activation, [plan.recipe for plan in linears]) is None else None


def mlp(
    x: jax.Array, gate: jax.Array | QWeight, up: jax.Array | QWeight, down: jax.Array | QWeight, *,
    recipe: Recipe | Mapping[str, Recipe], key: jax.Array | None = None, mode: str = "fast", backend: str = "auto",
    activation: Activation = SILU, weight_shardings: Mapping[str, WeightSharding] | None = None,
    weights_kept: str = "master",
) -> jax.Array:  # fmt: skip
    """Gated MLP of x [..., embed] with gate, up [embed, hidden] and down [hidden, embed], in x's dtype.

    `recipe` is one for all three linears or one each by the names gate, up, down; `key` is folded by those names.
    `mode` chooses what the backward pass keeps. Weights stay as packed codes; where a backend has none but a carrier,
    it is made again from the `master`, or with `weights_kept="codes"` stays, for a master that is itself a copy.
    """
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
    check_kept(weights_kept)
    recipes, given, shardings = _recipes(recipe), (gate, up, down), weight_shardings or {}
    _check(x, given, recipes)
    keys = tuple(None if key is None else site_key(key, site) for site in SITES)
    tokens = token_view(x, math.lcm(*(token_block(r) for r in recipes)))
    linears = tuple(
        plan_linear(tokens, w, r, backend=backend, sharding=shardings.get(site), weights_kept=weights_kept)
        for site, w, r in zip(SITES, given, recipes, strict=True)
    )
    weights = [quantized(plan, w, k) for plan, w, k in zip(linears, given, keys, strict=True)]
    plan = Plan(linears, activation, mode)
    y = _mlp(plan, tokens, tuple(w.anchor for w in weights), tuple((w.fprop, w.dgrad) for w in weights), keys)
    return y.reshape(x.shape)


def _recipes(recipe: Recipe | Mapping[str, Recipe]) -> tuple[Recipe, ...]:
    if isinstance(recipe, Recipe):
        return (recipe,) * 3
    if set(recipe) != set(SITES):
        raise ValueError(f"mlp takes one recipe, or one each for {', '.join(SITES)}; got {', '.join(recipe)}")
    return tuple(recipe[site] for site in SITES)


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


def _share(gate: Linear, up: Linear, role: str) -> bool:
    """Whether one operand of x serves both."""
    return gate.passes is up.passes and gate.request(role).same(up.request(role))


def _of_x(x: jax.Array, gate: Linear, up: Linear, *roles: str, kept: tuple[str, ...] = ()) -> tuple[list[Made], ...]:
    """Gate's and up's operands of x: in one pass, and one operand for both wherever both want the same."""
    if gate.passes is not up.passes:
        return gate.quantize(x, *roles, kept=kept), up.quantize(x, *roles, kept=kept)
    shared = [_share(gate, up, role) for role in roles]
    own = [role for role, both in zip(roles, shared, strict=True) if not both]
    requests = [site.request(role, kept=role in kept) for site, of in ((gate, roles), (up, own)) for role in of]
    made = gate.passes.quantize(x, requests)
    of_gate, rest = made[: len(roles)], iter(made[len(roles) :])
    return of_gate, [a if both else next(rest) for a, both in zip(of_gate, shared, strict=True)]


def _of_h(plan: Plan, g: jax.Array, u: jax.Array, down: Linear) -> Made:
    """Down's operand of h for fprop."""
    fused, requests = plan.fused_passes(), [down.request("fprop_x")]
    made = fused.activate(g, u, requests) if fused else down.passes.quantize(plan.activation.forward(g, u), requests)
    return made[0]


def _of_gradients(plan: Plan, g: jax.Array, u: jax.Array, dh: jax.Array, linears: Sequence[Linear]):
    """The operands of dg and du for dgrad and wgrad, and of h for wgrad."""
    gate, up, down = linears
    dg_wanted, du_wanted = ([site.request(role) for role in ("dgrad_dy", "wgrad_dy")] for site in (gate, up))
    h_wanted, fused = [down.request("wgrad_x")], plan.fused_passes()
    if fused:
        return fused.activate_backward(g, u, dh, dg_wanted, du_wanted, h_wanted)
    dg, du = plan.activation.backward(g, u, dh)
    h = plan.activation.forward(g, u)
    made = gate.passes.quantize(dg, dg_wanted), up.passes.quantize(du, du_wanted)
    return *made, down.passes.quantize(h, h_wanted)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mlp(plan: Plan, x, anchors, codes, keys):
    gate, up, down = _linears(plan, anchors, codes, keys)
    (x_gate,), (x_up,) = _of_x(x, gate, up, "fprop_x")
    h = _of_h(plan, gate.fprop(x_gate, x.dtype), up.fprop(x_up, x.dtype), down)
    return down.fprop(h, x.dtype)


def _mlp_fwd(plan: Plan, x, anchors, codes, keys):
    gate, up, down = _linears(plan, anchors, codes, keys)
    weights = tuple(site.keep(fprop_again=plan.mode == "input") for site in (gate, up, down))
    roles = ("fprop_x",) if plan.mode == "input" else ("fprop_x", "wgrad_x")
    (x_gate, *gate_column), (x_up, *up_column) = _of_x(x, gate, up, *roles, kept=("wgrad_x",))
    g, u = gate.fprop(x_gate, x.dtype), up.fprop(x_up, x.dtype)
    y = down.fprop(_of_h(plan, g, u, down), x.dtype)
    columns = gate_column if _share(gate, up, "wgrad_x") else gate_column + up_column
    return y, (x if plan.mode == "input" else (columns, name_saved((g, u))), weights, keys)


def _restored(plan: Plan, saved, gate: Linear, up: Linear, dtype: jnp.dtype):
    """((wgrad's operands of x for gate and for up), (g, u)): loaded, or made again from x."""
    if plan.mode == "fast":
        columns, products = saved
        return (gate.load(columns[0], "wgrad_x"), up.load(columns[-1], "wgrad_x")), products
    (x_gate, gate_column), (x_up, up_column) = _of_x(saved, gate, up, "fprop_x", "wgrad_x")
    return (gate_column, up_column), (gate.fprop(x_gate, dtype), up.fprop(x_up, dtype))


def _mlp_bwd(plan: Plan, residuals, dy):
    saved, weights, keys = residuals
    parts = zip(plan.linears, weights, keys, strict=True)
    gate, up, down = linears = [Linear.restore(p, w, k, after=dy) for p, w, k in parts]
    (x_gate, x_up), (g, u) = _restored(plan, saved, gate, up, dy.dtype)
    dy_row, dy_column = down.quantize(dy, "dgrad_dy", "wgrad_dy")
    dh = down.dgrad(dy_row, dy.dtype)
    (dg_row, dg_column), (du_row, du_column), (h_column,) = _of_gradients(plan, g, u, dh, linears)
    dw = gate.wgrad(x_gate, dg_column), up.wgrad(x_up, du_column), down.wgrad(h_column, dy_column)
    dx = gate.dgrad(dg_row, dy.dtype) + up.dgrad(du_row, dy.dtype)
    return dx, dw, None, None


_mlp.defvjp(_mlp_fwd, _mlp_bwd)
