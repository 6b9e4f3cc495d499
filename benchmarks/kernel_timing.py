"""How a kernel is timed on a GPU: cases compiled side by side, clocks warmed, the median of five batches.

What is timed is in the `*_cases.py` files, and `gpu_kernels.py` is what one runs.
"""

import concurrent.futures
import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from halfbyte.kernels import Tiling


@dataclasses.dataclass
class Case:
    """One variant of one kernel at one shape: `make()` gives the function, `inputs` are argument sets to rotate."""

    kernel: str
    shape: tuple[int, ...]
    variant: str
    make: Callable[[], Callable[..., Any]]
    inputs: list[tuple[Any, ...]]
    work: float  # bytes, or floating-point operations
    unit: str = "GB/s"
    options: dict[str, Any] = dataclasses.field(default_factory=dict)  # of the compiler


def chained(fn: Callable[..., Any]) -> Callable[..., Any]:
    """All input sets in one program, so that launch overhead of the host is not what is timed."""
    return lambda sets: [fn(*s) for s in sets]


def compile_case(case: Case) -> Any:
    abstract = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), case.inputs)
    return jax.jit(chained(case.make())).lower(abstract).compile(compiler_options=case.options or None)


def seconds(program: Any, sets: list[Any], *, wait: Callable[[Any], Any] = jax.block_until_ready) -> float:
    """Median seconds of one call of the kernel, from five batches after two warm-up runs; `wait` ends each."""
    for _ in range(2):
        wait(program(sets))
    start = time.perf_counter()
    wait(program(sets))
    once = time.perf_counter() - start
    repeats = int(np.clip(0.03 / max(once, 1e-6), 2, 40))
    samples = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(repeats):
            result = program(sets)
        wait(result)
        samples.append((time.perf_counter() - start) / (repeats * len(sets)))
    return float(np.median(samples))


def run_cases(cases: list[Case], threads: int) -> list[dict[str, Any]]:
    """Rows of results; a case that fails has an `error` and does not stop the others. Compiles all, then times."""
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        futures = [pool.submit(compile_case, case) for case in cases]
    warm_clocks()
    return [time_case(case, future) for case, future in zip(cases, futures, strict=True)]


def time_case(case: Case, future: "concurrent.futures.Future[Any]") -> dict[str, Any]:
    row: dict[str, Any] = {
        "kernel": case.kernel,
        "shape": list(case.shape),
        "variant": case.variant,
        "unit": case.unit,
    }
    try:
        row["seconds"] = seconds(future.result(), case.inputs)
        row["rate"] = case.work / row["seconds"] / (1e9 if case.unit == "GB/s" else 1e12)
    except Exception as error:  # a benchmark reports the failure and goes on
        row["error"] = f"{type(error).__name__}: {str(error)[:300]}"
    return row


def warm_clocks() -> None:
    """Half a second of matrix products, so that the first case finds the clocks that the last one has."""
    a = random_array((4096, 4096), 0)
    step = jax.jit(lambda x: (x @ a).astype(jnp.bfloat16) * jnp.bfloat16(0.01))
    stop = time.perf_counter() + 0.5
    x = a
    while time.perf_counter() < stop:
        for _ in range(20):
            x = step(x)
        x.block_until_ready()


def table(rows: list[dict[str, Any]]) -> str:
    """The best variant of each kernel and shape, with its ratio to the copy of that shape's run."""
    copies = {}
    for row in rows:
        if row["kernel"] == "copy" and "rate" in row:
            copies[tuple(row["shape"])] = max(row["rate"], copies.get(tuple(row["shape"]), 0.0))
    best: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}
    for row in rows:
        key = (row["kernel"], tuple(row["shape"]))
        if "rate" in row and row["rate"] > best.get(key, {}).get("rate", 0.0):
            best[key] = row
    lines = [f"{'kernel':26s} {'shape':>16s} {'us':>8s} {'rate':>8s} unit     /copy  variant"]
    for (kernel, shape), row in best.items():
        ratio = f"{row['rate'] / copies[shape]:.3f}" if row["unit"] == "GB/s" and shape in copies else "     "
        size = "x".join(map(str, shape))
        measured = f"{row['seconds'] * 1e6:8.1f} {row['rate']:8.0f} {row['unit']:8s}"
        lines.append(f"{kernel:26s} {size:>16s} {measured} {ratio}  {row['variant']}")
    return "\n".join(lines)


def random_array(shape: tuple[int, ...], seed: int, dtype: Any = jnp.bfloat16, size: float = 1.0) -> jax.Array:
    make = jax.jit(lambda key: (jax.random.normal(key, shape, jnp.float32) * size).astype(dtype))
    return make(jax.random.key(seed))


def tiling_name(tiling: Tiling) -> str:
    return f"c{tiling.columns} w{tiling.warps} {'cols' if tiling.columns_first else 'rows'}-first"
