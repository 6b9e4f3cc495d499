"""What quantizing costs, in units of `x * 2` measured in the same run.

    python benchmarks/quantize.py [--size 64] [--rounds 9] [--json]

Every policy is timed next to `x * 2`, turn by turn, so that a busy machine slows both; the ratio is that of medians.
x is float32, `--size` million numbers in rows of 4096. The aim on a CPU: NVFP4, 1D blocks, nearest, at most 3.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from halfbyte.devices.platform import load_jax_quietly, settle_platform  # noqa: E402

if settle_platform(os.environ):
    load_jax_quietly()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

from halfbyte.cli.bench import versions  # noqa: E402
from halfbyte.formats import (  # noqa: E402
    FP8,
    FP8_E5M2,
    MXFP4,
    MXFP4_FLOOR,
    MXFP8,
    MXFP8_E5M2,
    NVFP4,
    BlockFormat,
    all_finite,
    hadamard16,
    quantize,
)  # fmt: skip

WIDTH = 4096
TARGET = 3.0  # of the first policy, on a CPU
Function = Callable[[jax.Array], Any]


def policy(fmt: BlockFormat, *, block: str = "1d", rounding: str = "rne", axis: int = -1) -> Function:
    return lambda x: quantize(x, fmt, block=block, rounding=rounding, axis=axis, key=jax.random.key(0))


POLICIES: dict[str, Function] = {
    "nvfp4 1d": policy(NVFP4),
    "nvfp4 1d, packed": lambda x: policy(NVFP4)(x).packed,
    "nvfp4 1d, columnwise": policy(NVFP4, axis=-2),
    "nvfp4 2d": policy(NVFP4, block="2d"),
    "nvfp4 1d, stochastic": policy(NVFP4, rounding="stochastic"),
    "nvfp4 1d, hadamard": lambda x: policy(NVFP4)(hadamard16(x)),
    "mxfp4 1d": policy(MXFP4),
    "mxfp4_floor 1d": policy(MXFP4_FLOOR),
    "mxfp4 1d, stochastic": policy(MXFP4, rounding="stochastic"),
    "mxfp8 1d": policy(MXFP8),
    "mxfp8_e5m2 1d": policy(MXFP8_E5M2),
    "fp8": policy(FP8),
    "fp8_e5m2": policy(FP8_E5M2),
    "finite check": all_finite,
}


def seconds(program: Function, x: jax.Array) -> float:
    start = time.perf_counter()
    jax.block_until_ready(program(x))
    return time.perf_counter() - start


def measure(name: str, x: jax.Array, twice: Function, rounds: int) -> dict[str, Any]:
    """Medians of `rounds` turns of `x * 2` and of the policy, after one of each that is not counted."""
    start = time.process_time()
    program = jax.jit(POLICIES[name]).lower(x).compile()
    compile_s = time.process_time() - start
    pairs = [(seconds(twice, x), seconds(program, x)) for _ in range(rounds + 1)][1:]
    unit, cost = (statistics.median(column) for column in zip(*pairs, strict=True))
    return {"policy": name, "twice_ms": unit * 1e3, "ms": cost * 1e3, "ratio": cost / unit, "compile_cpu_s": compile_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=64, help="millions of float32 numbers (2**20 each)")
    parser.add_argument("--rounds", type=int, default=7, help="timed turns of each policy")
    parser.add_argument("--only", default="", help="policies whose name starts so")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, nothing else")
    args = parser.parse_args()

    x = jax.random.normal(jax.random.key(0), (args.size * 2**20 // WIDTH, WIDTH), jnp.float32)
    twice = jax.jit(lambda x: x * jnp.float32(2)).lower(x).compile()
    about = versions() | {"size": f"{args.size} x 2**20 float32", "rounds": str(args.rounds)}
    if not args.json:
        print("\n".join(f"{key:8} {value}" for key, value in about.items()))
        print(f"\n{'policy':24} {'x * 2, ms':>10} {'ms':>10} {'ratio':>7} {'compile, CPU s':>15}")
    rows = []
    for name in (name for name in POLICIES if name.startswith(args.only)):
        rows.append(measure(name, x, twice, args.rounds))
        row = rows[-1]
        if not args.json:
            print(
                "{policy:24} {twice_ms:10.1f} {ms:10.1f} {ratio:7.2f} {compile_cpu_s:15.2f}".format(**row), flush=True
            )
    if args.json:
        print(json.dumps({**about, "target": TARGET, "results": rows}))
    elif rows and rows[0]["policy"] == "nvfp4 1d" and jax.devices()[0].platform == "cpu":
        print(f"\nnvfp4 1d: {rows[0]['ratio']:.2f} of x * 2; the aim is at most {TARGET:g}")


if __name__ == "__main__":
    main()
