"""`apply_recipe`: somebody else's function with its matching dot products in a recipe."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from halfbyte.ops.rewrite.interpret import Interpreter
from halfbyte.ops.rewrite.kinds import for_this_model
from halfbyte.ops.rewrite.leaves import Leaves
from halfbyte.ops.rewrite.plan import Body, Planner
from halfbyte.ops.rewrite.report import Report, Site, show_once
from halfbyte.ops.surroundings import loop_with_one_key
from halfbyte.recipe import Policy, Recipe, Rule, as_recipe


@dataclass(frozen=True)
class _Traced:
    """One trace of the function: its jaxpr, the tree of its results, the plan, and what the plan replaces."""

    jaxpr: ClosedJaxpr
    out_tree: Any
    body: Body
    report: Report


@dataclass(eq=False)
class Rewritten:
    """See `apply_recipe`: a function of the same arguments, and `report`. Hashed and compared by identity."""

    fn: Callable[..., Any]
    policy: Policy
    key: Any
    argnums: tuple[int, ...]
    layers: tuple[str, ...]
    backend: str
    show: Callable[[Report], None] | None

    def __post_init__(self) -> None:
        functools.update_wrapper(self, self.fn)
        if self.key is None and any(rule.recipe and rule.recipe.stochastic for rule in self.policy.rules):
            raise ValueError(
                f"apply_recipe: policy {self.policy.name!r} holds a recipe that rounds stochastically and needs "
                "key=: this step's key, or a function that returns it"
            )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """fn(*args, **kwargs) with the matching dots in their recipes."""
        leaves = Leaves.of(self.fn, args, kwargs, self.argnums)
        traced = self._trace(leaves)
        if self.show is not None:
            self.show(traced.report)
        key = self.key() if callable(self.key) else self.key
        if key is not None and traced.report.replaced:
            _refuse_shared_key(key)
        outs = Interpreter(self.backend).run(traced.jaxpr.jaxpr, traced.jaxpr.consts, traced.body, key, leaves.arrays)
        result, written = jax.tree.unflatten(traced.out_tree, outs)
        leaves.write(written)
        return result

    def report(self, *args: Any, **kwargs: Any) -> Report:
        """What is replaced and what is left, and why, for these arguments; nothing is computed."""
        return self._trace(Leaves.of(self.fn, args, kwargs, self.argnums)).report

    def _trace(self, leaves: Leaves) -> _Traced:
        jaxpr, shapes = jax.make_jaxpr(leaves.call(self.fn), return_shape=True)(*leaves.arrays)
        origins = leaves.origins(self.layers)
        policy = for_this_model(self.policy, jaxpr.jaxpr, origins)
        planner = Planner(policy, self.backend)
        body = planner.body(jaxpr.jaxpr, origins)
        report = Report(tuple(planner.sites))
        _refuse_idle_rules(policy, self.policy.rules, planner.used, report)
        return _Traced(jaxpr, jax.tree.structure(shapes), body, report)


def apply_recipe(
    fn: Callable[..., Any],
    policy: Policy | Recipe | str,
    *,
    key: Any = None,
    argnums: int | Sequence[int] = 0,
    layers: str | Sequence[str] = (),
    backend: str = "auto",
    show: Callable[[Report], None] | None = show_once,
) -> Rewritten:
    """`fn` with every matching dot product in its recipe, forward and backward; to be differentiated, never a
    derivative itself.

    A dot matches by the path of the weight that reaches it: a floating-point leaf of the arguments `argnums`, followed
    through whatever depends on weights alone (casts, reshapes, slices, scales, masks, gathers). The path is the leaf's
    inside its argument, joined by `/`; a bare array has its parameter's name. A dot that no rule matches stays as it
    is. A policy's rule that matches nothing is an error; a recipe alone, or its name, stands for a rule for all
    weights. The named policies find the MLPs and the attention of the tree they are given. Works through jit, remat,
    scan, while, cond and shard_map. Dots with batch dims, inside custom_vjp or custom_jvp functions, or whose shape
    the recipe cannot cut into blocks are left alone, and so are ragged dots and convolutions. `report(*args)` says
    what was replaced, what was left, and why; `show` gets that report at each trace (by default it is printed once, on
    stderr).

    A rule's `layers` are counted by the number in a path (`layers/3/w`, `block_3/w`), else by the stacked leaf that a
    scan runs over. `layers=` says it where that is wrong: `"blocks/{layer}/*"` for the place of the number,
    `"stack/*"` for leaves that are stacks.

    Each call traces `fn` anew: call it inside `jax.jit`. `key` is this step's key or a function that returns it. A
    dot of weight PATH takes `site_key(key, PATH)`, and inside a scan `site_key(layer_key(key, iteration), PATH)`; the
    second use of a weight is PATH#2. Under `shard_map` that is folded with the device's place along each axis on which
    operands vary. Inside a loop of the caller's own the key must be computed from what the loop gives its body (its
    counter); one that stays the same is refused. The result has no second derivative, and says so.
    """
    if isinstance(policy, Recipe | str):
        made = as_recipe(policy, "apply_recipe")
        policy = Policy(f"all weights in {made.name}", (Rule("*", made),))
    if not isinstance(policy, Policy):
        raise TypeError(f"apply_recipe: policy must be a Policy, a Recipe or a recipe's name, got {policy!r}")
    for rule in policy.rules:
        if rule.recipe is not None:
            rule.recipe.refuse_foreign("apply_recipe")
    numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    patterns = (layers,) if isinstance(layers, str) else tuple(layers)
    return Rewritten(fn, policy, key, numbers, patterns, backend, show)


def _refuse_shared_key(key: jax.Array) -> None:
    loop = loop_with_one_key(key)
    if loop is not None:
        raise ValueError(
            f"apply_recipe: its key is the same in every iteration of the {loop} around it, so that all of them would "
            "round with the same random bits and their errors would not average out; fold the loop's counter in: "
            "key=layer_key(key, i), from halfbyte.recipe"
        )


def _refuse_idle_rules(policy: Policy, written: Sequence[Rule], used: set[Rule], report: Report) -> None:
    """A rule as it was `written` decides something; of those that a named one stands for, any does."""
    for rule in policy.rules:
        if rule in used or (rule not in written and report.replaced):
            continue
        fits = [site for site in report.sites if site.path and rule.matches(site.path.partition("#")[0])]
        if fits:
            why = "; ".join(f"{site.path}: {site.why_left or f'decided as {site.recipe}'}" for site in fits)
            why += f"; it is for layers {rule.layers}, and these are {_layers_of(fits)}" if rule.layers else ""
        else:
            weights = dict.fromkeys(site.path for site in report.sites if site.path)
            why = f"the weights of dots are {', '.join(weights) or 'none'}"
        raise ValueError(
            f"apply_recipe: rule {rule.pattern!r} of policy {policy.name!r} matches nothing ({why}); change or "
            "remove it"
        )


def _layers_of(sites: Sequence[Site]) -> str:
    found = sorted({layer for site in sites for layer in site.layers or ()})
    return ", ".join(map(str, found)) or "not known"
