"""GB/s of every quantize kernel against a plain copy in the same run, and TFLOP/s of the GEMMs, bits checked first.

    python benchmarks/gpu_kernels.py --out kernels.json [--only passes,weights,swiglu,codes,gemm,f8] [--shapes AxB,...]

Bytes are compulsory ones: each input read once, each output written once, in the form that the GEMM consumes. Every
kernel is first compared bit for bit, inside jit, with the NumPy oracle (`tests/ops/kernels/test_on_gpu.py`); if one
fails, nothing is timed. Each runs in several tilings; the table shows the best, the JSON all of them. `--only codes`
times what a block-scaled GEMM reads; `pass` in a name means that the maxima are found first.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import time
import traceback
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]

import codes_cases  # noqa: E402
import f8_cases  # noqa: E402
import gemm_cases  # noqa: E402
import kernel_cases  # noqa: E402
from kernel_timing import run_cases, table  # noqa: E402

from halfbyte.cli.bench import versions  # noqa: E402

SHAPES = "16384x2048,16384x8192,8192x4096,8192x14336"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=None)
    parser.add_argument("--only", default="passes,weights,swiglu,codes,gemm,f8")
    parser.add_argument("--shapes", default=SHAPES)
    parser.add_argument("--threads", type=int, default=min(16, os.cpu_count() or 8))
    parser.add_argument("--budget", type=float, default=240.0, help="seconds after which no further group starts")
    args = parser.parse_args()
    shapes = [tuple(int(n) for n in s.split("x")) for s in args.shapes.split(",")]
    groups = {
        "passes": kernel_cases.pass_cases,
        "weights": kernel_cases.weight_cases,
        "swiglu": kernel_cases.swiglu_cases,
        "codes": codes_cases.cases,
        "gemm": gemm_cases.cases,
        "f8": f8_cases.cases,
    }

    if not bits_are_right():
        return 3
    started, rows = time.time(), []
    report: dict[str, Any] = {"environment": versions()}
    for group in args.only.split(","):
        spent = time.time() - started
        if spent > args.budget:
            print(f"skipped {group}: {spent:.0f} s spent", flush=True)
            continue
        try:
            rows += run_cases(groups[group](shapes), args.threads)
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
    return 3 if "failed_groups" in report else 0


def bits_are_right() -> bool:
    """Whether the kernels on this GPU pass their tests, in a process that gives the memory back."""
    tests = ["-q", "-n0", "-p", "no:cacheprovider", str(ROOT / "tests" / "ops" / "kernels" / "test_on_gpu.py")]
    environ = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    return subprocess.run([sys.executable, "-m", "pytest", *tests], cwd=ROOT, env=environ).returncode == 0


if __name__ == "__main__":
    raise SystemExit(main())
