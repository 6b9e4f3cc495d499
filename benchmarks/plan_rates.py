"""What `halfbyte plan` takes from a card: how much of its peaks GEMMs, passes over memory and attention reach.

    python benchmarks/plan_rates.py --out plan_rates.json

GEMMs are the three of every linear of a layer of llama3.2-1b and llama3-8b with 16,384 tokens, in bf16 and, of the MLP,
in fp8; passes are what XLA makes of a norm, a residual sum and an AdamW update; attention is cuDNN's, causal, of both
models. Each runs for a third of a second after the clocks have settled: a card at its power limit slows down. A rate
is the sum of the work over the sum of the times. `zeros` are the same GEMMs with a second operand of zeros, and
attention to zeros: what mocked GPUs compute, whose weights never arrive.
"""

import functools
import json
import pathlib
import time
from collections import defaultdict
from typing import Any

import jax
import jax.numpy as jnp
import kernel_timing
import tyro
from gemm_cases import CUBLAS, dequantized, dot, shapes_of, split
from kernel_timing import Case

from halfbyte.devices import lookup
from halfbyte.kernels.tensor_scale_kernel import GEMM_ALPHA_INDEX
from halfbyte.ops.attention import attention
from halfbyte.ops.rms_norm_vjp import rms_norm

TOKENS = 16_384
MLP = {"1b": ((2048, 8192), (8192, 2048)), "8b": ((4096, 14336), (14336, 4096))}  # (in, out) of a linear
ATTENTION = {"1b": ((2048, 2048), (2048, 512)), "8b": ((4096, 4096), (4096, 1024))}
HEADS = {"1b": (4, 4096, 32, 8, 64), "8b": (2, 8192, 32, 8, 128)}  # batch, seq, heads, kv heads, head dim
LASTS = 0.35
SETS = 4  # inputs that a program takes in turn: no launch is waited for, and none finds its input in the cache


random_array = functools.cache(kernel_timing.random_array)  # made once: there are many


def gemm_cases() -> list[Case]:
    """fprop, dgrad and wgrad of each linear."""
    out = []
    for k, n in (*MLP["1b"], *ATTENTION["1b"], *MLP["8b"], *ATTENTION["8b"]):
        for layout, m, width, inner in (("nn", TOKENS, n, k), ("nt", TOKENS, k, n), ("tn", k, n, TOKENS)):
            left, right = shapes_of(layout, m, width, inner)
            fn = functools.partial(dot, layout=layout, dtype=jnp.float32 if layout == "tn" else jnp.bfloat16)
            for name in ("bf16", "zeros") if k * n >= 2**24 and layout == "nn" else ("bf16",):
                other = jnp.zeros(right, jnp.bfloat16) if name == "zeros" else random_array(right, 1)
                sets = [(random_array(left, i), other) for i in range(SETS)]
                out.append(Case(name, (m, width, inner), layout, fn, sets, 2.0 * TOKENS * k * n, "TFLOP/s"))
    return out


def fp8_cases() -> list[Case]:
    """Forward as it is, backward with split sums, as the recipe has them."""
    out, scale = [], jnp.full(GEMM_ALPHA_INDEX + 1, 0.01, jnp.float32)
    for k, n in (*MLP["1b"], *MLP["8b"]):
        for m, width, inner, fn in ((TOKENS, n, k, dequantized), (TOKENS, k, n, split), (k, n, TOKENS, split)):
            given = random_array((width, inner), 9, jnp.float8_e4m3fn)
            for name, other in (("fp8", given), ("fp8 zeros", jnp.zeros_like(given))):
                sets = [(random_array((m, inner), i, jnp.float8_e4m3fn), other, scale, scale) for i in range(SETS)]
                shape, work = (m, width, inner), 2.0 * TOKENS * k * n
                out.append(Case(name, shape, fn.__name__, fn, sets, work, "TFLOP/s", CUBLAS))
    return out


