"""A linear on a mesh: how its arrays are cut, and the collectives that this makes necessary.

Inside `shard_map` an op sees local shards. `DimAxes` names, for each dim of an array, the mesh axes that it is
sharded over. From those of x [tokens..., inputs], W [inputs, outputs] and y [tokens..., outputs] follows everything
that must travel, and nothing else does:

| where                     | what travels                                          | collective     |
|---------------------------|-------------------------------------------------------|----------------|
| W before a GEMM           | its codes, over the axes that cut tokens (FSDP)       | all-gather     |
| a tensor's maxima         | a few integers for all operands of a pass             | all-reduce max |
| dW                        | float32 sums (or bfloat16), back to where W rests     | reduce-scatter |
| x into, y out of a linear | its tokens, where features are cut instead (tensor)   | gather, scatter |

A dim that is cut over axes of both kinds has those that stay outside and those that travel inside: what is gathered
lies side by side then.

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

Sizes = Mapping[str, int]  # of a mesh's axes
DimAxes = tuple[tuple[str, ...], ...]
_Result = TypeVar("_Result")


def axes_in(cut: DimAxes) -> tuple[str, ...]:
    """The mesh axes of all dims."""
    return tuple(axis for axes in cut for axis in axes)


def num_shards(axes: Sequence[str], sizes: Sizes | None = None) -> int:
    """Returns the number of shards of a dim that is sharded over `axes`: by `sizes`, or by the enclosing shard_map."""
    return math.prod(lax.axis_size(axis) if sizes is None else sizes[axis] for axis in axes)


def global_shape(shape: Sequence[int], cut: DimAxes) -> tuple[int, ...]:
    """The shape of the array of which this is a part."""
    return tuple(n * num_shards(axes) for n, axes in zip(shape, cut, strict=True))


def shard_offsets(shape: Sequence[int], cut: DimAxes) -> tuple[jax.Array | int, ...]:
    """Where this part begins in the whole array, dim by dim."""
    return tuple(lax.axis_index(axes) * n if axes else 0 for n, axes in zip(shape, cut, strict=True))


def global_amax(maxima: Sequence[jax.Array], cut: DimAxes) -> tuple[jax.Array, ...]:
    """int32 maxima of parts -> those of the whole arrays, all in one all-reduce."""
    if not axes_in(cut):
        return tuple(maxima)
    return tuple(lax.pmax(jnp.stack(maxima), axes_in(cut)))


def global_amaxes(partial: Sequence[jax.Array], cut: DimAxes) -> tuple[jax.Array, ...]:
    """Each tensor's partial int32 maxima, in any shape -> something whose maximum is that of the whole tensor: the
    same, where it is not cut. Maxima of one shape are found by one reduction.
    """
    if not axes_in(cut):
        return tuple(partial)
    if len({m.shape for m in partial}) > 1:
        return global_amax([jnp.max(m) for m in partial], cut)
    return tuple(lax.pmax(jnp.max(jnp.stack([m.reshape(-1) for m in partial]), axis=1), axes_in(cut)))


def all_gather_dims(x: jax.Array, cut: DimAxes) -> jax.Array:
    """x with its parts over `cut` put together."""
    for dim, axes in enumerate(cut):
        x = lax.all_gather(x, axes, axis=dim, tiled=True) if axes else x
    return x


def reduce_scatter_dims(x: jax.Array, cut: DimAxes) -> jax.Array:
    """Sums of x over the axes of `cut`, each device with its part."""
    for dim, axes in enumerate(cut):
        x = lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True) if axes else x
    return x


def reduce_scatter_gradient(dw: jax.Array, cut: DimAxes, dtype: str) -> jax.Array:
    """Returns `reduce_scatter_dims` of a weight's gradient, sent in `dtype` (float32: unchanged), in its own dtype."""
    travels = gradient_reduce_dtype(dw.dtype, cut, dtype)
    if not axes_in(cut) or jnp.finfo(travels).bits >= 32:
        return reduce_scatter_dims(dw, cut)
    # A compiler that may keep excess precision would send what was not rounded: all the bytes.
    return reduce_scatter_dims(lax.optimization_barrier(dw.astype(travels)), cut).astype(dw.dtype)


def gradient_reduce_dtype(of: jnp.dtype, cut: DimAxes, dtype: str) -> jnp.dtype:
    """What a weight's gradient, in dtype `of` where it rests, is scattered over `cut` in: the narrower of the two."""
    narrower = bool(axes_in(cut)) and jnp.finfo(dtype).bits < jnp.finfo(of).bits
    return jnp.dtype(dtype) if narrower else jnp.dtype(of)


