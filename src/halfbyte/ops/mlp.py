"""The MLP as one op: y = (silu(x Wg) * (x Wu)) Wd, with its nine GEMMs quantized and its own VJP.

It computes what three `qdot`s around `swiglu` compute, bit for bit, but as one op it quantizes x once for gate and up,
and decides what the backward pass keeps:

| mode    | kept of the activations                     | computed again in the backward pass |
|---------|---------------------------------------------|-------------------------------------|
| `fast`  | wgrad's operand of x (packed), g, u         | h                                   |
| `small` | fprop's and wgrad's operands of x (packed)  | g, u (two GEMMs), h                 |
| `input` | x as it came                                | the operands of x, g, u, h          |

`input` is for a caller whose remat policy makes x again, and then keeps nothing at all. Under bf16 `fast` keeps x, g, u
and the others keep x: as lean as the quantized ones.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from halfbyte.ops.backends import BACKENDS, Backend, check_training, choose, problem_of
from halfbyte.ops.backends.gemm import dgrad_axes, fprop_axes, wgrad_axes
from halfbyte.ops.operand import Kept, Operand, keep_named, name_saved
from halfbyte.ops.passes import XLA, Ask, XlaPasses, ask
from halfbyte.ops.qdot import token_block
from halfbyte.ops.weight import QWeight, check_kept, keep_weight, quantize_weight, remake_weight, weight_operand
from halfbyte.recipe import Recipe, site_key
from halfbyte.sharding import WeightSharding

SITES = ("gate", "up", "down")
MODES = ("fast", "small", "input")
Saved = jax.Array | tuple[tuple[Kept, ...], tuple[Kept, ...]]  # x, or its operands for wgrad and what is for g and u


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is settled before tracing, one entry a site where there are three."""

    backends: tuple[str, ...]
    recipes: tuple[Recipe, ...]
    shardings: tuple[WeightSharding | None, ...]
    weight_dtypes: tuple[jnp.dtype, ...]
    mode: str
    weights_kept: str


def mlp(
    x: jax.Array, gate: jax.Array | QWeight, up: jax.Array | QWeight, down: jax.Array | QWeight, *,
    recipe: Recipe | Mapping[str, Recipe], key: jax.Array | None = None, mode: str = "fast", backend: str = "auto",
    weight_shardings: Mapping[str, WeightSharding] | None = None, weights_kept: str = "master",
) -> jax.Array:  # fmt: skip
    """SwiGLU MLP of x [..., embed] with gate, up [embed, hidden] and down [hidden, embed], in x's dtype.

    `recipe` is one for all three linears or one each by the names gate, up, down; `key` is folded by those names.
    `mode` chooses what the backward pass keeps. Weights stay as packed codes; where a backend has none but a carrier,
    it is made again from the `master`, or with `weights_kept="codes"` stays, for a master that is itself a copy.
    """
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
    check_kept(weights_kept)
    recipes = _recipes(recipe)
    keys = tuple(None if key is None else site_key(key, site) for site in SITES)
    given, named = (gate, up, down), weight_shardings or {}
    shardings = tuple(w.sharding if isinstance(w, QWeight) else named.get(s) for s, w in zip(SITES, given, strict=True))
    _check(x, given, recipes)
    tokens = _token_view(x, recipes)
    backends = [choose(backend, problem_of(r, tokens, w, s)) for r, w, s in zip(recipes, given, shardings, strict=True)]
    weights = [
        w if isinstance(w, QWeight) else quantize_weight(w, recipe=r, key=k, weight_sharding=s, passes=b.passes)
        for w, r, k, s, b in zip(given, recipes, keys, shardings, backends, strict=True)
    ]
    dtypes = tuple(w.anchor.dtype for w in weights)
    plan = Plan(tuple(b.name for b in backends), recipes, shardings, dtypes, mode, weights_kept)
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


