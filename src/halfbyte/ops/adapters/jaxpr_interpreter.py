"""Evaluates a jaxpr under a plan: planned dots run as `qdot`, all other equations unchanged.

jit, remat, scan, cond, while and shard_map are rebuilt around bodies in which dots are replaced.

The key is passed down with the values. It is folded with the iteration in each scan or while loop, with the site's name
at each dot, and with the device's index under `shard_map`. Except under `shard_map` a dot has the bits of
`qdot(x, w, key=site_key(layer_key(key, iteration), path))` written by hand.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun
from jax.sharding import PartitionSpec

from halfbyte.devices.jax_versions import scan_counts
from halfbyte.ops.adapters.dot_general import (
    DotConfig,
    dot_as_linear,
    dots_as_linears,
    swiglu_from_dots,
    transpose_weight_dims_first,
)
from halfbyte.ops.adapters.rewrite_plan import (
    JIT,
    REMAT_PRIMITIVES,
    DotReplacement,
    JaxprPlan,
    NestedPlans,
    ScanSegments,
    Step,
)
from halfbyte.ops.adapters.weight_provenance import aval, unclose_jaxpr
from halfbyte.recipes import layer_key, site_key

OptionalKey = jax.Array | None
JaxprFn = Callable[[OptionalKey, Sequence[jax.Array]], list[jax.Array]]


@dataclass
class JaxprInterpreter:
    """Evaluates jaxprs under plans, with one backend."""

    backend: str

    def run(
        self, jaxpr: Jaxpr, consts: Sequence[jax.Array], body: JaxprPlan, key: OptionalKey, args: Sequence[jax.Array]
    ) -> list[jax.Array]:
        """Returns the outputs of the jaxpr under its plan."""
        env: dict[Var, jax.Array] = dict(zip(jaxpr.constvars, consts, strict=True))
        env.update(zip(jaxpr.invars, args, strict=True))
        for unit in body.order:
            eqns, steps = [jaxpr.eqns[i] for i in unit.eqns], [body.steps[i] for i in unit.eqns]
            dots = [step for step in steps if isinstance(step, DotReplacement)]
            with eqns[0].ctx.manager:
                if unit.swiglu:
                    env[eqns[2].outvars[0]] = self._swiglu(eqns[:3], dots, key, env)
                    continue
                values = [[_read_env(env, var) for var in eqn.invars] for eqn in eqns]
                if len(eqns) > 1:
                    outs = self._dots(eqns, dots, key, values)
                elif steps[0] is None:
                    outs = _bind(eqns[0], values[0])
                else:
                    outs = self._step(eqns[0], steps[0], key, values[0])
            env.update(zip((var for eqn in eqns for var in eqn.outvars), outs, strict=True))
        return [_read_env(env, var) for var in jaxpr.outvars]

    def _step(self, eqn: JaxprEqn, step: Step, key: OptionalKey, values: list[jax.Array]) -> list[jax.Array]:
        if isinstance(step, DotReplacement):
            return [self._dot(eqn, step, key, values)]
        if isinstance(step, ScanSegments):
            return self._scan(eqn, step, key, values)
        name = eqn.primitive.name
        if name == "cond":
            return self._cond(eqn, step, key, values)
        if name == "while":
            return self._while(eqn, step, key, values)
        inner = self._function(eqn.params["jaxpr" if "jaxpr" in eqn.params else "call_jaxpr"], step.bodies[0])
        if name in REMAT_PRIMITIVES:
            inner = jax.checkpoint(inner, policy=eqn.params["policy"], prevent_cse=eqn.params["prevent_cse"])
        elif name == "shard_map":
            inner = _shard_map(eqn, inner)
        elif name in JIT:
            inner = _jit(eqn, inner)
        return inner(key, values)

    def _function(self, jaxpr: Jaxpr | ClosedJaxpr, body: JaxprPlan) -> JaxprFn:
        opened, consts = unclose_jaxpr(jaxpr), getattr(jaxpr, "consts", ())
        return lambda key, values: self.run(opened, consts, body, key, values)

    def _dot(self, eqn: JaxprEqn, dot: DotReplacement, key: OptionalKey, values: list[jax.Array]) -> jax.Array:
        x, w, dims = _dot_operands(eqn, dot, values)
        out = aval(eqn.outvars[0])
        with _add_dot_names_to_errors(dot):
            y = dot_as_linear(
                x,
                w,
                dims,
                how=DotConfig(dot.recipe, self.backend, out.dtype),
                key=_site_key(key, dot),
                out_sharding=_weight_dims_last_sharding(
                    eqn.params["out_sharding"], out.ndim, dot.weight, w.ndim - len(dims[1])
                ),
            )
        return y if dot.weight == 1 else transpose_weight_dims_first(y, x.ndim - len(dims[0]))

    def _dots(
        self, eqns: list[JaxprEqn], dots: list[DotReplacement], key: OptionalKey, values: list[list[jax.Array]]
    ) -> list[jax.Array]:
        """Computes dots of one x, which is quantized once."""
        sides = [_dot_operands(*dot) for dot in zip(eqns, dots, values, strict=True)]
        config = DotConfig(dots[0].recipe, self.backend, aval(eqns[0].outvars[0]).dtype)
        keys = [_site_key(key, dot) for dot in dots]
        with _add_dot_names_to_errors(*dots):
            ys = dots_as_linears(sides, how=config, keys=keys)
        pairs = zip(ys, dots, sides, strict=True)
        return [
            y if dot.weight == 1 else transpose_weight_dims_first(y, x.ndim - len(d[0])) for y, dot, (x, _, d) in pairs
        ]

    def _swiglu(
        self, eqns: list[JaxprEqn], dots: list[DotReplacement], key: OptionalKey, env: dict[Var, jax.Array]
    ) -> jax.Array:
        """Computes (silu(x Wg) * (x Wu)) Wd of the matrices gate, up and down as one op."""
        gate, up, down = (_read_env(env, eqn.invars[1]) for eqn in eqns)
        keys, x = tuple(_site_key(key, dot) for dot in dots), _read_env(env, eqns[0].invars[0])
        with _add_dot_names_to_errors(*dots):
            return swiglu_from_dots(x, (gate, up, down), keys=keys, recipe=dots[0].recipe, backend=self.backend)

    def _scan(self, eqn: JaxprEqn, split: ScanSegments, key: OptionalKey, values: list[jax.Array]) -> list[jax.Array]:
        params = eqn.params
        num_consts, carries = scan_counts(params, eqn.invars)
        consts, carry, xs = (
            values[:num_consts],
            values[num_consts : num_consts + carries],
            values[num_consts + carries :],
        )
        segment_ys: dict[int, list[jax.Array]] = {}
        for start, stop, body in reversed(split.segments) if params["reverse"] else split.segments:
            inner = self._function(params["jaxpr"], body)

            def iterate(
                carry: list[jax.Array], item: tuple[jax.Array, list[jax.Array]], inner: JaxprFn = inner
            ) -> tuple[list[jax.Array], list[jax.Array]]:
                layer, slices = item
                outs = inner(_fold_in_iteration(key, layer), [*consts, *carry, *slices])
                return outs[: len(carry)], outs[len(carry) :]

            single = len(split.segments) == 1
            items = jnp.arange(start, stop), [x if single else lax.slice_in_dim(x, start, stop) for x in xs]
            unroll = max(1, min(params["unroll"], stop - start))
            carry, segment_ys[start] = lax.scan(iterate, carry, items, reverse=params["reverse"], unroll=unroll)
        ys = [segment_ys[start] for start in sorted(segment_ys)]
        return [*carry, *(parts[0] if len(ys) == 1 else lax.concatenate(parts, 0) for parts in zip(*ys, strict=True))]

    def _cond(self, eqn: JaxprEqn, step: NestedPlans, key: OptionalKey, values: list[jax.Array]) -> list[jax.Array]:
        pairs = zip(eqn.params["branches"], step.bodies, strict=True)
        branches = [self._function(branch, body) for branch, body in pairs]
        return lax.switch(values[0], branches, key, values[1:])

    def _while(self, eqn: JaxprEqn, step: NestedPlans, key: OptionalKey, values: list[jax.Array]) -> list[jax.Array]:
        cond_end, body_end = eqn.params["cond_nconsts"], eqn.params["cond_nconsts"] + eqn.params["body_nconsts"]
        condition = jaxpr_as_fun(eqn.params["cond_jaxpr"])
        inner = self._function(eqn.params["body_jaxpr"], step.bodies[0])

        def keep_going(state: tuple[jax.Array, list[jax.Array]]) -> jax.Array:
            return condition(*values[:cond_end], *state[1])[0]

        def iterate(state: tuple[jax.Array, list[jax.Array]]) -> tuple[jax.Array, list[jax.Array]]:
            count, carry = state
            return count + 1, inner(_fold_in_iteration(key, count), [*values[cond_end:body_end], *carry])

        return lax.while_loop(keep_going, iterate, (jnp.int32(0), values[body_end:]))[1]


def _dot_operands(
    eqn: JaxprEqn, dot: DotReplacement, values: list[jax.Array]
) -> tuple[jax.Array, jax.Array, tuple[Any, Any]]:
    """Returns (x, the weight, (contracted dims of x, contracted dims of the weight))."""
    (lhs, rhs), _ = eqn.params["dimension_numbers"]
    return values[1 - dot.weight], values[dot.weight], (lhs, rhs) if dot.weight == 1 else (rhs, lhs)


def _site_key(key: OptionalKey, dot: DotReplacement) -> OptionalKey:
    return site_key(key, dot.site) if key is not None and dot.recipe.stochastic else None


@contextlib.contextmanager
def _add_dot_names_to_errors(*dots: DotReplacement) -> Iterator[None]:
    """Adds the sites of the dots to a ValueError raised inside."""
    try:
        yield
    except ValueError as error:
        error.add_note(
            f"at {', '.join(dot.site for dot in dots)}, as recipe {dots[0].recipe.name!r}; exclude it in the policy if "
            "it cannot be quantized"
        )
        raise


def _weight_dims_last_sharding(sharding: Any, ndim: int, side: int, free: int) -> Any:
    """Returns the requested sharding of a dot's result with the `free` dims of its weight moved after those of x."""
    if sharding is None or side == 1:
        return sharding
    entries = (*sharding.spec, *(None,) * (ndim - len(sharding.spec)))
    return sharding.update(spec=PartitionSpec(*entries[free:], *entries[:free]))


