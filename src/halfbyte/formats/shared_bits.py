"""A warning where one key rounds several tensors: under `vmap`, and on the shards of a `shard_map`.

Stochastic rounding averages out over tensors only if their random bits differ. `jax.vmap(f, (0, None))(xs, key)`
rounds every x with the same bits, and so does `shard_map` on every device if the key is the same on all of them. That
is what JAX means by one key, so nothing is changed here; but where JAX shows that the tensor differs and the key does
not, a `SharedBitsWarning` says so when the program is traced. `shard_map(..., check_vma=False)` shows nothing.

The way out: a key each (`jax.random.split`, `jax.random.fold_in` with `lax.axis_index`), or, on a mesh, the bytes of
the whole tensor (`random_bytes` with `offset` and `global_shape`), which are the same on any mesh.
"""

import warnings
from typing import Any

import jax
from jax import lax
from jax.custom_batching import custom_vmap


class SharedBitsWarning(UserWarning):
    """Tensors that differ are rounded with the same random bits."""


def warn_if_shared(key: jax.Array, *tensors: jax.Array) -> jax.Array:
    """`key` itself, and a SharedBitsWarning where a tensor differs over a mapped axis along which the key does not."""
    axes = frozenset[str]().union(*map(_varying, tensors)) - _varying(key)
    if axes:
        warn_shared(
            f"on every device along the mesh axes {', '.join(sorted(axes))}", "lax.axis_index, or give an offset"
        )
    return _same_key(key, lax.stop_gradient(tensors))


def _varying(array: Any) -> frozenset[str]:
    """The manual mesh axes along which an array differs, where JAX tracks them."""
    kind = getattr(jax.typeof(array), "manual_axis_type", None)
    return frozenset() if kind is None else frozenset(kind.varying)


@custom_vmap
def _same_key(key: jax.Array, tensors: tuple[jax.Array, ...]) -> jax.Array:
    return key


@_same_key.def_vmap  # called when a vmap reaches it, also inside jit and custom gradients
def _(size: int, batched: list[Any], key: jax.Array, tensors: tuple[jax.Array, ...]) -> tuple[jax.Array, bool]:
    if any(batched[1]) and not batched[0]:
        warn_shared(f"for all {size} entries of a vmap", "the entry's number, or map over jax.random.split(key)")
    return _same_key(key, tensors), batched[0]


def warn_shared(where: str, way_out: str) -> None:
    """Warns that tensors `where` share random bits; `way_out` is what to fold their key with."""
    warnings.warn(
        f"one key rounds different tensors {where}: their errors are alike and do not average out; fold the key with "
        f"{way_out}",
        SharedBitsWarning,
        stacklevel=2,
    )
