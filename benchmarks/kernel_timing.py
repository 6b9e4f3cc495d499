"""How a kernel is timed on a GPU: cases compiled side by side, clocks warmed, the median of five batches.

What is timed is in the `*_cases.py` files, and `gpu_kernels.py` is what one runs.
"""

import concurrent.futures
import dataclasses
import functools
import json
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from halfbyte.cli.bench import bench_versions

Function = Callable[..., Any]


@dataclasses.dataclass
class Case:
    """One kernel at one shape, in one variant; `inputs` are argument sets to rotate."""

    kernel: str
    shape: tuple[int, ...]
    variant: str
    fn: Function
    inputs: list[tuple[Any, ...]]
    work: float  # bytes, or floating-point operations
    unit: str = "GB/s"
    options: dict[str, Any] = dataclasses.field(default_factory=dict)  # of the compiler

    def row(self, seconds: float) -> dict[str, Any]:
        """What is written down of it."""
        rate = self.work / seconds / (1e9 if self.unit == "GB/s" else 1e12)
        place = {"kernel": self.kernel, "shape": list(self.shape), "variant": self.variant, "unit": self.unit}
        return {**place, "work": self.work, "seconds": seconds, "rate": rate}


def compile_cases(cases: list[Case], threads: int) -> list["concurrent.futures.Future[Any]"]:
    """A program each, of all its input sets: then launch overhead of the host is not what is timed."""

    def compiled(case: Case) -> Any:
        abstract = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), case.inputs)
        program = jax.jit(lambda sets: [case.fn(*s) for s in sets]).lower(abstract)
        return program.compile(compiler_options=case.options or None)

    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        return [pool.submit(compiled, case) for case in cases]


def seconds(program: Function, sets: list[Any]) -> float:
    """Median seconds of one call of the kernel, from five batches after two warm-up runs."""
    for _ in range(2):
        jax.block_until_ready(program(sets))
    start = time.perf_counter()
    jax.block_until_ready(program(sets))
    once = time.perf_counter() - start
    repeats = int(np.clip(0.03 / max(once, 1e-6), 2, 40))
    samples = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(repeats):
            result = program(sets)
        jax.block_until_ready(result)
        samples.append((time.perf_counter() - start) / (repeats * len(sets)))
    return float(np.median(samples))


def run_cases(cases: list[Case], threads: int) -> list[dict[str, Any]]:
    """Rows of results; a case that fails has an `error` and does not stop the others. Compiles all, then times."""
    programs = compile_cases(cases, threads)
    warm_clocks()
    rows = []
    for case, program in zip(cases, programs, strict=True):
        try:
            rows.append(case.row(seconds(program.result(), case.inputs)))
        except Exception as error:  # a benchmark reports the failure and goes on
            told = f"{type(error).__name__}: {str(error)[:300]}"
            rows.append({"kernel": case.kernel, "shape": case.shape, "variant": case.variant, "error": told})
            print(f"error {case.kernel} {case.shape} {case.variant}: {told[:160]}", flush=True)
    return rows


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
    best: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}
    for row in (row for row in rows if "rate" in row):
        key = (row["kernel"], tuple(row["shape"]))
        best[key] = max(row, best.get(key, row), key=lambda each: each["rate"])
    lines = [f"{'kernel':26s} {'shape':>16s} {'us':>8s} {'rate':>8s} unit     /copy  variant"]
    for (kernel, shape), row in best.items():
        copy = best.get(("copy", shape)) if row["unit"] == "GB/s" else None
        ratio = f"{row['rate'] / copy['rate']:.3f}" if copy else "     "
        measured = f"{row['seconds'] * 1e6:8.1f} {row['rate']:8.0f} {row['unit']:8s}"
        lines.append(f"{kernel:26s} {'x'.join(map(str, shape)):>16s} {measured} {ratio}  {row['variant']}")
    return "\n".join(lines)


def write(out: pathlib.Path | None, found: dict[str, Any]) -> None:
    """The figures with device, versions and commit."""
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps({"environment": bench_versions(), **found}, indent=1) + "\n", encoding="utf-8")


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _random(key: jax.Array, shape: tuple[int, ...], dtype: Any, size: float) -> jax.Array:
    return (jax.random.normal(key, shape, jnp.float32) * size).astype(dtype)


def random_array(shape: tuple[int, ...], seed: int, dtype: Any = jnp.bfloat16, size: float = 1.0) -> jax.Array:
    return _random(jax.random.key(seed), shape, dtype, size)
