"""Trace-time context of a quantized dot: mesh axes, replicas and loops around it, and the gradients that it refuses.

A layer calls a dot with two arrays and a key. They do not show if the code runs once, on each of four replicas or in
each of twelve iterations, but JAX knows: an array's type has the explicit axes, the context mesh has the manual axes
(`shard_map`), and the chain of open traces has the loops. Random bits must differ wherever the same line runs again.

A quantized dot has a first derivative and no second. Rounding passes gradients straight through, and the codes saved
for the backward pass are constants. `refuse_second_derivative` turns a silent zero into an error.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, NoReturn, TypeVar

import jax
from jax import core, lax
from jax.extend.core import Literal
from jax.sharding import AxisType, NamedSharding

from halfbyte.distributed import manual_axes
from halfbyte.formats import warn_if_key_reused, warn_key_reuse
from halfbyte.recipes import Recipe, as_recipe, layer_key

MESSAGE = (
    "a quantized dot has no second derivative: its backward pass multiplies codes, in which the weight and the "
    "activation are constants; take Hessians, gradient penalties and the like of the function without the recipe, or "
    "leave these dots alone in the policy"
)


LOOP_PRIMITIVES = {"scan": "scan", "while_body": "while_loop", "fori_loop": "fori_loop"}  # JAX's name of the body


_EINSUM = "numpy/einsum.py"


_Dot = TypeVar("_Dot", bound=Callable[..., Any])


def mesh_aware(dot: _Dot) -> _Dot:
    """Wraps `dot(x, w, ...)`, w a matrix, for `shard_map` and for meshes with explicit axes.

    A `w` that is no array (a `QWeight`) was quantized by the caller for this mesh and is passed unchanged. The recipe
    may be a name.
    """

    @functools.wraps(dot)
    def placed(x: Any, w: Any, *, recipe: Recipe | str, **options: Any) -> Any:
        options["recipe"] = as_recipe(recipe, dot.__name__)
        if not isinstance(w, jax.Array) or x.ndim == 0 or w.ndim != 2:
            return dot(x, w, **options)
        x, w = pvary_to_common_axes(x, w)
        if explicit_sharding(x, w) is None:
            return refuse_second_derivative(dot(x, w, **options), x, w)
        out_sharding, key = options.pop("out_sharding", None), options.pop("key", None)
        dims = (((x.ndim - 1,), (0,)), ((), ()))
        like = jax.eval_shape(lambda x, w: lax.dot_general(x, w, dims, out_sharding=out_sharding), x, w)
        run = lambda x, w, key: refuse_second_derivative(dot(x, w, key=key, **options), x, w)  # noqa: E731
        return in_auto_axes(run, x, w, key, out=like.sharding)

    return placed  # type: ignore[return-value]


def explicit_sharding(*arrays: jax.Array) -> NamedSharding | None:
    """Returns the sharding in the type of the first array on a mesh with explicit axes, None if there is none."""
    for array in arrays:
        sharding = getattr(jax.typeof(array), "sharding", None)
        if isinstance(sharding, NamedSharding) and AxisType.Explicit in sharding.mesh.axis_types:
            return sharding
    return None


def in_auto_axes(fn: Callable[..., jax.Array], *args: jax.Array | None, out: NamedSharding) -> jax.Array:
    """Returns fn(*args) with the explicit axes of `out`'s mesh in auto mode, and the result in the sharding `out`.

    Explicit axes need a sharding for every operation, also for the many small ones of a quantizer.
    """
    axes = tuple(n for n, t in zip(out.mesh.axis_names, out.mesh.axis_types, strict=True) if t == AxisType.Explicit)
    result: jax.Array = jax.sharding.auto_axes(fn, axes=axes, out_sharding=out)(*args)
    return result


def is_multi_device_program() -> bool:
    """Returns True if the program being traced runs on several devices at once.

    That is if the context mesh (`jax.set_mesh`) has more than one device along the axes that are not manual.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(mesh.shape[axis] for axis in mesh.axis_names if axis not in mesh.manual_axes) > 1


def varying_axes(*arrays: jax.Array) -> frozenset[str]:
    """Returns the manual axes along which the arrays vary, according to their types (`check_vma`)."""
    return frozenset().union(*(jax.typeof(array).manual_axis_type.varying for array in arrays))


def pvary_to_common_axes(*arrays: jax.Array) -> list[jax.Array]:
    """Returns the arrays, each marked as varying along the axes of all, as a custom VJP needs its operands.

    The gradient of an array is then summed over the axes that were added, as for any other operation.
    """
    added = [sorted(varying_axes(*arrays) - varying_axes(array)) for array in arrays]
    pairs = zip(arrays, added, strict=True)
    return [lax.pcast(array, tuple(axes), to="varying") if axes else array for array, axes in pairs]


def fold_in_manual_axis_index(key: jax.Array, *operands: jax.Array) -> jax.Array:
    """Returns the key folded with the device's index along each manual axis, so that replicas round differently.

    If JAX tracks varying axes (`check_vma`, the default of `shard_map`), only those where an operand varies: devices
    that compute the same values continue to do so. Otherwise all of them.
    """
    axes = manual_axes()
    varying = varying_axes(*operands)
    for axis in axes:
        if (axis in varying or not _tracks_varying()) and axis not in varying_axes(key):
            key = layer_key(key, lax.axis_index(axis))
    return key


def _tracks_varying() -> bool:
    """Returns True if the enclosing `shard_map` tracks varying axes: the type of an axis index then varies."""
    axes = manual_axes()
    return bool(axes) and bool(varying_axes(lax.axis_index(axes[0])))


