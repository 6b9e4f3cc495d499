"""Native GEMMs against the carrier backend, in all three directions, before the first step.

A released kernel once rounded every gradient to zero on one chip. Both backends are handed the same 4-bit operands and
multiply them exactly; what may differ is the order of accumulation and the rounding of the result to bfloat16, so each
element must agree to 2^-7 of the row's largest.
"""

import jax
import jax.numpy as jnp

from halfbyte import ops
from halfbyte.recipe import Recipe

TOLERANCE = 2.0**-7
TOKENS, INPUTS, OUTPUTS = 256, 128, 384


class SelfTestFailed(Exception):
    """A native GEMM of this device does not compute what it should."""


def native_gemms_agree(recipe: Recipe, *, candidate: str = "native") -> dict[str, float]:
    """Largest relative deviation of fprop, dgrad and wgrad from `carrier`. Raises SelfTestFailed beyond the
    tolerance."""
    keys = jax.random.split(jax.random.key(7), 4)
    x = jax.random.normal(keys[0], (TOKENS, INPUTS), jnp.bfloat16)
    w = jax.random.normal(keys[1], (INPUTS, OUTPUTS), jnp.float32)
    dy = jax.random.normal(keys[2], (TOKENS, OUTPUTS), jnp.bfloat16)

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
        raise SelfTestFailed(
            f"self-test of {candidate} GEMMs under {recipe.name} failed: {', '.join(wrong)} of the largest element "
            f"(limit {TOLERANCE:g}); train with --precision.backend carrier and report this device"
        )
    return deviations


def deviation(found: jax.Array, expected: jax.Array) -> float:
    """Largest difference, relative to the largest expected element of its row; inf if any is not finite."""
    found, expected = found.astype(jnp.float32), expected.astype(jnp.float32)
    size = jnp.maximum(jnp.max(jnp.abs(expected), axis=-1, keepdims=True), 1e-30)
    worst = float(jnp.max(jnp.abs(found - expected) / jnp.broadcast_to(size, expected.shape)))
    return worst if worst == worst else float("inf")