def pass_cases() -> list[Case]:
    """Bytes are those that must move."""
    out = []
    for width in (2048, 4096):
        x = [random_array((TOKENS, width), i) for i in range(SETS)]
        weight, size = jnp.ones(width, jnp.float32), 2.0 * TOKENS * width
        norms, sums = [(each, weight) for each in x], list(zip(x, x[1:] + x[:1], strict=True))
        out.append(Case("pass", x[0].shape, "norm", rms_norm, norms, 2 * size))
        out.append(Case("pass", x[0].shape, "sum", jnp.add, sums, 3 * size))
        state = [random_array((width, 4 * width), i, jnp.float32) for i in range(4 * SETS)]
        sets = [tuple(state[4 * i : 4 * i + 4]) for i in range(SETS)]
        out.append(Case("pass", state[0].shape, "AdamW", _adamw, sets, 28.0 * state[0].size))
    return out


def _adamw(w, g, mu, nu):
    mu, nu = 0.9 * mu + 0.1 * g, 0.95 * nu + 0.05 * g * g
    return w - 1e-3 * (mu / (jnp.sqrt(jnp.abs(nu)) + 1e-8) + 0.1 * w), mu, nu


def attention_cases() -> list[Case]:
    """Forward is two products, backward five; causal kernels do half of each."""
    out = []
    for batch, seq, heads, kv, dim in HEADS.values():
        q, dy = (random_array((batch, seq, heads, dim), i) for i in range(2))
        k, v = (random_array((batch, seq, kv, dim), i) for i in (2, 3))
        product = batch * heads * seq * seq * float(dim)
        for name, sets in (("attention", (q, k, v, dy)), ("attention zeros", (0 * q, 0 * k, 0 * v, 0 * dy))):
            out.append(Case(name, q.shape, "forward", _attend, [sets], 2 * product, "TFLOP/s"))
            out.append(Case(name, q.shape, "both", _attend_back, [sets], 7 * product, "TFLOP/s"))
    return out


def _attend(q, k, v, dy):
    return attention(q, k, v)


def _attend_back(q, k, v, dy):
    y, back = jax.vjp(attention, q, k, v)
    return y, back(dy)


def timed(program: Any, sets: Any) -> float:
    """Seconds of one set, over `LASTS` after a tenth of a second."""

    def lap(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            result = program(sets)
        jax.block_until_ready(result)
        return (time.perf_counter() - start) / count

    once = lap(3)
    lap(int(0.1 / once) + 1)
    return lap(int(LASTS / once) + 1) / len(sets)


def rates(rows: list[dict[str, Any]], peaks: dict[str, float], bandwidth: float) -> dict[str, float]:
    """The numbers of `plan`: parts of a peak, and FLOP/s of attention."""
    work, spent = defaultdict[str, float](float), defaultdict[str, float](float)
    for row in rows:
        name = f"{row['kernel']} {row['variant']}" if row["kernel"].startswith("attention") else row["kernel"]
        work[name] += row["work"]
        spent[name] += row["seconds"]
    back = work["attention both"] - work["attention forward"], spent["attention both"] - spent["attention forward"]
    return {
        "bf16": work["bf16"] / spent["bf16"] / peaks["bf16"],
        "fp8": work["fp8"] / spent["fp8"] / peaks["fp8"],
        "bf16 with zeros": work["zeros"] / spent["zeros"] / peaks["bf16"],
        "fp8 with zeros": work["fp8 zeros"] / spent["fp8 zeros"] / peaks["fp8"],
        "memory": work["pass"] / spent["pass"] / bandwidth,
        "attention forward": work["attention forward"] / spent["attention forward"],
        "attention backward": back[0] / back[1],
        "attention both, over zeros": work["attention zeros both"] / spent["attention zeros both"],
    }


def main(out: pathlib.Path) -> None:
    cases, rows = [*gemm_cases(), *fp8_cases(), *pass_cases(), *attention_cases()], []
    programs = kernel_timing.compile_cases(cases, 8)
    kernel_timing.warm_clocks()
    for case, program in zip(cases, programs, strict=True):
        row = case.row(timed(program.result(), case.inputs))
        rows.append(row)
        print(f"{case.kernel:10s} {case.variant:12s} {case.shape!s:24s} {row['rate']:8.1f} {case.unit}", flush=True)
    card = lookup(jax.devices()[0])
    assert card.bandwidth is not None
    found = rates(rows, dict(card.peak), card.bandwidth)
    kernel_timing.write(out, {"rates": found, "rows": rows})
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