def _token_view(x: jax.Array, recipes: tuple[Recipe, ...]) -> jax.Array:
    if x.ndim == 1:
        return x[None]
    block = math.lcm(*(token_block(r) for r in recipes))
    return x if x.shape[-2] % block == 0 else x.reshape(-1, x.shape[-1])


@dataclasses.dataclass(frozen=True)
class _Site:
    """One of the three linears while it is traced."""

    backend: Backend
    recipe: Recipe
    weight: QWeight
    key: jax.Array | None

    def ask(self, role: str, *, kept: bool = False) -> Ask:
        return ask(self.recipe, role, self.key, kept=kept)

    def fprop(self, left: Operand, like: jax.Array) -> jax.Array:
        return self.backend.gemm(left, weight_operand(self.weight, "fprop_w"), fprop_axes(like), like.dtype)

    def dgrad(self, left: Operand, like: jax.Array) -> jax.Array:
        return self.backend.gemm(left, weight_operand(self.weight, "dgrad_w"), dgrad_axes(like), like.dtype)

    def wgrad(self, left: Operand, right: Operand, like: jax.Array, dtype: jnp.dtype) -> jax.Array:
        dw = self.backend.gemm(left, right, wgrad_axes(like), dtype)
        return dw if self.weight.sharding is None else lax.with_sharding_constraint(dw, self.weight.sharding.stored)


def _sites(plan: Plan, weights: Sequence[QWeight], keys) -> tuple[_Site, ...]:
    each = zip(plan.backends, weights, keys, strict=True)
    return tuple(_Site(BACKENDS[b], w.recipe, w, k) for b, w, k in each)


def _weights(plan: Plan, anchors, codes) -> list[QWeight]:
    each = zip(plan.recipes, plan.shardings, anchors, codes, strict=True)
    return [QWeight(a, fprop, dgrad, r, s) for r, s, a, (fprop, dgrad) in each]


def _passes(plan: Plan) -> XlaPasses:
    """The passes of the one backend of all three linears; plain ones if they differ."""
    return BACKENDS[plan.backends[0]].passes if len(set(plan.backends)) == 1 else XLA


def _x_asks(role: str, gate: _Site, up: _Site, *, kept: bool = False) -> list[Ask]:
    """One operand of x if gate and up read the same (equal policies, no random bits of their own), else two."""
    policy = getattr(gate.recipe, role)
    shared = policy == getattr(up.recipe, role) and not policy.stochastic
    return [site.ask(role, kept=kept) for site in ((gate,) if shared else (gate, up))]


def _one_operand(gate: _Site, up: _Site) -> bool:
    """Whether fprop and wgrad read x as one operand: no blocks, no transform, no random bits (bf16, FP8)."""
    policies = {getattr(site.recipe, role) for site in (gate, up) for role in ("fprop_x", "wgrad_x")}
    policy = next(iter(policies))
    return len(policies) == 1 and policy.format.block is None and not (policy.hadamard or policy.stochastic)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mlp(plan: Plan, x, anchors, codes, keys):
    gate, up, down = _sites(plan, _weights(plan, anchors, codes), keys)
    passes = _passes(plan)
    rows = passes.quantize(x, _x_asks("fprop_x", gate, up))
    (h,) = passes.swiglu(gate.fprop(rows[0], x), up.fprop(rows[-1], x), [down.ask("fprop_x")])
    return down.fprop(h, x)


def _mlp_fwd(plan: Plan, x, anchors, codes, keys):
    gate, up, down = _sites(plan, _weights(plan, anchors, codes), keys)
    for site in (gate, up, down):
        check_training(site.backend.name, site.recipe, x, site.weight, site.weight.sharding)
    passes = _passes(plan)
    rows, columns = _x_operands(passes, x, gate, up, mode=plan.mode)
    g, u = gate.fprop(rows[0], x), up.fprop(rows[-1], x)
    (h,) = passes.swiglu(g, u, [down.ask("fprop_x")])
    saved: Saved = x
    if plan.mode != "input":
        again = name_saved((g, u)) if plan.mode == "fast" else tuple(keep_named(o) for o in rows)
        saved = tuple(keep_named(o) for o in columns), () if rows is columns and plan.mode == "small" else again
    stays = tuple(_kept_weight(plan, site) for site in (gate, up, down))
    return down.fprop(h, x), (saved, stays, keys)


