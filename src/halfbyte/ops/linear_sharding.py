"""Sharding of a linear on a mesh, and the collectives that it needs.

Inside `shard_map` an op sees local shards. `DimAxes` names, for each dim of an array, the mesh axes that it is
sharded over. Those of x [tokens..., inputs], W [inputs, outputs] and y [tokens..., outputs] determine all
communication:

| where                     | data                                                   | collective                 |
|---------------------------|--------------------------------------------------------|----------------------------|
| W before a GEMM           | its codes, over the axes that shard tokens (FSDP)      | all-gather                 |
| amax of a tensor          | a few integers for all operands of a pass              | all-reduce max             |
| dW                        | float32 sums (or bfloat16), to the sharding of W       | reduce-scatter             |
| x into, y out of a linear | its tokens, over axes that shard features inside (TP)  | all-gather, reduce-scatter |

If a dim is sharded over axes of both kinds, the axes that are not gathered come first (outer), so that the gathered
shards are contiguous.

Random bits depend on an element's index in the global tensor (`shard_offsets`), so that codes are the same on every
mesh.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from halfbyte.distributed import manual_axes, shard_map_over
from halfbyte.kernels.mosaic_launch import empty_stack_buffer
from halfbyte.recipes import LinearKey

Sizes = Mapping[str, int]  # mesh axis -> number of devices
DimAxes = tuple[tuple[str, ...], ...]
_Result = TypeVar("_Result")


def axes_in(cut: DimAxes) -> tuple[str, ...]:
    """Returns the mesh axes of all dims."""
    return tuple(axis for axes in cut for axis in axes)


def num_shards(axes: Sequence[str], sizes: Sizes | None = None) -> int:
    """Returns the number of shards of a dim that is sharded over `axes`: by `sizes`, or by the enclosing shard_map."""
    return math.prod(lax.axis_size(axis) if sizes is None else sizes[axis] for axis in axes)


def global_shape(shape: Sequence[int], cut: DimAxes) -> tuple[int, ...]:
    """Returns the shape of the global array of which `shape` is a shard."""
    return tuple(n * num_shards(axes) for n, axes in zip(shape, cut, strict=True))


def shard_offsets(shape: Sequence[int], cut: DimAxes) -> tuple[jax.Array | int, ...]:
    """Returns the offset of this shard in the global array, per dim."""
    return tuple(lax.axis_index(axes) * n if axes else 0 for n, axes in zip(shape, cut, strict=True))


def global_amax(maxima: Sequence[jax.Array], cut: DimAxes) -> tuple[jax.Array, ...]:
    """Returns the amaxes of global arrays from those of their shards, as int32 bits, in one all-reduce."""
    if not axes_in(cut):
        return tuple(maxima)
    return tuple(lax.pmax(jnp.stack(maxima), axes_in(cut)))


def global_amaxes(partial: Sequence[jax.Array], cut: DimAxes) -> tuple[jax.Array, ...]:
    """Returns arrays whose max is the amax of the global tensor, from partial amaxes (int32, any shape) per tensor.

    They are unchanged if the tensor is not sharded. Partial amaxes of one shape are reduced together.
    """
    if not axes_in(cut):
        return tuple(partial)
    if len({m.shape for m in partial}) > 1:
        return global_amax([jnp.max(m) for m in partial], cut)
    return tuple(lax.pmax(jnp.max(jnp.stack([m.reshape(-1) for m in partial]), axis=1), axes_in(cut)))


def all_gather_dims(x: jax.Array, cut: DimAxes) -> jax.Array:
    """Returns x all-gathered over the mesh axes of each dim."""
    for dim, axes in enumerate(cut):
        x = lax.all_gather(x, axes, axis=dim, tiled=True) if axes else x
    return x


def reduce_scatter_dims(x: jax.Array, cut: DimAxes) -> jax.Array:
    """Returns x reduce-scattered over the mesh axes of each dim."""
    for dim, axes in enumerate(cut):
        x = lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True) if axes else x
    return x


def reduce_scatter_gradient(dw: jax.Array, cut: DimAxes, dtype: str) -> jax.Array:
    """Returns `reduce_scatter_dims` of a weight's gradient, sent in `dtype` (float32: unchanged), in its own dtype."""
    reduce_dtype = gradient_reduce_dtype(dw.dtype, cut, dtype)
    if not axes_in(cut) or jnp.finfo(reduce_dtype).bits >= 32:
        return reduce_scatter_dims(dw, cut)
    # With excess precision allowed XLA would send the unrounded float32 values; the barrier keeps the cast.
    return reduce_scatter_dims(lax.optimization_barrier(dw.astype(reduce_dtype)), cut).astype(dw.dtype)


