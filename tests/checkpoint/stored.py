"""Small states, saved: what the tests of this folder damage."""

import select
import sys

import jax
import jax.numpy as jnp
import numpy as np

from halfbyte.checkpoint import CheckpointManager


def tree(value: int):
    rng = np.random.default_rng(value)
    return {
        "params": {
            "w": jnp.asarray(rng.normal(size=(64, 48)), jnp.float32),
            "b": jnp.asarray(rng.normal(size=7), jnp.bfloat16),
        },
        "optimizer": {
            "mu": (jnp.asarray(rng.normal(size=(64, 48)), jnp.float32),),
            "count": jnp.asarray(value, jnp.int32),
        },
    }


def abstract(items):
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), items)


def same(a, b):
    return all(jax.tree.leaves(jax.tree.map(lambda x, y: bool(np.array_equal(np.asarray(x), np.asarray(y))), a, b)))


def filled(directory, steps=(10, 20), **options):
    store = CheckpointManager(directory, **options)
    for step in steps:
        store.save(step, tree(step), extra={"config": {"step": step}, "data": {"next_index": step * 4}})
    store.wait()
    return store


def write_on(directory):
    """Saves and deletes until nobody listens: steps 1, 2, ..., of which one is kept; values of 7 from the second on."""
    store, step = filled(directory, steps=(1,), keep_last=1), 1
    while not select.select([sys.stdin], [], [], 0)[0]:
        step += 1
        store.save(step, tree(7), extra={})
        store.wait()
    store.close()


def biggest_files(directory):
    files = [path for path in directory.rglob("*") if path.is_file() and path.stat().st_size > 2000]
    return sorted(files, key=lambda path: -path.stat().st_size)
