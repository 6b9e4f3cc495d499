"""Native GEMMs against the carrier backend, in all three directions, before the first step.

A released kernel once rounded every gradient to zero on one chip. `carrier` and the native GEMM are given operands of
the same numbers, the native one's made by the passes that the run will use, at the sizes that a device of the run
multiplies. What may differ is the order of accumulation and the rounding of the result to bfloat16, twice for a native
one: each element must agree to 2^-7 of the row's largest.
"""

from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from halfbyte import ops
from halfbyte.kernels.block_scaled import SIDE
from halfbyte.recipe import Recipe

TOLERANCE = 2.0**-7
SIZES = (256, 128, 384)
MOST_TOKENS = 4096  # enough for every path through a kernel, and a second on any GPU
EXPERTS = (1537, 0, 1, 640, 128, 129, 15, 900)  # rows of each: none, whole and broken tiles
TILES = 4 * 160  # of a result at least, so that each of a GPU's multiprocessors walks over several


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

    where = f"{recipe.name}{f' at {site}' if site else ''} (sizes {sizes})"
    return _agreed(directions("carrier"), directions(candidate), f"{candidate} GEMMs under {where}")


def native_experts_agree(
    recipe: Recipe, *, sides: tuple[int, int], site: str = "", candidate: str = "auto",
    counts: Sequence[int] | None = None,
) -> dict[str, float]:  # fmt: skip
    """The same of experts whose matrices have `sides` (inputs, outputs), `counts` rows each: what serves them, beside a
    loop of `carrier` linears over experts. They differ in size by 10^4, so that no one's number is another's. A program
    that does not run is a failure too.
    """
    (inputs, outputs), most = sides, TILES * SIDE * SIDE // min(sides) + 1
    many = np.asarray((max(EXPERTS[0], most), *EXPERTS[1:]) if counts is None else counts, np.int32)
    keys = jax.random.split(jax.random.key(8), 4)
    rows = int(many.sum()) + 3  # of which the last have no expert
    sizes = np.repeat(np.float32(10.0) ** (np.arange(len(many) + 1, dtype=np.float32) % 5), np.append(many, 3))[:, None]
    x = (sizes * jax.random.normal(keys[0], (rows, inputs))).astype(jnp.bfloat16)
    w = jax.random.normal(keys[1], (len(many), inputs, outputs), jnp.float32)
    dy = (jax.random.normal(keys[2], (rows, outputs)) / sizes).astype(jnp.bfloat16)

    def directions(backend: str, *groups: jax.Array) -> dict[str, jax.Array]:
        def run(x: jax.Array, w: jax.Array, dy: jax.Array, *groups: jax.Array) -> dict[str, jax.Array]:
            def linear(x: jax.Array, w: jax.Array) -> jax.Array:
                return ops.grouped_qdot(x, w, *(groups or (many,)), recipe=recipe, key=keys[3], backend=backend)

            y, pull = jax.vjp(linear, x, w)
            dx, dw = pull(dy)
            return {"fprop": y, "dgrad": dx, "wgrad": dw}

        return jax.jit(run)(x, w, dy, *groups)

    what = f"native GEMMs of experts under {recipe.name}{f' at {site}' if site else ''} (matrices of {sides})"
    try:
        found = jax.block_until_ready(directions(candidate, jnp.asarray(many)))
    except jax.errors.JaxRuntimeError as error:
        raise SelfTestFailed(
            f"self-test of {what} did not run ({' '.join(str(error).split())[:300]}); train with --precision.backend "
            "carrier, which emulates the recipe, and report this device"
        ) from None
    return _agreed(directions("carrier"), found, what)


def _agreed(expected: dict[str, jax.Array], found: dict[str, jax.Array], what: str) -> dict[str, float]:
    """The deviation of each, none beyond the tolerance."""
    deviations = {name: deviation(found[name], expected[name]) for name in expected}
    wrong = [f"{name} off by {value:.3g}" for name, value in deviations.items() if not value <= TOLERANCE]
    if wrong:
        raise SelfTestFailed(
            f"self-test of {what} failed: "
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
