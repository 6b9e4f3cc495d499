"""Experts on a Hopper GPU: are the grouped kernels right, and how fast are they? Prints tables, writes JSON.

    python benchmarks/experts.py check --out FILE      # grouped_qdot against its definition, by recipe
    python benchmarks/experts.py speed --out FILE      # TFLOP/s of true rows, Qwen3-30B-A3B's shapes

`check`: groups of 0 to 2,000 rows, experts that differ by 10^6 in size. `speed`: 128 experts, 2,048 rows each on
average, sizes drawn at random; a batched einsum of the same true rows and JAX's own ragged kernel beside it.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from halfbyte import ops
from halfbyte.kernels import grouped
from halfbyte.kernels.matmul import GemmTiling
from halfbyte.recipe import recipe

COUNTS = (0, 1, 15, 16, 17, 2000, 300, 64)
RECIPES = ("bf16", "fp8", "nvfp4", "nvfp4_no_rht", "mxfp4", "mxfp8")
EXPERTS, WIDTH, HIDDEN, ROWS = 128, 2048, 768, 2048
PEAK_ROWS = EXPERTS * ROWS


def both_ways(name: str, backend: str) -> Callable[..., Any]:
    chosen = recipe(name)

    @jax.jit
    def run(x, w, dy, counts):
        how = {"recipe": chosen, "key": jax.random.key(5), "backend": backend}
        y, back = jax.vjp(lambda x, w: ops.grouped_qdot(x, w, counts, **how), x, w)
        return y, *back(dy)

    return run


def units_apart(ours: jax.Array, theirs: jax.Array) -> tuple[float, int]:
    """(share of bf16 elements that differ, by how many units at most)."""
    a, b = (np.asarray(each).view(np.int16).astype(np.int64) for each in (ours, theirs))
    a, b = (np.where(each < 0, -(each & 0x7FFF), each) for each in (a, b))
    return float(np.mean(a != b)), int(np.abs(a - b).max())


def check() -> dict[str, Any]:
    random = np.random.default_rng(0)
    rows, inputs, outputs = sum(COUNTS) + 7, 256, 384
    sizes = np.repeat(np.append(10.0 ** np.linspace(-3, 3, len(COUNTS)), 1e4), (*COUNTS, 7))[:, None]
    x = jnp.asarray(random.normal(size=(rows, inputs)) * sizes, jnp.bfloat16)
    dy = jnp.asarray(random.normal(size=(rows, outputs)) / sizes, jnp.bfloat16)
    w = jnp.asarray(random.normal(size=(len(COUNTS), inputs, outputs)), jnp.float32)
    found = {}
    for name in RECIPES:
        given = x, w, dy, jnp.asarray(COUNTS, jnp.int32)
        y, dx, dw = both_ways(name, "auto")(*given)
        y0, dx0, dw0 = both_ways(name, "reference")(*given)
        largest = np.maximum(np.abs(dw0).max(axis=(1, 2), keepdims=True), 1e-30)
        line = {"y": units_apart(y, y0), "dx": units_apart(dx, dx0), "dw": float((np.abs(dw - dw0) / largest).max())}
        line["holds"] = all(share < 1e-3 and far <= 1 for share, far in (line["y"], line["dx"])) and line["dw"] <= 1e-6
        found[name] = line
        print(name, line, flush=True)
    return found


def seconds(fn: Callable[..., Any], *args: Any, calls: int = 8) -> float:
    """Of one call: the median of three runs of so many."""
    jax.block_until_ready(fn(*args))
    took = []
    for _ in range(3):
        begun = time.perf_counter()
        jax.block_until_ready([fn(*args) for _ in range(calls)][-1])
        took.append((time.perf_counter() - begun) / calls)
    return statistics.median(took)


def tilings(sizes: tuple[GemmTiling, ...]) -> dict[str, GemmTiling]:
    return {f"{t.m}x{t.n} {t.split} {t.minor}{t.width} in flight {t.in_flight}": t for t in sizes}


TRIED = {
    "fprop": tilings((GemmTiling(), GemmTiling(in_flight=1), GemmTiling(minor="m", width=16), GemmTiling(width=1))),
    "dgrad": tilings((GemmTiling(), GemmTiling(64, 256, split="m"), GemmTiling(64, 256, split="m", in_flight=1))),
    "wgrad": tilings((GemmTiling(), GemmTiling(in_flight=1), GemmTiling(minor="m"))),
}


def speed() -> dict[str, Any]:
    random = np.random.default_rng(0)
    counts = random.multinomial(PEAK_ROWS, random.dirichlet(np.full(EXPERTS, 20.0)))
    tiles = -(-counts // grouped.ROWS)
    rows, experts = int(tiles.sum()) * grouped.ROWS, jnp.asarray(np.repeat(np.arange(EXPERTS), tiles), jnp.int32)
    keys = jax.random.split(jax.random.key(0), 3)
    x, dy = (jax.random.normal(k, (rows, n), jnp.bfloat16) for k, n in zip(keys, (WIDTH, HIDDEN), strict=False))
    w = jax.random.normal(keys[2], (EXPERTS, WIDTH, HIDDEN), jnp.bfloat16)
    alpha, sizes = jnp.ones(EXPERTS, jnp.float32), jnp.asarray(counts, jnp.int32)
    flops = 2 * PEAK_ROWS * WIDTH * HIDDEN
    jobs = {
        "fprop": (lambda t: partial(grouped.rows, tiling=t), (x, w, alpha, experts)),
        "dgrad": (lambda t: partial(grouped.rows, layout="nt", tiling=t), (dy, w, alpha, experts)),
        "wgrad": (lambda t: partial(grouped.contraction, tiling=t), (x, dy, alpha, sizes)),
    }
    found: dict[str, Any] = {"rows": rows, "true rows": PEAK_ROWS}
    for name, (make, args) in jobs.items():
        for label, tiling in TRIED[name].items():
            found[f"{name} {label}"] = rate(flops, jax.jit(make(tiling)), *args)
    xb, wb = x[:PEAK_ROWS].reshape(EXPERTS, ROWS, WIDTH), dy[:PEAK_ROWS].reshape(EXPERTS, ROWS, HIDDEN)
    found["einsum fprop, equal groups"] = rate(flops, jax.jit(partial(jnp.einsum, "eck,ekn->ecn")), xb, w)
    found["einsum dgrad, equal groups"] = rate(flops, jax.jit(partial(jnp.einsum, "ecn,ekn->eck")), wb, w)
    found["einsum wgrad, equal groups"] = rate(flops, jax.jit(partial(jnp.einsum, "eck,ecn->ekn")), xb, wb)
    from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu

    shape = {"block_m": 128, "block_n": 128, "block_k": 64, "max_concurrent_steps": 4, "grid_block_n": 2}
    ragged = jax.jit(lambda x, w, g: ragged_dot_mgpu.ragged_dot(x, w, group_sizes=g, **shape))
    found["jax ragged_dot_mgpu fprop"] = rate(flops, ragged, x, w, jnp.asarray(tiles * grouped.ROWS, jnp.int32))
    return found


def rate(flops: int, fn: Callable[..., Any], *args: Any) -> float | str:
    """TFLOP/s, or what went wrong."""
    try:
        return round(flops / seconds(fn, *args) / 1e12, 1)
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:300]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("check", "speed"))
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    found = check() if args.what == "check" else speed()
    about = {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
    args.out.write_text(json.dumps({**about, args.what: found}, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
