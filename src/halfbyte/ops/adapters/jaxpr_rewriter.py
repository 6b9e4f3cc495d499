"""`apply_recipe`: runs a function with its matching dot products in a recipe.

A call is split into arrays to trace, static arguments, and the paths of the weights (`TracedArguments`). An NNX module
is split into graph and state and merged again inside the traced function. So shared weights stay shared, and what the
function writes into the module (batch statistics, dropout counters) is an output that updates the caller's module.
"""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from halfbyte.ops.adapters.jaxpr_interpreter import JaxprInterpreter
from halfbyte.ops.adapters.model_structure import expand_named_policy, leaves_experts, weight_origins
from halfbyte.ops.adapters.rewrite_plan import JaxprPlan, RewritePlanner
from halfbyte.ops.adapters.rewrite_report import DotReport, RewriteReport, mark_shown, show_once
from halfbyte.ops.adapters.weight_provenance import CONSTANT, Value
from halfbyte.ops.trace_context import loop_reusing_key
from halfbyte.recipes import Policy, Recipe, Rule, as_recipe
from halfbyte.renamed import renamed_parameters


@renamed_parameters()
def apply_recipe(
    fn: Callable[..., Any],
    policy: Policy | Recipe | str,
    *,
    key: Any = None,
    argnums: int | Sequence[int] = 0,
    layers: str | Sequence[str] = (),
    backend: str = "auto",
    show: Callable[[RewriteReport], None] | None = show_once,
) -> RewrittenFunction:
    """Returns `fn` with every matching dot product in its recipe, forward and backward.

    `fn` may be differentiated afterwards; it must not be a derivative itself.

    A dot matches by the path of the weight that reaches it: a floating-point leaf of the arguments `argnums`, followed
    through operations that depend on weights only (casts, reshapes, slices, scales, masks, gathers). The path is the
    leaf's inside its argument, joined by `/`; a bare array has its parameter's name. A dot that no rule matches stays
    as it is. A policy's rule that matches nothing is an error. A recipe, or its name, is a rule for all weights. The
    named policies detect the MLPs and the attention of the model. Works through jit, remat, scan, while, cond and
    shard_map. Dots with batch dims, inside custom_vjp or custom_jvp functions, or whose shape the recipe's blocks do
    not divide are not replaced, nor are ragged dots and convolutions. `report(*args)` lists which dots were replaced,
    which were not, and why. `show` gets that report at each trace (by default it is printed once, on stderr).

    A rule's `layers` are counted by the number in a path (`layers/3/w`, `block_3/w`), else by the stacked leaf that a
    scan runs over. `layers=` overrides this: `"blocks/{layer}/*"` is the position of the number, `"stack/*"`
    are leaves that are stacks.

    Each call traces `fn` anew: call it inside `jax.jit`. `key` is this step's key or a function that returns it. A
    dot of weight PATH takes `site_key(key, PATH)`, and inside a scan `site_key(layer_key(key, iteration), PATH)`; the
    second use of a weight is PATH#2. Under `shard_map` that is folded with the device's index along each axis on which
    operands vary. Inside a loop of the caller the key must be computed from the arguments of the body (its counter);
    one that stays the same is refused. A second derivative of the result raises an error.
    """
    if isinstance(policy, Recipe | str):
        recipe = as_recipe(policy, "apply_recipe")
        policy = Policy(f"all weights in {recipe.name}", (Rule("*", recipe),))
    if not isinstance(policy, Policy):
        raise TypeError(f"apply_recipe: policy must be a Policy, a Recipe or a recipe's name, got {policy!r}")
    for rule in policy.rules:
        if rule.recipe is not None:
            rule.recipe.check_supported_outside_trainer("apply_recipe")
    numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    patterns = (layers,) if isinstance(layers, str) else tuple(layers)
    return RewrittenFunction(fn, policy, key, numbers, patterns, backend, show)


