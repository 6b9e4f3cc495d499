"""Logical axes -> mesh axes.

| logical axis | split over | what it is |
|---|---|---|
| `batch` | data, fsdp, expert | sequences of a batch |
| `seq` | context | positions, inside a block |
| `residual_seq` | context, tensor | positions, between blocks (sequence-sharded activations of tensor parallelism) |
| `embed` | fsdp | the model width, of a weight only: K of q, k, v, gate, up and the head; N of o and down |
| `expert` | expert | the experts of a weight, where it rests |
| `heads`, `kv_heads`, `mlp`, `vocab` | tensor | the wide dim of a weight or of an activation inside a block |
| `head_dim`, `layers`, `width` | nothing | `width` is the model width of an activation or of a norm |
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

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
class Rules:
    """Which mesh axes each logical axis is split over. `replace` gives a variant."""

    mapping: tuple[tuple[str, tuple[str, ...]], ...] = DEFAULT_MAPPING

    def mesh_axes(self, name: str) -> tuple[str, ...]:
        """The mesh axes of logical axis `name`."""
        for logical, axes in self.mapping:
            if logical == name:
                return axes
        raise ValueError(f"sharding: no logical axis {name!r}; the axes are {', '.join(n for n, _ in self.mapping)}")

    def replace(self, **axes: tuple[str, ...]) -> Rules:
        """The same rules with the named logical axes split otherwise."""
        for name in axes:
            self.mesh_axes(name)
        return Rules(tuple((name, axes.get(name, old)) for name, old in self.mapping))

    def spec(self, axes: Sequence[str | None], mesh: Mesh | None = None) -> PartitionSpec:
        """The `PartitionSpec` of an array whose dims are `axes` (None: not split).

        Mesh axes of size 1 and those that an earlier dim already uses are left out.
        """
        used: set[str] = set()
        entries: list[tuple[str, ...] | str | None] = []
        for name in axes:
            wanted = () if name is None else self.mesh_axes(name)
            free = [axis for axis in wanted if axis not in used and (mesh is None or mesh.shape.get(axis, 1) > 1)]
            used.update(free)
            entries.append(None if not free else free[0] if len(free) == 1 else tuple(free))
        while entries and entries[-1] is None:
            entries.pop()
        return PartitionSpec(*entries)


DEFAULT_RULES = Rules()


def named_sharding(axes: Sequence[str | None], mesh: Mesh, rules: Rules = DEFAULT_RULES) -> NamedSharding:
    """The sharding on `mesh` of an array whose dims are `axes`."""
    return NamedSharding(_as_seen(mesh), rules.spec(axes, mesh))


def outer_axes() -> tuple[str, ...]:
    """The mesh axes of a `shard_map` around this code: along them it sees one device's part already."""
    return tuple(jax.sharding.get_abstract_mesh().manual_axes)


def _as_seen(mesh: Mesh | AbstractMesh) -> Mesh | AbstractMesh:
    """`mesh`, or inside a `shard_map` over some of its axes the same with those taken."""
    return jax.sharding.get_abstract_mesh() if outer_axes() else mesh


def on_parts(local: Callable[..., Any], mesh: Mesh | AbstractMesh, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """`local` on each device's parts of arrays, along all axes of `mesh` that no `shard_map` around it has taken."""
    free = set(mesh.axis_names) - set(outer_axes())
    mapped: Callable[..., Any] = jax.shard_map(
        local, mesh=_as_seen(mesh), in_specs=in_specs, out_specs=out_specs, axis_names=free, check_vma=False
    )
    return mapped


def constrain(x: jax.Array, axes: Sequence[str | None], mesh: Mesh | None, rules: Rules = DEFAULT_RULES) -> jax.Array:
    """`x`, held to the sharding of `axes`; unchanged without a mesh, or with one of a single device."""
    if mesh is None or mesh.size == 1:
        return x
    return jax.lax.with_sharding_constraint(x, named_sharding(axes, mesh, rules))
