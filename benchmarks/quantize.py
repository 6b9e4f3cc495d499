"""What quantizing costs, in units of `x * 2` measured in the same run.

    python benchmarks/quantize.py [--size 64] [--rounds 9] [--json]

Every policy is timed next to `x * 2`, turn by turn, so that a busy machine slows both; the ratio is that of medians.
x is float32, `--size` million numbers in rows of 4096. The aim on a CPU: NVFP4, 1D blocks, nearest, at most 3.
"""

import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Annotated, Any

import tyro
from tyro.conf import arg

from halfbyte.devices.compile_target import force_cpu_without_gpu, import_jax_silencing_stderr

if force_cpu_without_gpu(os.environ):
    import_jax_silencing_stderr()

import jax
import jax.numpy as jnp

from halfbyte import formats
from halfbyte.cli.bench import bench_versions
from halfbyte.formats import NVFP4, BlockFormat, all_finite, hadamard16, quantize

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
    "mxfp4 1d": policy(formats.MXFP4),
    "mxfp4_floor 1d": policy(formats.MXFP4_FLOOR),
    "mxfp4 1d, stochastic": policy(formats.MXFP4, rounding="stochastic"),
    "mxfp8 1d": policy(formats.MXFP8),
    "mxfp8_e5m2 1d": policy(formats.MXFP8_E5M2),
    "fp8": policy(formats.FP8),
    "fp8_e5m2": policy(formats.FP8_E5M2),
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


def main(size: int = 64, rounds: int = 7, only: str = "", alone: Annotated[bool, arg(name="json")] = False) -> None:
    """`size` millions (2**20) of numbers, `rounds` timed turns of each policy whose name starts with `only`."""
    x = jax.random.normal(jax.random.key(0), (size * 2**20 // WIDTH, WIDTH), jnp.float32)
    twice = jax.jit(lambda x: x * jnp.float32(2)).lower(x).compile()
    about = bench_versions() | {"size": f"{size} x 2**20 float32", "rounds": str(rounds)}
    rows = (measure(name, x, twice, rounds) for name in POLICIES if name.startswith(only))
    if alone:
        print(json.dumps({**about, "target": TARGET, "results": list(rows)}))
        return
    print("\n".join(f"{key:8} {value}" for key, value in about.items()))
    print(f"\n{'policy':24} {'x * 2, ms':>10} {'ms':>10} {'ratio':>7} {'compile, CPU s':>15}")
    for row in rows:
        print("{policy:24} {twice_ms:10.1f} {ms:10.1f} {ratio:7.2f} {compile_cpu_s:15.2f}".format(**row), flush=True)
    print(f"\nthe aim on a CPU: nvfp4 1d at most {TARGET:g} of x * 2")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
