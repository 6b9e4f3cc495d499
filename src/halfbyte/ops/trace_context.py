"""What surrounds a linear where it is traced, as far as JAX shows it: mesh axes, replicas, loops.

A layer hands over two arrays and a key. Whether that code runs once, on each of four replicas or in each of twelve
iterations is written nowhere in them, but it is known to JAX: explicit axes stand in an array's type, manual axes
(`shard_map`) in the mesh of the context, and the loops in the chain of traces that are open. Random bits must differ
wherever the same line runs again, so each of these is asked here.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, TypeVar

import jax
from jax import core, lax
from jax.extend.core import Literal
from jax.sharding import AxisType, NamedSharding

from halfbyte.formats import warn_if_shared, warn_shared
from halfbyte.ops.first_order import first_order
from halfbyte.recipe import Recipe, as_recipe
from halfbyte.sharding import outer_axes

_EINSUM = "numpy/einsum.py"
_Dot = TypeVar("_Dot", bound=Callable[..., Any])
LOOPS = {"scan": "scan", "while_body": "while_loop", "fori_loop": "fori_loop"}  # what JAX calls a loop's body


def explicit_sharding(*arrays: jax.Array) -> NamedSharding | None:
    """The sharding in the type of the first array that lies on a mesh with explicit axes, None if there is none."""
    for array in arrays:
        sharding = getattr(jax.typeof(array), "sharding", None)
        if isinstance(sharding, NamedSharding) and AxisType.Explicit in sharding.mesh.axis_types:
            return sharding
    return None


def in_auto_axes(fn: Callable[..., jax.Array], *args: jax.Array | None, out: NamedSharding) -> jax.Array:
    """fn(*args) with the explicit axes of `out`'s mesh left to the compiler, its result in the sharding `out`.

    Explicit axes ask every operation for its sharding; the many small operations of a quantizer need no such care.
    """
    axes = tuple(n for n, t in zip(out.mesh.axis_names, out.mesh.axis_types, strict=True) if t == AxisType.Explicit)
    result: jax.Array = jax.sharding.auto_axes(fn, axes=axes, out_sharding=out)(*args)
    return result


def anywhere(dot: _Dot) -> _Dot:
    """`dot(x, w, ...)`, w a matrix, as it is wanted under `shard_map` and on a mesh with explicit axes.

    A `w` that is no array (a `QWeight`) was made by the caller for the place where it is used, and is passed on. The
    recipe may be a name.
    """

    @functools.wraps(dot)
    def placed(x: Any, w: Any, *, recipe: Recipe | str, **options: Any) -> Any:
        options["recipe"] = as_recipe(recipe, dot.__name__)
        if not isinstance(w, jax.Array) or x.ndim == 0 or w.ndim != 2:
            return dot(x, w, **options)
        x, w = vary_alike(x, w)
        if explicit_sharding(x, w) is None:
            return first_order(dot(x, w, **options), x, w)
        wanted, key = options.pop("out_sharding", None), options.pop("key", None)
        dims = (((x.ndim - 1,), (0,)), ((), ()))
        like = jax.eval_shape(lambda x, w: lax.dot_general(x, w, dims, out_sharding=wanted), x, w)
        run = lambda x, w, key: first_order(dot(x, w, key=key, **options), x, w)  # noqa: E731
        return in_auto_axes(run, x, w, key, out=like.sharding)

    return placed  # type: ignore[return-value]


def several_devices() -> bool:
    """Whether the program being traced is one for several devices at once, as the mesh of the context (`jax.set_mesh`)
    says: more than one device along the axes that are not manual.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(mesh.shape[axis] for axis in mesh.axis_names if axis not in mesh.manual_axes) > 1


def varying_axes(*arrays: jax.Array) -> frozenset[str]:
    """The manual axes along which the arrays differ from device to device, as their types say (`check_vma`)."""
    return frozenset().union(*(jax.typeof(array).manual_axis_type.varying for array in arrays))


def vary_alike(*arrays: jax.Array) -> list[jax.Array]:
    """The arrays, each marked as varying along the axes of all: what one custom gradient rule wants of its operands.

    The gradient of one that did not vary is then summed over the axes that were added, as for any other operation.
    """
    added = [sorted(varying_axes(*arrays) - varying_axes(array)) for array in arrays]
    pairs = zip(arrays, added, strict=True)
    return [lax.pcast(array, tuple(axes), to="varying") if axes else array for array, axes in pairs]