def _jit(eqn: JaxprEqn, inner: JaxprFn) -> JaxprFn:
    """Wraps `inner` in jit, with the name and the shardings of the user's jit."""
    ins, outs = eqn.params["in_shardings"], eqn.params["out_shardings"]

    def call(key: OptionalKey, values: Sequence[jax.Array]) -> list[jax.Array]:
        return _constrain(inner(key, _constrain(values, ins)), outs)

    call.__name__ = eqn.params["name"]
    return jax.jit(call, inline=eqn.params["inline"])


def _shard_map(eqn: JaxprEqn, inner: JaxprFn) -> JaxprFn:
    """Wraps `inner` in the user's shard_map. The key is replicated; inside it is folded with the device's index."""
    params = eqn.params
    mapped: JaxprFn = jax.shard_map(
        inner,
        mesh=params["mesh"],
        in_specs=(PartitionSpec(), list(params["in_specs"])),
        out_specs=list(params["out_specs"]),
        axis_names=set(params["newly_manual_axes"]),
        check_vma=params["check_vma"],
    )
    return mapped


def _bind(eqn: JaxprEqn, values: list[jax.Array]) -> list[jax.Array]:
    outs = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
    return outs if eqn.primitive.multiple_results else [outs]


def _read_env(env: dict[Var, jax.Array], var: Var | Literal) -> jax.Array:
    return var.val if isinstance(var, Literal) else env[var]


def _fold_in_iteration(key: OptionalKey, iteration: jax.Array) -> OptionalKey:
    return None if key is None else layer_key(key, iteration)


def _constrain(values: Sequence[jax.Array], shardings: Sequence[jax.Array]) -> list[jax.Array]:
    """Constrains values to the shardings of the user's jit; unspecified shardings stay unspecified."""
    return [
        lax.with_sharding_constraint(value, sharding) if isinstance(sharding, jax.sharding.Sharding) else value
        for value, sharding in zip(values, shardings, strict=True)
    ]
