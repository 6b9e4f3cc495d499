"""GB/s of every quantize kernel against a plain copy in the same run, and TFLOP/s of the GEMMs, bits checked first.

    python benchmarks/gpu_kernels.py --out kernels.json [--only passes,weights,swiglu,gemm,f8] [--shapes 16384x2048,...]

Bytes are compulsory ones: each input read once, each output written once, in the form that the GEMM consumes. Every
kernel is compared bit for bit, inside jit, with the NumPy oracle of the tests before anything is timed; a kernel that
fails has no rate. Each runs in several tilings; the table shows the best, the JSON all of them.
"""

import argparse
import concurrent.futures
import dataclasses
import json
import pathlib
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests" / "ops" / "kernels"), str(ROOT / "benchmarks")]

from halfbyte.ops.kernels import Tiling  # noqa: E402

SHAPES = "16384x2048,16384x8192,8192x4096,8192x14336"


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


def environment() -> dict[str, Any]:
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "platform": device.platform,
        "jax": jax.__version__,
        "jaxlib": __import__("jaxlib").__version__,
        "python": sys.version.split()[0],
        "commit": commit.stdout.strip() or None,
        "date": time.strftime("%Y-%m-%d"),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=None)
    parser.add_argument("--only", default="passes,weights,swiglu,gemm,f8")
    parser.add_argument("--shapes", default=SHAPES)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--budget", type=float, default=240.0, help="seconds after which no further group starts")
    args = parser.parse_args()
    shapes = [tuple(int(n) for n in s.split("x")) for s in args.shapes.split(",")]
    import f8_cases
    import gemm_cases
    import kernel_cases
    import swiglu_cases

    groups = {
        "passes": (kernel_cases.pass_checks, kernel_cases.pass_cases),
        "weights": (kernel_cases.weight_checks, kernel_cases.weight_cases),
        "swiglu": (swiglu_cases.checks, swiglu_cases.cases),
        "gemm": (gemm_cases.checks, gemm_cases.cases),
        "f8": (f8_cases.checks, f8_cases.cases),
    }

    started, rows = time.time(), []
    report: dict[str, Any] = {"environment": environment(), "checks": {}}
    for group in args.only.split(","):
        spent = time.time() - started
        if spent > args.budget:
            print(f"skipped {group}: {spent:.0f} s spent", flush=True)
            continue
        try:
            checks = groups[group][0](args.threads)
            report["checks"].update(checks)
            for name, verdict in checks.items():
                print(f"bits {name:40s} {verdict}", flush=True)
            wrong = {name.split(":")[0] for name, verdict in checks.items() if verdict != "equal"}
            cases = [c for c in groups[group][1](shapes) if c.kernel not in wrong]
            rows += run_cases(cases, args.threads)
        except Exception:  # one group must not take the others with it
            print(f"group {group} failed\n{traceback.format_exc()}", flush=True)
            report.setdefault("failed_groups", {})[group] = traceback.format_exc()[-2000:]
        print(f"-- {group} done at {time.time() - started:.0f} s", flush=True)
        report["rows"] = rows
        if args.out:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(report, indent=1))
    for row in rows:
        if "error" in row:
            print(f"error {row['kernel']} {row['shape']} {row['variant']}: {row['error'][:160]}")
    print(json.dumps(report["environment"]))
    print(table(rows))
    bad = [name for name, verdict in report["checks"].items() if verdict != "equal"]
    return 3 if bad or "failed_groups" in report else 0


if __name__ == "__main__":
    raise SystemExit(main())
