"""Sharding rules: logical axes -> mesh axes, and checks that dims divide.

| logical axis | sharded over | what it is |
|---|---|---|
| `batch` | data, fsdp, expert | sequences of a batch |
| `seq` | context | positions, inside a block |
| `residual_seq` | context, tensor | positions, between blocks (sequence-sharded activations of tensor parallelism) |
| `embed` | fsdp | the model width, of a weight only: K of q, k, v, gate, up and the head; N of o and down |
| `expert` | expert | the experts of a weight, at rest |
| `heads`, `kv_heads`, `mlp`, `vocab` | tensor | the wide dim of a weight or of an activation inside a block |
| `head_dim`, `layers`, `width` | nothing | `width` is the model width of an activation or of a norm |

Divisibility is checked before anything is traced: every error names the dim, its size, the mesh axes and a remedy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from halfbyte.distributed.mesh import axis_size

BLOCK = 16  # elements of a quantization block: a shard boundary inside of a block would change its scale
DEFAULT_MAPPING: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("batch", ("data", "fsdp", "expert")),
    ("seq", ("context",)),
    ("residual_seq", ("context", "tensor")),
    ("embed", ("fsdp",)),
    ("mlp", ("tensor",)),
    ("expert", ("expert",)),
    ("heads", ("tensor",)),
    ("kv_heads", ("tensor",)),
    ("vocab", ("tensor",)),
    ("head_dim", ()),
    ("layers", ()),
    ("width", ()),
)


@dataclasses.dataclass(frozen=True)
class LogicalAxisRules:
    """Mesh axes that each logical axis is sharded over. `replace` returns a variant."""

    mapping: tuple[tuple[str, tuple[str, ...]], ...] = DEFAULT_MAPPING

    def mesh_axes(self, name: str) -> tuple[str, ...]:
        """Returns the mesh axes of logical axis `name`."""
        for logical, axes in self.mapping:
            if logical == name:
                return axes
        raise ValueError(f"sharding: no logical axis {name!r}; the axes are {', '.join(n for n, _ in self.mapping)}")

    def replace(self, **axes: tuple[str, ...]) -> LogicalAxisRules:
        """Returns the rules with other mesh axes for the named logical axes."""
        for name in axes:
            self.mesh_axes(name)
        return LogicalAxisRules(tuple((name, axes.get(name, old)) for name, old in self.mapping))

    def spec(self, axes: Sequence[str | None], mesh: Mesh | None = None) -> PartitionSpec:
        """Returns the `PartitionSpec` of an array whose dims are `axes` (None: not sharded).

        Mesh axes of size 1 and those that an earlier dim already uses are left out.
        """
        used: set[str] = set()
        entries: list[tuple[str, ...] | str | None] = []
        for name in axes:
            mapped = () if name is None else self.mesh_axes(name)
            free = [axis for axis in mapped if axis not in used and (mesh is None or mesh.shape.get(axis, 1) > 1)]
            used.update(free)
            entries.append(None if not free else free[0] if len(free) == 1 else tuple(free))
        while entries and entries[-1] is None:
            entries.pop()
        return PartitionSpec(*entries)


DEFAULT_RULES = LogicalAxisRules()


def named_sharding(axes: Sequence[str | None], mesh: Mesh, rules: LogicalAxisRules = DEFAULT_RULES) -> NamedSharding:
    """Returns the sharding on `mesh` of an array whose dims are `axes`."""
    return NamedSharding(_abstract_mesh_inside(mesh), rules.spec(axes, mesh))


def manual_axes() -> tuple[str, ...]:
    """Returns the mesh axes of an enclosing `shard_map`: along them this code sees the shard of one device."""
    return tuple(jax.sharding.get_abstract_mesh().manual_axes)


def shard_map_over(
    local: Callable[..., Any], mesh: Mesh | AbstractMesh, in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """Returns `local` under `shard_map` over all axes of `mesh` that are not manual yet."""
    free = set(mesh.axis_names) - set(manual_axes())
    mapped: Callable[..., Any] = jax.shard_map(
        local,
        mesh=_abstract_mesh_inside(mesh),
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=free,
        check_vma=False,
    )
    return mapped


def with_logical_constraint(
    x: jax.Array, axes: Sequence[str | None], mesh: Mesh | None, rules: LogicalAxisRules = DEFAULT_RULES
) -> jax.Array:
    """Constrains `x` to the sharding of `axes`; returns it unchanged without a mesh, or on a mesh of one device."""
    if mesh is None or mesh.size == 1:
        return x
    return jax.lax.with_sharding_constraint(x, named_sharding(axes, mesh, rules))


def check_sharded(
    size: int,
    axis: str,
    mesh: Mesh | AbstractMesh | None,
    *,
    what: str,
    rules: LogicalAxisRules = DEFAULT_RULES,
    multiple: int = 1,
) -> None:
    """Raises ValueError unless a dim of `size` on logical `axis` has equal shards that are multiples of `multiple`."""
    mesh_axes = rules.mesh_axes(axis)
    shards = axis_size(mesh, mesh_axes)
    if shards == 1:
        return
    named = " x ".join(f"{name}={axis_size(mesh, name)}" for name in mesh_axes if axis_size(mesh, name) > 1)
    if size % shards:
        raise ValueError(
            f"mesh: {what} is {size}, which {named} does not divide; choose sizes whose product divides {size}"
        )
    if (size // shards) % multiple:
        raise ValueError(
            f"mesh: {what} is {size}, and {named} leaves {size // shards} a device, "
            f"not a multiple of {multiple} as quantization blocks need; "
            f"use at most {max_shards(size, multiple)} shards: fewer devices, or the axis data for the others"
        )


def check_model_dims(
    shapes: Mapping[str, tuple[Sequence[int], Sequence[str | None]]],
    mesh: Mesh | AbstractMesh | None,
    rules: LogicalAxisRules = DEFAULT_RULES,
) -> None:
    """Raises ValueError, with the path, unless all weights divide into shards of whole 16-element blocks on `mesh`.

    `shapes` is path -> (shape, logical axes).
    """
    for path, (shape, axes) in shapes.items():
        for size, axis in zip(shape, axes, strict=True):
            if axis is not None:
                multiple = 1 if axis in ("vocab", "expert") else BLOCK  # no quantization block spans these dims
                check_sharded(size, axis, mesh, what=f"dim {axis!r} of {path}", rules=rules, multiple=multiple)


def max_shards(size: int, multiple: int) -> int:
    """Returns the largest power of two by which `size` divides into shards of a multiple of `multiple`."""
    shards = 1
    while size % (2 * shards * multiple) == 0:
        shards *= 2
    return shards


def _abstract_mesh_inside(mesh: Mesh | AbstractMesh) -> Mesh | AbstractMesh:
    """Returns `mesh`; inside a `shard_map` over some of its axes, the abstract mesh in which those are manual."""
    return jax.sharding.get_abstract_mesh() if manual_axes() else mesh
