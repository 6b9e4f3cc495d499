"""Are the random bits random? Two linears that round with the same bits are each unbiased, so no gain shows it; their
errors add up all the same.

Every linear is given the same gradient dy and identity matrices for x and W, which every format holds exactly. Then dx
is dy, rounded with that linear's bits, and so is dw after its transform. What all keys have in common (elements that
saturate) is the mean over keys that nobody uses, and is taken off; what is left of two linears, layers or steps must be
uncorrelated. Equal bits give 1, unrelated ones 0 +- 0.03.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from halfbyte.models import LlamaConfig
from halfbyte.models.context import Context, segments
from halfbyte.models.keys import keys_of_layers
from halfbyte.recipe import Recipe

from .replay import product

SIZE = 64  # of the identity, at least: a multiple of every block
UNUSED = 64  # keys for the mean
LIMIT = 0.2  # of two linears' bits a fifth would have to be the same


def rounded_keys(cfg: LlamaConfig, ctx: Context, steps: Sequence[jax.Array]) -> list[tuple[str, Recipe, jax.Array]]:
    """(name, recipe, key) of every linear that rounds stochastically, at each step's key."""
    found = []
    for place, key in enumerate(steps):
        for segment in segments(cfg, ctx):
            numbers = jnp.arange(segment.start, segment.stop, dtype=jnp.int32)
            keys = keys_of_layers(key, segment.recipes, numbers)
            for index in range(len(numbers)):
                for path, chosen in segment.recipes.items():
                    site = path.removeprefix("layers/")
                    if chosen.stochastic:
                        found.append((f"step +{place} layer {segment.start + index} {site}", chosen, keys[site][index]))
    return found


def errors(chosen: Recipe, ctx: Context, keys: jax.Array) -> dict[str, jax.Array]:
    """GEMM -> rounding errors [keys, size * size] of length one, under a recipe; 0 where the key changes nothing."""
    size = max(SIZE, *(policy.run for policy in chosen.operands().values()))
    eye = jnp.eye(size, dtype=jnp.bfloat16)
    dy = jax.random.normal(jax.random.key(0), (size, size), jnp.bfloat16)

    def one(key: jax.Array) -> dict[str, jax.Array]:
        _, back = jax.vjp(lambda x, w: product(x, w, chosen, key, backend=ctx.backend), eye, eye)
        return dict(zip(("dgrad", "wgrad"), back(dy), strict=True))

    unused = jax.random.split(jax.random.key(1, impl=jax.random.key_impl(keys)), UNUSED)
    made = jax.lax.map(one, jnp.concatenate([keys, unused]))
    wanted = {"dgrad": chosen.dgrad_dy.stochastic, "wgrad": chosen.wgrad_dy.stochastic}
    return {gemm: _apart(made[gemm].astype(jnp.float32), len(keys)) for gemm in made if wanted[gemm]}


def _apart(results: jax.Array, many: int) -> jax.Array:
    flat = results.reshape(results.shape[0], -1)
    error = flat[:many] - jnp.mean(flat[many:], axis=0, keepdims=True)
    length = jnp.sqrt(jnp.sum(error * error, axis=1, keepdims=True))
    return jnp.where(length > 1e-3, error / jnp.maximum(length, 1e-3), 0.0)


class BitsCheck:
    """Compiled once for a model and a policy."""

    def __init__(self, cfg: LlamaConfig, ctx: Context):
        self.cfg, self.ctx = cfg, ctx
        self._errors: dict[Recipe, Any] = {}

    def run(self, steps: Sequence[jax.Array]) -> dict[str, Any]:
        """The largest correlation between two linears' errors and whose it is; `alarm` if it is none by chance."""
        names, rows = [], []
        listed = rounded_keys(self.cfg, self.ctx, steps)
        for chosen in dict.fromkeys(made for _, made, _ in listed):
            mine = [(name, key) for name, made, key in listed if made == chosen]
            if chosen not in self._errors:
                self._errors[chosen] = jax.jit(lambda keys, chosen=chosen: errors(chosen, self.ctx, keys))
            for gemm, found in self._errors[chosen](jnp.stack([key for _, key in mine])).items():
                rows.append(np.asarray(found))
                names += [f"{name} {gemm}" for name, _ in mine]
        if len(names) < 2:
            return {"pairs": 0, "largest": None, "alarm": False, "between": []}
        together = np.concatenate(rows)
        fixed = np.linalg.norm(together, axis=1) < 0.5  # rounded alike whatever the key
        correlation = np.where(fixed[:, None] | fixed[None], 1.0, np.abs(together @ together.T))
        np.fill_diagonal(correlation, 0.0)
        a, b = np.unravel_index(int(correlation.argmax()), correlation.shape)
        largest = float(correlation[a, b])
        return {
            "pairs": len(names) * (len(names) - 1) // 2,
            "largest": largest,
            "alarm": largest > LIMIT,
            "between": [names[int(a)], names[int(b)]],
        }