@dataclass(eq=False)
class RewrittenFunction:
    """See `apply_recipe`: a function of the same arguments, and `report`. Hashed and compared by identity."""

    fn: Callable[..., Any]
    policy: Policy
    key: Any
    argnums: tuple[int, ...]
    layers: tuple[str, ...]
    backend: str
    show: Callable[[RewriteReport], None] | None

    def __post_init__(self) -> None:
        functools.update_wrapper(self, self.fn)
        if self.key is None and any(rule.recipe and rule.recipe.stochastic for rule in self.policy.rules):
            raise ValueError(
                f"apply_recipe: policy {self.policy.name!r} holds a recipe that rounds stochastically and needs "
                "key=: this step's key, or a function that returns it"
            )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns fn(*args, **kwargs) with the matching dots in their recipes."""
        leaves = TracedArguments.from_call(self.fn, args, kwargs, self.argnums)
        traced = self._trace(leaves)
        if self.show is not None:
            self.show(traced.report)
        key = self.key() if callable(self.key) else self.key
        if key is not None and traced.report.replaced:
            _refuse_shared_key(key)
        outs = JaxprInterpreter(self.backend).run(
            traced.jaxpr.jaxpr, traced.jaxpr.consts, traced.body, key, leaves.arrays
        )
        result, written = jax.tree.unflatten(traced.out_tree, outs)
        leaves.write(written)
        return result

    def report(self, *args: Any, **kwargs: Any) -> RewriteReport:
        """Returns which dots are replaced and which are not, and why, for these arguments; nothing is computed. A trace
        does not print the same report again."""
        report = self._trace(TracedArguments.from_call(self.fn, args, kwargs, self.argnums)).report
        mark_shown(report)
        return report

    def _trace(self, leaves: TracedArguments) -> _TracedFunction:
        jaxpr, shapes = jax.make_jaxpr(leaves.call(self.fn), return_shape=True)(*leaves.arrays)
        origins = leaves.origins(self.layers)
        policy = expand_named_policy(self.policy, jaxpr.jaxpr, origins)
        planner = RewritePlanner(policy, self.backend)
        body = planner.body(jaxpr.jaxpr, origins)
        report = RewriteReport(tuple(planner.sites))
        _refuse_idle_rules(policy, self.policy.rules, planner.used, report)
        return _TracedFunction(jaxpr, jax.tree.structure(shapes), body, report)


@dataclass(frozen=True)
class _TracedFunction:
    """One trace of the function: its jaxpr, the tree of its results, the plan and the report of the plan."""

    jaxpr: ClosedJaxpr
    out_tree: Any
    body: JaxprPlan
    report: RewriteReport


def _refuse_shared_key(key: jax.Array) -> None:
    loop = loop_reusing_key(key)
    if loop is not None:
        raise ValueError(
            f"apply_recipe: its key is the same in every iteration of the {loop} around it, so that all of them would "
            "round with the same random bits and their errors would not average out; fold the loop's counter in: "
            "key=layer_key(key, i), from halfbyte.recipes"
        )


def _refuse_idle_rules(policy: Policy, written: Sequence[Rule], used: set[Rule], report: RewriteReport) -> None:
    """Raises ValueError for a rule that matches no dot. Of the rules that expand a named one, one match is enough."""
    for rule in policy.rules:
        if rule in used or (rule not in written and report.replaced):
            continue
        if any(leaves_experts(rule, site.path or "") for site in report.skipped):
            warnings.warn(
                f"apply_recipe: policy {policy.name!r} replaces no dot for its rule {rule.pattern!r}: the MLPs of this "
                "model are experts, which stay as they are; choose all_linear for its attention",
                stacklevel=4,
            )
            continue
        matched = [site for site in report.sites if site.path and rule.matches(site.path.partition("#")[0])]
        if matched:
            why = "; ".join(f"{site.path}: {site.skip_reason or f'decided as {site.recipe}'}" for site in matched)
            why += f"; it is for layers {rule.layers}, and these are {_layers_of(matched)}" if rule.layers else ""
        else:
            weights = dict.fromkeys(site.path for site in report.sites if site.path)
            why = f"the weights of dots are {', '.join(weights) or 'none'}"
        raise ValueError(
            f"apply_recipe: rule {rule.pattern!r} of policy {policy.name!r} matches nothing ({why}); change or "
            "remove it"
        )


def _layers_of(sites: Sequence[DotReport]) -> str:
    layers = sorted({layer for site in sites for layer in site.layers or ()})
    return ", ".join(map(str, layers)) or "not known"


@functools.partial(jax.tree_util.register_dataclass, data_fields=["state"], meta_fields=["graph"])
@dataclass(frozen=True)
class _SplitNnxModule:
    """An NNX module as a pytree of its state, each shared variable once."""

    state: Any
    graph: Any


@dataclass(frozen=True)
class TracedArguments:
    """The leaves of a call; see `from_call`."""

    tree: jax.tree_util.PyTreeDef
    arrays: list[jax.Array]
    static: tuple[tuple[int, object], ...]
    values: list[str | Value]  # the path of a weight; CONSTANT for a mask; None for data
    modules: list[Any]

    @classmethod
    def from_call(cls, fn: Callable[..., Any], args: tuple, kwargs: dict, argnums: tuple[int, ...]) -> TracedArguments:
        """Flattens the arguments of fn(*args, **kwargs); the leaves of arguments `argnums` are weights."""
        if argnums and max(argnums) >= len(args):
            raise ValueError(
                f"apply_recipe: argnums={argnums} names an argument that was not passed by position; got "
                f"{len(args)} of them"
            )
        names = _argument_names(fn, len(args))
        modules = [leaf for leaf in jax.tree.leaves((args, kwargs), is_leaf=_is_nnx) if _is_nnx(leaf)]
        opened = jax.tree.map(_split_module, (args, kwargs), is_leaf=_is_nnx) if modules else (args, kwargs)
        flat, tree = jax.tree_util.tree_flatten_with_path(opened)
        arrays, static, values = [], [], []
        for index, (path, leaf) in enumerate(flat):
            if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
                static.append((index, leaf))
                continue
            arrays.append(leaf)
            weights = path[0].idx == 0 and path[1].idx in argnums
            values.append(_value(leaf, _path(path[2:]) or names[path[1].idx]) if weights else None)
        return cls(tree, arrays, tuple(static), values, modules)

    def call(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Returns fn as a function of the arrays: (its result, the changed state of its modules)."""

        def positional(*arrays: jax.Array) -> Any:
            leaves: list[object] = list(arrays)
            for index, leaf in self.static:
                leaves.insert(index, leaf)
            modules: list[Any] = []
            args, kwargs = jax.tree.map(
                functools.partial(_merge_module, modules), jax.tree.unflatten(self.tree, leaves), is_leaf=_is_opened
            )
            result = fn(*args, **kwargs)
            return result, [_changed_state(module, before) for module, before in modules]

        return positional

    def write(self, written: Sequence[Any]) -> None:
        """Updates the caller's modules with the state that the traced function changed."""
        for module, state in zip(self.modules, written, strict=True):
            if jax.tree.leaves(state):
                sys.modules["flax.nnx"].update(module, state)

    def origins(self, patterns: Sequence[str]) -> list[Value]:
        """Returns the provenance of each array; None for those that are no weights."""
        indices = [i for i, value in enumerate(self.values) if isinstance(value, str)]
        origins = weight_origins(
            [str(self.values[i]) for i in indices], [self.arrays[i].shape for i in indices], patterns
        )
        by_index = dict(zip(indices, origins, strict=True))
        return [by_index.get(i, None if isinstance(v, str) else v) for i, v in enumerate(self.values)]