def has_einsum_swapped_operands(lhs: jax.Array, rhs: jax.Array) -> bool:
    """Returns True if the caller is `jnp.einsum` and has swapped its operands.

    It does so depending on the order of the result. The two arrays do not show it, only its local variables.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.endswith(_EINSUM):
        # Beyond the tracing of a jaxpr the frames belong to another function.
        if frame.f_code.co_filename.endswith("interpreters/partial_eval.py"):
            return False
        frame = frame.f_back
    if frame is None:
        return False
    operands, indices = [frame.f_locals.get(name) for name in ("lhs", "rhs")], frame.f_locals.get("operand_indices")
    if indices is None or not any(lhs is operand for operand in operands):
        raise ValueError(
            "dot_general: called by a jnp.einsum that does not show which of its operands is which; use "
            "halfbyte.apply_recipe, or call dot_general itself"
        )
    second = operands[0] if indices[0] > indices[1] else operands[1]
    return lhs is second


def warn_if_key_shared(key: jax.Array | None, recipes: Sequence[Recipe], tensors: Sequence[Any]) -> jax.Array | None:
    """Returns `key`. Warns (SharedBitsWarning) if the recipes round different tensors with it.

    Those are the tensors of a loop's iterations, of `vmap`, or of the devices of a `shard_map`.
    """
    if key is None or not any(recipe.stochastic for recipe in recipes):
        return key
    loop = loop_reusing_key(key)
    if loop is not None:
        warn_key_reuse(f"in every iteration of the {loop} around them", "the loop's counter (layer_key)")
    return warn_if_key_reused(key, *(tensor for tensor in tensors if isinstance(tensor, jax.Array)))


def loop_reusing_key(key: jax.Array) -> str | None:
    """Returns the innermost loop being traced that reuses this key in every iteration, None if no loop does.

    A key changes with a loop if it was computed from an argument of the loop's body (counter, carry, slices). The
    arguments of a function inside the body count as such: they cannot be followed further.
    """
    traces = list(_open_traces())
    roots = _source_traces(key)
    for depth, trace in enumerate(traces):
        loop = LOOP_PRIMITIVES.get(_traced_for(trace) or "")
        if loop and not any(root in traces[: depth + 1] for root in roots):
            return loop
    return None


def _open_traces() -> Iterator[Any]:
    """Yields the open jaxpr traces from the innermost one, to which any new value belongs."""
    trace = getattr(lax.iota("int32", 1), "_trace", None)
    while trace is not None:
        yield trace
        trace = getattr(trace, "parent_trace", None)


def _traced_for(trace: object) -> str | None:
    return getattr(getattr(getattr(trace, "frame", None), "debug_info", None), "traced_for", None)


def _source_traces(value: Any) -> list[Any]:
    """Returns the traces whose arguments the value was computed from."""
    sources, seen, pending = [], set(), [value]
    while pending:
        tracer = pending.pop()
        if not isinstance(tracer, core.Tracer) or id(tracer) in seen:
            continue
        seen.add(id(tracer))
        inner = _primal_of_tracer(tracer)
        if inner:
            pending += inner
        elif _constant(tracer) is not None:
            pending.append(_constant(tracer))
        elif getattr(tracer, "parent", None) is not None:
            pending += tracer.parent.in_tracers
        else:
            sources.append(tracer._trace)
    return sources


def _primal_of_tracer(tracer: Any) -> Sequence[Any]:
    """Returns the value behind the tracer of a transformation: that of a differentiated or mapped one."""
    return [getattr(tracer, name) for name in ("primal", "val") if isinstance(getattr(tracer, name, None), core.Tracer)]


def _constant(tracer: Any) -> Any:
    """Returns the constant behind a jaxpr tracer, None if it is not a constant."""
    variable = getattr(tracer, "val", None)
    if isinstance(variable, Literal):
        return variable.val
    constants = getattr(getattr(tracer._trace, "frame", None), "constvar_to_val", None)
    return None if constants is None else constants.get(variable)


@jax.custom_vjp
def _tag_primal(y: jax.Array, tags: list[jax.Array]) -> jax.Array:
    return y


def refuse_second_derivative(y: jax.Array, *operands: jax.Array) -> jax.Array:
    """Returns `y`, computed from `operands`. Its second derivative with respect to any of them raises."""
    # One element each: an empty array returned from a jit inside shard_map crashes the partitioner of JAX 0.11.
    return _tag_primal(y, [operand.reshape(-1)[:1] for operand in operands])


@jax.custom_jvp
def _once(dy: jax.Array, tags: list[jax.Array]) -> jax.Array:
    return dy


@_once.defjvp
def _refuse(primals: object, tangents: object) -> NoReturn:
    raise NotImplementedError(MESSAGE)


_tag_primal.defvjp(lambda y, tags: (y, tags), lambda tags, dy: (_once(dy, tags), None))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def refuse_gradient_without_rng(y: jax.Array, stream: str) -> jax.Array:
    """Returns `y`, computed without a key as no rng stream of that name was passed. Its derivative raises."""
    return y


def _no_stream(y: jax.Array, stream: str) -> NoReturn:
    raise ValueError(
        f"dot_general: key={stream!r} names a Linen rng stream that does not reach this layer, and the gradient rounds "
        f"stochastically; pass rngs={{{stream!r}: step_key(seed, step)}} to apply, with another key at each step, and "
        f"split_rngs={{{stream!r}: True}} to an nn.scan or nn.vmap around the layer"
    )


refuse_gradient_without_rng.defvjp(_no_stream, lambda stream, residuals, dy: (dy,))
