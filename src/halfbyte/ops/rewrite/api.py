"""`apply_recipe`: somebody else's function with its matching dot products in a recipe."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from halfbyte.ops.rewrite.interpret import Interpreter
from halfbyte.ops.rewrite.origin import Origin, leaf_origins
from halfbyte.ops.rewrite.plan import Body, Planner
from halfbyte.ops.rewrite.report import Report, show_once
from halfbyte.recipe import Policy, Recipe, Rule


@dataclass(frozen=True)
class _Traced:
    """One trace of the function: its jaxpr, the tree of its results, the plan, and what the plan replaces."""

    jaxpr: Any
    out_tree: Any
    body: Body
    report: Report


@dataclass
class Rewritten:
    """See `apply_recipe`: a function of the same arguments, and `report`."""

    fn: Callable[..., Any]
    policy: Policy
    key: Any
    argnums: tuple[int, ...]
    backend: str
    show: Callable[[Report], None] | None

    def __post_init__(self) -> None:
        functools.update_wrapper(self, self.fn)
        if self.key is None and any(rule.recipe.stochastic for rule in self.policy.rules):
            raise ValueError(
                f"apply_recipe: policy {self.policy.name!r} holds a recipe that rounds stochastically and needs "
                "key=: this step's "
                "key, or a function that returns it"
            )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """fn(*args, **kwargs) with the matching dots in their recipes."""
        leaves = _Leaves.of(self.fn, args, kwargs, self.argnums)
        traced = self._trace(leaves)
        if self.show is not None:
            self.show(traced.report)
        key = self.key() if callable(self.key) else self.key
        outs = Interpreter(self.backend).run(traced.jaxpr.jaxpr, traced.jaxpr.consts, traced.body, key, leaves.arrays)
        return jax.tree.unflatten(traced.out_tree, outs)

    def report(self, *args: Any, **kwargs: Any) -> Report:
        """What is replaced and what is left, and why, for these arguments; nothing is computed."""
        return self._trace(_Leaves.of(self.fn, args, kwargs, self.argnums)).report

    def _trace(self, leaves: _Leaves) -> _Traced:
        jaxpr, shapes = jax.make_jaxpr(leaves.call(self.fn), return_shape=True)(*leaves.arrays)
        planner = Planner(self.policy)
        body, _ = planner.body(jaxpr.jaxpr, leaves.origins())
        report = Report(tuple(planner.sites))
        _refuse_idle_rules(self.policy, planner.used, report)
        return _Traced(jaxpr, jax.tree.structure(shapes), body, report)


@dataclass(frozen=True)
class _Leaves:
    """The arguments of one call: arrays to trace, everything else as it is, and the path of each weight."""

    tree: Any
    arrays: list[Any]
    static: tuple[tuple[int, Any], ...]
    paths: tuple[str | None, ...]

    @classmethod
    def of(cls, fn: Callable[..., Any], args: tuple, kwargs: dict, argnums: tuple[int, ...]) -> _Leaves:
        if argnums and max(argnums) >= len(args):
            raise ValueError(
                f"apply_recipe: argnums={argnums} names an argument that was not passed by position; got "
                f"{len(args)} of them"
            )
        names = _argument_names(fn, len(args))
        flat, tree = jax.tree_util.tree_flatten_with_path((args, kwargs))
        arrays, static, paths = [], [], []
        for at, (path, leaf) in enumerate(flat):
            if not _is_array(leaf):
                static.append((at, leaf))
                continue
            arrays.append(leaf)
            is_weight = (
                path[0].idx == 0 and path[1].idx in argnums and jax.numpy.issubdtype(leaf.dtype, jax.numpy.floating)
            )
            inside = jax.tree_util.keystr(path[2:], simple=True, separator="/")
            paths.append((inside or names[path[1].idx]) if is_weight else None)
        return cls(tree, arrays, tuple(static), tuple(paths))

    def call(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """fn as a function of the arrays alone."""

        def positional(*arrays: Any) -> Any:
            leaves = list(arrays)
            for at, leaf in self.static:
                leaves.insert(at, leaf)
            args, kwargs = jax.tree.unflatten(self.tree, leaves)
            return fn(*args, **kwargs)

        return positional

    def origins(self) -> list[Origin | None]:
        """The origin of each array; None for those that are no weights."""
        at = [i for i, path in enumerate(self.paths) if path is not None]
        found = leaf_origins([self.paths[i] or "" for i in at], [self.arrays[i].shape for i in at])
        by_index = dict(zip(at, found, strict=True))
        return [by_index.get(i) for i in range(len(self.arrays))]


def apply_recipe(
    fn: Callable[..., Any],
    policy: Policy | Recipe,
    *,
    key: Any = None,
    argnums: int | Sequence[int] = 0,
    backend: str = "auto",
    show: Callable[[Report], None] | None = show_once,
) -> Rewritten:
    """`fn` with every matching dot product in its recipe, forward and backward; to be differentiated, never a
    derivative itself.

    A dot matches by the path of the weight that reaches it: a floating-point leaf of the arguments `argnums`, through
    casts, reshapes, transposes and slices. The path is the leaf's inside its argument, joined by `/`; a bare array
    has its parameter's name. A dot that no rule matches stays as it is. A policy's rule that matches nothing is an
    error; a recipe alone stands for a rule for all weights. Works through jit, remat, scan, while and cond. Dots with
    batch dims, inside custom_vjp or custom_jvp functions, or whose weight is computed first are left alone.
    `report(*args)` says what was replaced, what was left, and why; `show` gets that report at each trace (by default
    it is printed once, on stderr).

    Each call traces `fn` anew: call it inside `jax.jit`. `key` is this step's key or a function that returns it. A
    dot of weight PATH takes `site_key(key, PATH)`, and inside a scan `site_key(layer_key(key, iteration), PATH)`; the
    second use of a weight is PATH#2.
    """
    if isinstance(policy, Recipe):
        policy = Policy(f"all weights in {policy.name}", (Rule("*", policy),))
    if not isinstance(policy, Policy):
        raise TypeError(f"apply_recipe: policy must be a Policy or a Recipe, got {policy!r}")
    numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    return Rewritten(fn, policy, key, numbers, backend, show)


def _refuse_idle_rules(policy: Policy, used: set[Rule], report: Report) -> None:
    for rule in policy.rules:
        if rule in used:
            continue
        fits = [site for site in report.sites if site.path and rule.matches(site.path.partition("#")[0])]
        if fits:
            why = "; ".join(f"{site.path}: {site.why_left or f'decided as {site.recipe}'}" for site in fits)
        else:
            weights = dict.fromkeys(site.path for site in report.sites if site.path)
            why = f"the weights of dots are {', '.join(weights) or 'none'}"
        raise ValueError(
            f"apply_recipe: rule {rule.pattern!r} of policy {policy.name!r} matches nothing ({why}); change or "
            "remove it"
        )


def _argument_names(fn: Callable[..., Any], count: int) -> list[str]:
    try:
        names = list(inspect.signature(fn).parameters)
    except (TypeError, ValueError):
        names = []
    return [names[i] if i < len(names) else f"arg{i}" for i in range(count)]


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")