def _value(leaf: Any, path: str) -> str | Value:
    """Classifies a leaf: floating point is a weight, bool a mask; integers and keys may come from data."""
    if leaf.dtype == bool:
        return CONSTANT
    return path if jax.numpy.issubdtype(leaf.dtype, jax.numpy.floating) else None


def _path(entries: tuple[Any, ...]) -> str:
    """Joins the entries by `/`, without the wrappers of NNX variables and named arrays around an array."""
    attributes = [getattr(entry, "name", None) for entry in entries]
    if "state" in attributes and attributes[-1] == "value":
        state = attributes.index("state")
        entries = (*entries[:state], *entries[state + 1 : -1])
    if len(entries) > 1 and isinstance(entries[-1], jax.tree_util.FlattenedIndexKey):  # the array in a named array
        entries = entries[:-1]
    return jax.tree_util.keystr(entries, simple=True, separator="/")


def _is_nnx(leaf: object) -> bool:
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(leaf, nnx.Module)


def _is_opened(leaf: object) -> bool:
    return isinstance(leaf, _SplitNnxModule)


def _split_module(leaf: Any) -> Any:
    if not _is_nnx(leaf):
        return leaf
    graph, state = sys.modules["flax.nnx"].split(leaf)
    return _SplitNnxModule(state, graph)


def _merge_module(modules: list[Any], leaf: Any) -> Any:
    if not _is_opened(leaf):
        return leaf
    nnx = sys.modules["flax.nnx"]
    module = nnx.merge(leaf.graph, leaf.state)
    modules.append(
        (module, {path: jax.tree.leaves(variable) for path, variable in nnx.to_flat_state(nnx.state(module))})
    )
    return module


def _changed_state(module: Any, before: dict[Any, Any]) -> Any:
    """Returns the state of a module that differs from `before`."""
    nnx = sys.modules["flax.nnx"]

    def changed(path: Any, variable: Any) -> bool:
        old, new = before.get(path, []), jax.tree.leaves(variable)
        return len(old) != len(new) or any(a is not b for a, b in zip(old, new, strict=True))

    after = nnx.to_flat_state(nnx.state(module))
    return nnx.from_flat_state([(path, variable) for path, variable in after if changed(path, variable)])


def _argument_names(fn: Callable[..., Any], count: int) -> list[str]:
    try:
        names = list(inspect.signature(fn).parameters)
    except (TypeError, ValueError):
        names = []
    return [names[i] if i < len(names) else f"arg{i}" for i in range(count)]
