"""What a rewritten linear costs to compile: an MLP of 1, 2, 4 and 8 unrolled linears of one shape, and the same 8 in a
scan, as they are and through apply_recipe; value and gradient.

    python benchmarks/compile_cost.py [--json]

CPU seconds of tracing and of compiling, and the compiled program's text in kB; per site is the slope from 2 to 8.
"""

import json
import sys
import time

import jax
import jax.numpy as jnp

import halfbyte as hb
from halfbyte.recipe import step_key

SITES, WIDTH, TOKENS = (2, 8), 64, 64


def unrolled(params, x):
    for w in params.values():
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def scanned(params, x):
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["stack"])
    return jnp.mean(x**2)


def weights(sites, *, stacked):
    one = jnp.ones((WIDTH, WIDTH))
    return {"stack": jnp.stack([one] * sites)} if stacked else {f"layer_{i}": one for i in range(sites)}


def cost(loss, params, recipe):
    """(seconds to trace, seconds to compile, kB of the program)."""
    fn = loss if recipe is None else hb.apply_recipe(loss, recipe, key=step_key(0, 0), show=None)
    jax.clear_caches()
    start = time.process_time()
    lowered = jax.jit(jax.value_and_grad(fn)).lower(params, jnp.ones((TOKENS, WIDTH)))
    traced = time.process_time()
    compiled = lowered.compile()
    done = time.process_time()
    return traced - start, done - traced, len(compiled.as_text()) / 1e3


def main():
    rows = []
    for recipe in (None, "nvfp4"):
        few, many = (cost(unrolled, weights(n, stacked=False), recipe) for n in SITES)
        each = [(b - a) / (SITES[1] - SITES[0]) for a, b in zip(few, many)]
        rows.append({"program": "unrolled, a site", "recipe": recipe or "none", "values": each})
        rows.append({"program": f"{SITES[1]} unrolled", "recipe": recipe or "none", "values": list(many)})
        scan = cost(scanned, weights(SITES[1], stacked=True), recipe)
        rows.append({"program": f"{SITES[1]} in a scan", "recipe": recipe or "none", "values": list(scan)})
    if "--json" in sys.argv:
        print(json.dumps({"rows": rows, "jax": jax.__version__, "device": jax.devices()[0].device_kind}))
        return
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}; CPU seconds")
    print(f"{'program':<20} {'recipe':<7} {'trace':>7} {'compile':>8} {'kB':>7}")
    for row in rows:
        trace, compiling, size = row["values"]
        print(f"{row['program']:<20} {row['recipe']:<7} {trace:7.2f} {compiling:8.2f} {size:7.0f}")


if __name__ == "__main__":
    main()