def replica_key(key: jax.Array, *operands: jax.Array) -> jax.Array:
    """The key folded with the device's place along each manual axis, so that no two replicas round alike.

    Where JAX tracks what varies (`check_vma`, the default of `shard_map`), only along the axes where an operand does:
    devices that compute the same thing go on doing so. Where it does not, along all of them.
    """
    axes = outer_axes()
    varying = varying_axes(*operands)
    for axis in axes:
        if (axis in varying or not _tracks_varying()) and axis not in varying_axes(key):
            key = jax.random.fold_in(key, lax.axis_index(axis))
    return key


def _tracks_varying() -> bool:
    """Whether the `shard_map` around this code checks what varies: a device's own index then has it in its type."""
    axes = outer_axes()
    return bool(axes) and bool(varying_axes(lax.axis_index(axes[0])))


def einsum_turned(lhs: jax.Array, rhs: jax.Array) -> bool:
    """Whether the caller is `jnp.einsum` and has put its second operand on the left.

    It does so as the order of the result suits it, and the two arrays do not show it; its own variables do.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.endswith(_EINSUM):
        if frame.f_code.co_filename.endswith("interpreters/partial_eval.py"):  # beyond lies another function
            return False
        frame = frame.f_back
    if frame is None:
        return False
    pair, places = [frame.f_locals.get(name) for name in ("lhs", "rhs")], frame.f_locals.get("operand_indices")
    if places is None or not any(lhs is one for one in pair):
        raise ValueError(
            "dot_general: called by a jnp.einsum that does not show which of its operands is which; use "
            "halfbyte.apply_recipe, or call dot_general itself"
        )
    second = pair[0] if places[0] > places[1] else pair[1]
    return lhs is second


def loop_with_one_key(key: jax.Array) -> str | None:
    """The innermost loop being traced that uses this key in each of its iterations, None if none is seen to.

    A key changes with a loop if it was computed from what the loop's body is given (its counter, its carry, its
    slices). What a function inside the body was given counts as that: it cannot be followed further.
    """
    traces = list(_open_traces())
    roots = _roots(key)
    for depth, trace in enumerate(traces):
        loop = LOOPS.get(_traced_for(trace) or "")
        if loop and not any(root in traces[: depth + 1] for root in roots):
            return loop
    return None


def own_key(key: jax.Array | None, recipes: Sequence[Recipe], tensors: Sequence[Any]) -> jax.Array | None:
    """`key` itself, and a SharedBitsWarning where the recipes round different tensors with it: in the iterations of a
    loop, under `vmap`, on the devices of a `shard_map`.
    """
    if key is None or not any(recipe.stochastic for recipe in recipes):
        return key
    loop = loop_with_one_key(key)
    if loop is not None:
        warn_shared(f"in every iteration of the {loop} around them", "the loop's counter (layer_key)")
    return warn_if_shared(key, *(tensor for tensor in tensors if isinstance(tensor, jax.Array)))


def _open_traces() -> Iterator[Any]:
    """The traces of jaxprs that are open, the innermost first: any value made now belongs to that."""
    trace = getattr(lax.iota("int32", 1), "_trace", None)
    while trace is not None:
        yield trace
        trace = getattr(trace, "parent_trace", None)


def _traced_for(trace: object) -> str | None:
    return getattr(getattr(getattr(trace, "frame", None), "debug_info", None), "traced_for", None)


def _roots(value: Any) -> list[Any]:
    """The traces whose arguments the value was computed from."""
    found, seen, todo = [], set(), [value]
    while todo:
        tracer = todo.pop()
        if not isinstance(tracer, core.Tracer) or id(tracer) in seen:
            continue
        seen.add(id(tracer))
        inner = _wrapped(tracer)
        if inner:
            todo += inner
        elif _constant(tracer) is not None:
            todo.append(_constant(tracer))
        elif getattr(tracer, "parent", None) is not None:
            todo += tracer.parent.in_tracers
        else:
            found.append(tracer._trace)
    return found


def _wrapped(tracer: Any) -> Sequence[Any]:
    """What a tracer of a transformation stands for: the value of a differentiated or mapped one."""
    return [getattr(tracer, name) for name in ("primal", "val") if isinstance(getattr(tracer, name, None), core.Tracer)]


def _constant(tracer: Any) -> Any:
    """The value from outside that a jaxpr's tracer stands for, None if it is none."""
    variable = getattr(tracer, "val", None)
    if isinstance(variable, Literal):
        return variable.val
    constants = getattr(getattr(tracer._trace, "frame", None), "constvar_to_val", None)
    return None if constants is None else constants.get(variable)
