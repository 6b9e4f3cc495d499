"""Divisibility, checked before anything is traced: every error names the dim, its size, the mesh axes and a way out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jax.sharding import Mesh

from halfbyte.sharding.mesh import axis_size
from halfbyte.sharding.rules import DEFAULT_RULES, Rules

BLOCK = 16  # elements of a quantization block: a shard that cuts one would change its scale


def check_sharded(
    size: int, axis: str, mesh: Mesh | None, *, what: str, rules: Rules = DEFAULT_RULES, multiple: int = 1
) -> None:
    """Nothing if a dim of `size` along logical `axis` splits evenly into shards that are multiples of `multiple`;
    else a ValueError.
    """
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
            f"use at most {largest_shards(size, multiple)} shards: fewer devices, or the axis data for the others"
        )


def check_model_dims(
    shapes: Mapping[str, tuple[Sequence[int], Sequence[str | None]]], mesh: Mesh | None, rules: Rules = DEFAULT_RULES
) -> None:
    """Nothing if every weight (path -> shape, logical axes) splits into whole 16-element blocks on `mesh`; else a
    ValueError that names the path.
    """
    for path, (shape, axes) in shapes.items():
        for size, axis in zip(shape, axes, strict=True):
            if axis is not None:
                multiple = 1 if axis in ("vocab", "expert") else BLOCK  # neither cuts a block
                check_sharded(size, axis, mesh, what=f"dim {axis!r} of {path}", rules=rules, multiple=multiple)


def largest_shards(size: int, multiple: int) -> int:
    """The largest power of two of shards that leaves each a multiple of `multiple`."""
    shards = 1
    while size % (2 * shards * multiple) == 0:
        shards *= 2
    return shards
