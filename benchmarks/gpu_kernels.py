"""GB/s of every quantize kernel against a plain copy in the same run, and TFLOP/s of the GEMMs, bits checked first.

    python benchmarks/gpu_kernels.py --out kernels.json [--only passes,weights,swiglu,codes,gemm,f8,norm]
        [--shapes AxB,...]

Bytes are compulsory ones: each input read once, each output written once, in the form that the GEMM consumes. Every
kernel is first compared bit for bit, inside jit, with the NumPy oracle (`tests/ops/kernels/test_on_gpu.py`); if one
fails, nothing is timed. `--only codes` times what a block-scaled GEMM reads; `pass` in a name means that the maxima are
found first.
"""

import os
import pathlib
import subprocess
import sys
import time
import traceback
from typing import Any

import codes_cases
import gemm_cases
import kernel_cases
import norm_cases
import tyro
from kernel_timing import run_cases, table, write

ROOT = pathlib.Path(__file__).resolve().parents[1]
SHAPES = "16384x2048,16384x8192,8192x4096,8192x14336"
GROUPS = {
    "passes": kernel_cases.pass_cases,
    "weights": kernel_cases.weight_cases,
    "swiglu": kernel_cases.swiglu_cases,
    "codes": codes_cases.cases,
    "gemm": gemm_cases.cases,
    "f8": gemm_cases.f8_cases,
    "norm": norm_cases.cases,
}


def main(
    out: pathlib.Path | None = None, only: str = ",".join(GROUPS), shapes: str = SHAPES, threads: int = 16,
    budget: float = 240.0,
) -> int:  # fmt: skip
    """No group begins after `budget` seconds."""
    if not bits_are_right():
        return 3
    sizes = [tuple(int(n) for n in s.split("x")) for s in shapes.split(",")]
    started, rows = time.time(), list[dict[str, Any]]()
    failed: dict[str, str] = {}
    for group in only.split(","):
        if time.time() - started > budget:
            print(f"skipped {group}: {time.time() - started:.0f} s spent", flush=True)
            continue
        try:
            rows += run_cases(GROUPS[group](sizes), threads)
        except Exception:  # one group must not take the others with it
            print(f"group {group} failed\n{traceback.format_exc()}", flush=True)
            failed[group] = traceback.format_exc()[-2000:]
        print(f"-- {group} done at {time.time() - started:.0f} s", flush=True)
        write(out, {"rows": rows, "failed_groups": failed})
    print(table(rows))
    return 3 if failed else 0


def bits_are_right() -> bool:
    """Whether the kernels on this GPU pass their tests, in a process that gives the memory back."""
    tests = ["-q", "-n0", "-p", "no:cacheprovider", str(ROOT / "tests" / "ops" / "kernels" / "test_on_gpu.py")]
    environ = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    return subprocess.run([sys.executable, "-m", "pytest", *tests], cwd=ROOT, env=environ).returncode == 0


if __name__ == "__main__":
    sys.exit(tyro.cli(main, description=__doc__))