def gradient_reduce_dtype(of: jnp.dtype, cut: DimAxes, dtype: str) -> jnp.dtype:
    """Returns the dtype in which a weight gradient is reduce-scattered: the narrower of `of`, its own, and `dtype`."""
    narrower = bool(axes_in(cut)) and jnp.finfo(dtype).bits < jnp.finfo(of).bits
    return jnp.dtype(dtype) if narrower else jnp.dtype(of)


def mask_to_first_shard(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Zeros x except on index 0 of `axes`, so that a later psum counts a replicated value once."""
    return jnp.where(lax.axis_index(axes) == 0, x, jnp.zeros_like(x)) if axes else x


def enter_shard_map(x: jax.Array, spec: PartitionSpec, mesh: Sizes) -> jax.Array:
    """Returns x unchanged, for use inside a shard_map over `mesh`; its gradient is masked so that it counts once.

    shard_map sums the gradient along the axes that `spec` leaves out, where it is the same on all devices.
    """
    axes = unused_mesh_axes(spec, mesh)
    return _received(axes, x) if axes and jnp.issubdtype(x.dtype, jnp.floating) else x


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _received(axes: tuple[str, ...], x: jax.Array) -> jax.Array:
    return x


_received.defvjp(lambda axes, x: (x, None), lambda axes, _, dx: (mask_to_first_shard(dx, axes),))


def leave_shard_map(y: jax.Array, spec: PartitionSpec, mesh: Sizes) -> jax.Array:
    """Returns y for the end of a shard_map over `mesh`, and scales its cotangent to undo shard_map's division.

    shard_map divides the cotangent by the number of devices along the axes that `spec` leaves out. Undoing it is exact
    in 16 bits for powers of two. For other numbers y is returned in float32, so that the quotient is precise enough;
    the caller casts it back.
    """
    count = math.prod(mesh[axis] for axis in unused_mesh_axes(spec, mesh))
    return _returned(count, y.dtype, y) if count > 1 and jnp.issubdtype(y.dtype, jnp.floating) else y


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _returned(parts: int, dtype: jnp.dtype, y: jax.Array) -> jax.Array:
    return y.astype(jnp.float32) if parts & (parts - 1) else y


_returned.defvjp(
    lambda parts, dtype, y: (_returned(parts, dtype, y), None),
    lambda parts, dtype, _, dy: ((dy * parts).astype(dtype),),
)


@dataclasses.dataclass(frozen=True)
class LinearSharding:
    """Sharding of one linear; by default unsharded."""

    token_axes: DimAxes = ()
    """Axes that shard the token dims inside the op."""
    input_axes: tuple[str, ...] = ()
    """Axes that shard the inputs of x and of W: sums over inputs are partial."""
    output_axes: tuple[str, ...] = ()
    """Axes that shard the outputs of W and of y."""
    weight_storage_axes: DimAxes = ((), ())
    """Further axes that shard the stored W: over these it is all-gathered, and dW reduce-scattered."""
    x_lead: DimAxes = ()
    """Further axes that shard the token dims of x outside the op: all-gathered at its start."""
    y_lead: DimAxes = ()
    """Further axes that shard the token dims of y outside the op: reduce-scattered at its end."""
    reduce_dtype: str = "float32"
    """Dtype of the reduce-scatter of dW, at most as wide as that of the weight."""
    replicated_axes: tuple[str, ...] = ()
    """Axes that shard neither x nor y: along them all devices compute the same."""
    enclosing_manual_axes: tuple[str, ...] = ()
    """Axes of an enclosing `shard_map` that shard the first token dim; dW is not summed over them."""

    @property
    def x(self) -> DimAxes:
        return (*self._tokens, self.input_axes)

    @property
    def dy(self) -> DimAxes:
        return (*self._tokens, self.output_axes)

    @property
    def _tokens(self) -> DimAxes:
        return (
            compose_dim_axes((self.enclosing_manual_axes, *((),) * (len(self.token_axes) - 1)), self.token_axes)
            if self.token_axes
            else ()
        )

    @property
    def w(self) -> DimAxes:
        return compose_dim_axes((self.input_axes, self.output_axes), self.weight_storage_axes)


UNSHARDED = LinearSharding()


@dataclasses.dataclass(frozen=True)
class Placement:
    """Mesh of a linear, and PartitionSpecs of x, W and y outside the op."""

    mesh: Mesh
    x: PartitionSpec
    w: PartitionSpec
    y: PartitionSpec
    reduce_dtype: str = "float32"
    outer: tuple[str, ...] = ()
    """Axes of an enclosing `shard_map`, over which the first token dim is already sharded."""

    def shards(self, ndim: int) -> LinearSharding:
        """Returns the sharding that the specs describe for x of `ndim` dims.

        The axes of y's features shard W's outputs, those of x's features its inputs; W is all-gathered over any other
        axes. Tokens stay sharded over the axes that x and y share. Raises ValueError if a spec shards a dim over other
        axes, or in another order, than the other two specs require.
        """
        free_axes = [axis for axis, size in self.mesh.shape.items() if size > 1 and axis not in self.outer]
        x, y, w = (_only(dim_axes_of_spec(s, n), free_axes) for s, n in ((self.x, ndim), (self.y, ndim), (self.w, 2)))
        inputs, outputs = x[-1], y[-1]
        others = [axis for axis in free_axes if axis not in inputs + outputs]
        lead, stored = _only(x[:-1], others), _only(w, others)
        x_lead, y_lead = _only(x[:-1], outputs), _only(y[:-1], inputs)
        idle = tuple(axis for axis in others if axis not in axes_in(lead))
        expected = {"x": (*compose_dim_axes(lead, x_lead), inputs), "y": (*compose_dim_axes(lead, y_lead), outputs)}
        expected["w"] = compose_dim_axes((inputs, outputs), stored)
        for name, dim_axes in {"x": x, "y": y, "w": w}.items():
            if dim_axes != expected[name]:
                fitting = PartitionSpec(*(axes or None for axes in expected[name]))
                raise ValueError(
                    f"placement: {name} {getattr(self, name)} does not fit x {self.x}, w {self.w} and y {self.y}; with "
                    f"the others as they are it is {fitting}: tokens of x and y cut alike but for axes of features, "
                    f"and axes that are gathered or scattered behind those that stay"
                )
        return LinearSharding(lead, inputs, outputs, stored, x_lead, y_lead, self.reduce_dtype, idle, self.outer)


def compose_dim_axes(outer: DimAxes, inner: DimAxes) -> DimAxes:
    """Returns per dim the axes `outer`, then `inner`: each shard over `outer` is sharded over `inner`."""
    return tuple(a + b for a, b in zip(outer, inner, strict=True))


def _only(cut: DimAxes, axes: Sequence[str]) -> DimAxes:
    return tuple(tuple(axis for axis in dim if axis in axes) for dim in cut)


def unused_mesh_axes(spec: PartitionSpec, mesh: Sizes) -> tuple[str, ...]:
    """Returns the axes of `mesh` with several devices that a spec leaves out."""
    named = axes_in(dim_axes_of_spec(spec, len(spec)))
    return tuple(axis for axis, size in mesh.items() if size > 1 and axis not in named)


def with_size_one_axes(spec: PartitionSpec, mesh: Sizes) -> PartitionSpec:
    """Returns `spec` with the mesh axes of size 1 added to its first entry; an empty spec unchanged."""
    size_one = tuple(axis for axis, size in mesh.items() if size == 1)
    if not len(spec) or not size_one:
        return spec
    (first, *rest), named = dim_axes_of_spec(spec, len(spec)), axes_in(dim_axes_of_spec(spec, len(spec)))
    return PartitionSpec(first + tuple(a for a in size_one if a not in named), *(axes or None for axes in rest))


def dim_axes_of_spec(spec: PartitionSpec, ndim: int) -> DimAxes:
    """Returns the mesh axes per dim of a PartitionSpec, for an array of `ndim` dims."""
    entries = (*spec, *(None,) * (ndim - len(spec)))
    return tuple(() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in entries)


def gather_linear_input(x: jax.Array, shards: LinearSharding) -> jax.Array:
    """Returns x as its linears read it, all-gathered over `x_lead`."""
    # With excess precision allowed XLA would gather unrounded float32 values, twice the bytes.
    return all_gather_dims(lax.optimization_barrier(x), shards.x_lead) if axes_in(shards.x_lead) else x


def gathered_input_shape(x: jax.Array, shards: LinearSharding) -> jax.ShapeDtypeStruct:
    """Returns the shape of x after `gather_linear_input`."""
    sizes = [num_shards(axes) for axes in shards.x_lead] or [1] * (x.ndim - 1)
    return jax.ShapeDtypeStruct((*(n * s for n, s in zip(x.shape, sizes, strict=False)), x.shape[-1]), x.dtype)


def run_in_shard_map(
    run: Callable[..., _Result], inputs: tuple[Any, Any, Sequence[LinearKey | None]], specs: tuple[Any, Any],
    out_specs: Any, *, mesh: Mesh,
) -> _Result:  # fmt: skip
    """Returns run(*inputs) on local arrays, inputs = (arrays, weights, keys) sharded by `specs`.

    Typed keys are passed as their uint32 words. Results may be wider than those of `run`: see `leave_shard_map`.
    """
    arrays, weights, keys = inputs
    free = {axis: size for axis, size in mesh.shape.items() if axis not in manual_axes()}
    words = tuple(jax.random.key_data(key) if isinstance(key, jax.Array) else key for key in keys)
    key_impls = [jax.random.key_impl(key) if isinstance(key, jax.Array) else None for key in keys]

    def local(given: Any, weights: Any, words: Any) -> Any:
        typed = [w if k is None else jax.random.wrap_key_data(w, impl=k) for w, k in zip(words, key_impls, strict=True)]
        enter, leave = (functools.partial(to, mesh=free) for to in (enter_shard_map, leave_shard_map))
        results = run(jax.tree.map(enter, given, specs[0]), weights, tuple(typed))
        return jax.tree.map(leave, results, out_specs)

    in_specs = (*specs, jax.tree.map(lambda _: PartitionSpec(), words))
    # shard_map sums gradients over axes that a spec does not name; naming those of size 1 avoids that.
    named = functools.partial(jax.tree.map, functools.partial(with_size_one_axes, mesh=free))
    results: _Result = shard_map_over(local, mesh, named(in_specs), named(out_specs))(arrays, weights, words)
    return results


def empty_sharded_stack(
    layers: int, shape: tuple[int, ...], dtype: DTypeLike, *, mesh: Mesh | None, spec: PartitionSpec | None
) -> jax.Array:
    """Returns `mosaic_launch.empty_stack_buffer`, sharded by `spec` on a mesh."""
    if mesh is None or spec is None:
        return empty_stack_buffer(layers, shape, dtype)
    shard_shape, stack_spec = NamedSharding(mesh, spec).shard_shape(shape), PartitionSpec(None, *spec)
    stack: jax.Array = shard_map_over(lambda: empty_stack_buffer(layers, shard_shape, dtype), mesh, (), stack_spec)()
    return stack