def _kept_weight(plan: Plan, site: _Site) -> QWeight:
    """With its master if the backward pass reads it: dgrad, or fprop once more, in bf16; or to make codes again."""
    again = plan.mode != "fast" and not site.recipe.fprop_w.format.quantized
    masters = again or not site.recipe.dgrad_w.format.quantized
    return keep_weight(site.weight, site.backend.passes, kept=plan.weights_kept, masters=masters)


def _x_operands(
    passes: XlaPasses, x: jax.Array, gate: _Site, up: _Site, *, mode: str, backward: bool = False
) -> tuple[list[Operand], list[Operand]]:
    """(fprop's, wgrad's) operands of x; one and the same list if both read one. Forward under `input` makes no second,
    which nobody would read.
    """
    one, keep = _one_operand(gate, up), mode != "input"
    row_kept = (mode == "fast" or backward) if one else mode == "small"
    row_asks = _x_asks("fprop_x", gate, up, kept=row_kept)
    second = not one and (keep or backward)
    made = passes.quantize(x, [*row_asks, *(_x_asks("wgrad_x", gate, up, kept=keep) if second else [])])
    rows, columns = made[: len(row_asks)], made[len(row_asks) :]
    return rows, columns if second else rows


def _restored(plan: Plan, saved: Saved, gate: _Site, up: _Site) -> tuple[list[Operand], list[Operand]]:
    """What `_x_operands` made, loaded or made again; under `fast` fprop's are not needed and not there."""
    passes = _passes(plan)
    if isinstance(saved, jax.Array):
        return _x_operands(passes, saved, gate, up, mode=plan.mode, backward=True)
    columns, again = saved
    kept_rows = () if plan.mode == "fast" else again or columns
    rows = [passes.load(k, site.recipe.fprop_x) for k, site in zip(kept_rows, (gate, up), strict=False)]
    return rows, [passes.load(k, site.recipe.wgrad_x) for k, site in zip(columns, (gate, up), strict=False)]


def _mlp_bwd(plan: Plan, residuals, dy):
    saved, stays, keys = residuals
    weights = [remake_weight(w, BACKENDS[b].passes, after=dy) for w, b in zip(stays, plan.backends, strict=True)]
    gate, up, down = _sites(plan, weights, keys)
    passes, dtypes = _passes(plan), plan.weight_dtypes
    rows, x_columns = _restored(plan, saved, gate, up)
    g, u = saved[1] if plan.mode == "fast" else (gate.fprop(rows[0], dy), up.fprop(rows[-1], dy))
    dy_row, dy_column = passes.quantize(dy, [down.ask("dgrad_dy"), down.ask("wgrad_dy")])
    dh = down.dgrad(dy_row, dy)
    dg_asks, du_asks = ([site.ask("dgrad_dy"), site.ask("wgrad_dy")] for site in (gate, up))
    (dg_row, dg_column), (du_row, du_column), (h_column,) = passes.swiglu_backward(
        g, u, dh, dg_asks, du_asks, [down.ask("wgrad_x")]
    )
    dwg = gate.wgrad(x_columns[0], dg_column, dy, dtypes[0])
    dwu = up.wgrad(x_columns[-1], du_column, dy, dtypes[1])
    dwd = down.wgrad(h_column, dy_column, dy, dtypes[2])
    dx = gate.dgrad(dg_row, dy) + up.dgrad(du_row, dy)
    return dx, (dwg, dwu, dwd), None, None


_mlp.defvjp(_mlp_fwd, _mlp_bwd)
