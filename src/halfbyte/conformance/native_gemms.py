"""Native GEMMs against the carrier backend, in all three directions, before the first step.

A released kernel once rounded every gradient to zero on one chip. `carrier` and the native GEMM are given operands of
the same numbers, the native one's made by the passes that the run will use, at the sizes that a device of the run
multiplies. What may differ is the order of accumulation and the rounding of the result to bfloat16, twice for a native
one: each element must agree to 2^-7 of the row's largest.
"""

from collections.abc import Iterable

import jax
import jax.numpy as jnp

from halfbyte import ops
from halfbyte.recipe import Recipe

TOLERANCE = 2.0**-7
SIZES = (256, 128, 384)
MOST_TOKENS = 4096  # enough for every path through a kernel, and a second on any GPU


class SelfTestFailed(Exception):
    """A kernel of this device does not compute what it should."""


def native_gemms_agree(
    recipe: Recipe, *, sizes: tuple[int, int, int] = SIZES, site: str = "", candidate: str = "native"
) -> dict[str, float]:
    """Largest relative deviation of fprop, dgrad and wgrad from `carrier` for a linear of `sizes` (tokens, inputs,
    outputs). Raises SelfTestFailed beyond the tolerance, naming the `site`.
    """
    tokens, inputs, outputs = sizes
    keys = jax.random.split(jax.random.key(7), 4)
    x = jax.random.normal(keys[0], (tokens, inputs), jnp.bfloat16)
    w = jax.random.normal(keys[1], (inputs, outputs), jnp.float32)
    dy = jax.random.normal(keys[2], (tokens, outputs), jnp.bfloat16)

    def directions(backend: str) -> dict[str, jax.Array]:
        def run(x: jax.Array, w: jax.Array, dy: jax.Array) -> dict[str, jax.Array]:
            y, pull = jax.vjp(lambda x, w: ops.qdot(x, w, recipe=recipe, key=keys[3], backend=backend), x, w)
            dx, dw = pull(dy)
            return {"fprop": y, "dgrad": dx, "wgrad": dw}

        return jax.jit(run)(x, w, dy)

    expected, found = directions("carrier"), directions(candidate)
    deviations = {name: deviation(found[name], expected[name]) for name in expected}
    wrong = [f"{name} off by {value:.3g}" for name, value in deviations.items() if not value <= TOLERANCE]
    if wrong:
        where = f" at {site}" if site else ""
        raise SelfTestFailed(
            f"self-test of {candidate} GEMMs under {recipe.name}{where} (sizes {sizes}) failed: "
            f"{', '.join(wrong)} of the largest element (limit {TOLERANCE:g}); nothing else is used in its place; "
            "train with --precision.backend carrier, which emulates the recipe, and report this device"
        )
    return deviations


def native_sites_agree(sites: Iterable[tuple[str, Recipe, tuple[int, int, int]]]) -> dict[str, dict[str, float]]:
    """`native_gemms_agree` of each (path, recipe, sizes), equal linears once: path -> deviations. Tokens beyond
    MOST_TOKENS are left out, for time.
    """
    found: dict[tuple[Recipe, tuple[int, int, int]], dict[str, float]] = {}
    agreed = {}
    for path, recipe, (tokens, inputs, outputs) in sites:
        sizes = min(tokens, MOST_TOKENS), inputs, outputs
        if (recipe, sizes) not in found:
            found[recipe, sizes] = native_gemms_agree(recipe, sizes=sizes, site=path)
        agreed[path] = found[recipe, sizes]
    return agreed


def deviation(found: jax.Array, expected: jax.Array) -> float:
    """Largest difference, relative to the largest expected element of its row; inf if any is not finite."""
    found, expected = found.astype(jnp.float32), expected.astype(jnp.float32)
    size = jnp.maximum(jnp.max(jnp.abs(expected), axis=-1, keepdims=True), 1e-30)
    worst = float(jnp.max(jnp.abs(found - expected) / jnp.broadcast_to(size, expected.shape)))
    return worst if worst == worst else float("inf")