def mask_to_first_shard(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """x on the first device along `axes`, zeros on the others: what is the same on all of them, before it is summed."""
    return jnp.where(lax.axis_index(axes) == 0, x, jnp.zeros_like(x)) if axes else x


def enter_shard_map(x: jax.Array, spec: PartitionSpec, mesh: Sizes) -> jax.Array:
    """x inside a shard_map over `mesh`, which sums its gradient along the axes that `spec` leaves out: there it is the
    same everywhere, and counts once.
    """
    axes = unused_mesh_axes(spec, mesh)
    return _received(axes, x) if axes and jnp.issubdtype(x.dtype, jnp.floating) else x


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _received(axes: tuple[str, ...], x: jax.Array) -> jax.Array:
    return x


_received.defvjp(lambda axes, x: (x, None), lambda axes, _, dx: (mask_to_first_shard(dx, axes),))


def leave_shard_map(y: jax.Array, spec: PartitionSpec, mesh: Sizes) -> jax.Array:
    """y on its way out of a shard_map over `mesh`, which divides its cotangent by the number of devices along the axes
    that `spec` leaves out: that is undone here, in 16 bits to the last. Where the number is no power of two, y leaves
    in float32, so that the quotient has digits enough; the caller narrows it again.
    """
    parts = math.prod(mesh[axis] for axis in unused_mesh_axes(spec, mesh))
    return _returned(parts, y.dtype, y) if parts > 1 and jnp.issubdtype(y.dtype, jnp.floating) else y


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _returned(parts: int, dtype: jnp.dtype, y: jax.Array) -> jax.Array:
    return y.astype(jnp.float32) if parts & (parts - 1) else y


_returned.defvjp(
    lambda parts, dtype, y: (_returned(parts, dtype, y), None),
    lambda parts, dtype, _, dy: ((dy * parts).astype(dtype),),
)


@dataclasses.dataclass(frozen=True)
class LinearSharding:
    """How one linear is cut: by default not at all."""

    token_axes: DimAxes = ()
    """Of the token dims, inside."""
    input_axes: tuple[str, ...] = ()
    """Axes that cut the inputs of x and of W: sums over them are partial."""
    output_axes: tuple[str, ...] = ()
    """Axes that cut the outputs of W and of y."""
    weight_storage_axes: DimAxes = ((), ())
    """Axes that cut W where it rests, beside inputs and outputs: over these it is gathered, and dW scattered."""
    x_lead: DimAxes = ()
    """Axes that cut the token dims of x where it comes from, beside `lead`: gathered on the way in."""
    y_lead: DimAxes = ()
    """Axes that cut the token dims of y where it goes, beside `lead`: scattered on the way out."""
    reduce_dtype: str = "float32"
    """Of dW while it is scattered, at most that of the weight."""
    replicated_axes: tuple[str, ...] = ()
    """Axes that cut neither x nor y: along them all devices compute the same."""
    enclosing_manual_axes: tuple[str, ...] = ()
    """Axes over which the first token dim was cut before anything here saw it; dW is not summed over them."""

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
    """A linear on a mesh, by the PartitionSpecs of x, W and y outside the op."""

    mesh: Mesh
    x: PartitionSpec
    w: PartitionSpec
    y: PartitionSpec
    reduce_dtype: str = "float32"
    outer: tuple[str, ...] = ()
    """Axes of a `shard_map` around the op, which have cut the first token dim already."""

    def shards(self, ndim: int) -> LinearSharding:
        """What the specs mean for x of `ndim` dims: axes of y's features cut W's outputs, axes of x's features its
        inputs; any other axes of W are gathered. Tokens stay cut over the axes that x and y share. Refused where a spec
        cuts a dim otherwise, or in another order, than the other two mean.
        """
        live = [axis for axis, size in self.mesh.shape.items() if size > 1 and axis not in self.outer]
        x, y, w = (_only(dim_axes_of_spec(s, n), live) for s, n in ((self.x, ndim), (self.y, ndim), (self.w, 2)))
        inputs, outputs = x[-1], y[-1]
        others = [axis for axis in live if axis not in inputs + outputs]
        lead, stored = _only(x[:-1], others), _only(w, others)
        x_lead, y_lead = _only(x[:-1], outputs), _only(y[:-1], inputs)
        idle = tuple(axis for axis in others if axis not in axes_in(lead))
        meant = {"x": (*compose_dim_axes(lead, x_lead), inputs), "y": (*compose_dim_axes(lead, y_lead), outputs)}
        meant["w"] = compose_dim_axes((inputs, outputs), stored)
        for name, cut in {"x": x, "y": y, "w": w}.items():
            if cut != meant[name]:
                fitting = PartitionSpec(*(axes or None for axes in meant[name]))
                raise ValueError(
                    f"placement: {name} {getattr(self, name)} does not fit x {self.x}, w {self.w} and y {self.y}; with "
                    f"the others as they are it is {fitting}: tokens of x and y cut alike but for axes of features, "
                    f"and axes that are gathered or scattered behind those that stay"
                )
        return LinearSharding(lead, inputs, outputs, stored, x_lead, y_lead, self.reduce_dtype, idle, self.outer)


def compose_dim_axes(outer: DimAxes, inner: DimAxes) -> DimAxes:
    """Dims cut over `outer`, and each part over `inner`."""
    return tuple(a + b for a, b in zip(outer, inner, strict=True))


def _only(cut: DimAxes, axes: Sequence[str]) -> DimAxes:
    return tuple(tuple(axis for axis in dim if axis in axes) for dim in cut)


def unused_mesh_axes(spec: PartitionSpec, mesh: Sizes) -> tuple[str, ...]:
    """The axes of `mesh` that a spec leaves out, and that have several devices."""
    named = axes_in(dim_axes_of_spec(spec, len(spec)))
    return tuple(axis for axis, size in mesh.items() if size > 1 and axis not in named)


def with_size_one_axes(spec: PartitionSpec, mesh: Sizes) -> PartitionSpec:
    """`spec` with the mesh axes of size 1 in its first entry, where they change nothing; an empty one as it is."""
    idle = tuple(axis for axis, size in mesh.items() if size == 1)
    if not len(spec) or not idle:
        return spec
    (first, *rest), named = dim_axes_of_spec(spec, len(spec)), axes_in(dim_axes_of_spec(spec, len(spec)))
    return PartitionSpec(first + tuple(a for a in idle if a not in named), *(axes or None for axes in rest))


def dim_axes_of_spec(spec: PartitionSpec, ndim: int) -> DimAxes:
    """The cut that a PartitionSpec means for an array of `ndim` dims."""
    entries = (*spec, *(None,) * (ndim - len(spec)))
    return tuple(() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in entries)


def gather_linear_input(x: jax.Array, shards: LinearSharding) -> jax.Array:
    """x as its linears read it."""
    # A compiler that may keep excess precision would gather float32 numbers: twice the bytes, unrounded.
    return all_gather_dims(lax.optimization_barrier(x), shards.x_lead) if axes_in(shards.x_lead) else x


def gathered_input_shape(x: jax.Array, shards: LinearSharding) -> jax.ShapeDtypeStruct:
    """Returns the shape of x after `gather_linear_input`."""
    sizes = [num_shards(axes) for axes in shards.x_lead] or [1] * (x.ndim - 1)
    return jax.ShapeDtypeStruct((*(n * s for n, s in zip(x.shape, sizes, strict=False)), x.shape[-1]), x.dtype)


def run_in_shard_map(
    run: Callable[..., _Result], inputs: tuple[Any, Any, Sequence[LinearKey | None]], specs: tuple[Any, Any],
    out_specs: Any, *, mesh: Mesh,
) -> _Result:  # fmt: skip
    """Returns run(*inputs) on local arrays, inputs = (given, weights, keys) sharded by `specs`.

    Typed keys are passed as their words. Results may be wider than those of `run`: see `leave_shard_map`.
    """
    given, weights, keys = inputs
    free = {axis: size for axis, size in mesh.shape.items() if axis not in manual_axes()}
    words = tuple(jax.random.key_data(key) if isinstance(key, jax.Array) else key for key in keys)
    kinds = [jax.random.key_impl(key) if isinstance(key, jax.Array) else None for key in keys]

    def local(given: Any, weights: Any, words: Any) -> Any:
        typed = [w if k is None else jax.random.wrap_key_data(w, impl=k) for w, k in zip(words, kinds, strict=True)]
        within, without = (functools.partial(to, mesh=free) for to in (enter_shard_map, leave_shard_map))
        made = run(jax.tree.map(within, given, specs[0]), weights, tuple(typed))
        return jax.tree.map(without, made, out_specs)

    cut = (*specs, jax.tree.map(lambda _: PartitionSpec(), words))
    # Axes that are not named in a spec are summed over in its gradient: those of size 1 are named.
    mentioned = functools.partial(jax.tree.map, functools.partial(with_size_one_axes, mesh=free))
    made: _Result = shard_map_over(local, mesh, mentioned(cut), mentioned(out_specs))(given, weights, words)
    return made


def empty_sharded_stack(
    layers: int, shape: tuple[int, ...], dtype: DTypeLike, *, mesh: Mesh | None, spec: PartitionSpec | None
) -> jax.Array:
    """Returns `mosaic_launch.empty_stack_buffer`, sharded by `spec` on a mesh."""
    if mesh is None or spec is None:
        return empty_stack_buffer(layers, shape, dtype)
    part, cut = NamedSharding(mesh, spec).shard_shape(shape), PartitionSpec(None, *spec)
    made: jax.Array = shard_map_over(lambda: empty_stack_buffer(layers, part, dtype), mesh, (), cut)()
    return made
