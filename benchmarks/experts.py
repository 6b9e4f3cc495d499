"""Experts on a Hopper GPU: how fast grouped kernels are, and where a step's time goes. Prints tables, writes JSON.

    python benchmarks/experts.py speed --out FILE      # TFLOP/s of true rows, Qwen3-30B-A3B's shapes
    python benchmarks/experts.py step --out FILE       # where the time of a step goes, kernel by kernel

`speed`: 128 experts, 2,048 rows each on average, sizes drawn at random, and equal ones; beside them a batched einsum of
equal groups, one with room for the largest group, tokamax's ragged dot where it is installed, and JAX's own ragged
kernels. `step`: 8 layers of Qwen3-30B-A3B, 8 x 4096 tokens, policy `experts`, by recipe, in a loop (`--unroll 1`) and
without one (0): milliseconds, shares by kind, the longest kernels.
"""

import dataclasses
import importlib.util
import itertools
import json
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from kernel_timing import Case, run_cases, write

from halfbyte import plan
from halfbyte.cli import bench as command
from halfbyte.hlo import parse_hlo
from halfbyte.hlo.trace_breakdown import EventClassifier, device_events, step_time_breakdown
from halfbyte.kernels import hopper_grouped_gemm
from halfbyte.kernels.hopper_gemm import GemmTiling
from halfbyte.plan.step_placement import peak_bytes
from halfbyte.plan.step_timing import synthetic_batch
from halfbyte.train import create_state, run_mesh

EXPERTS, WIDTH, HIDDEN, ROWS = 128, 2048, 768, 2048
PEAK_ROWS = EXPERTS * ROWS
STEP = command.Args("qwen3-30b-a3b", policy="experts", batch=8, seq=4096, layers=8)
STEPS, LONGEST = 3, 40
TRIED = (GemmTiling(), GemmTiling(64, 256, warpgroup_split_dim="m"))
Job = tuple[Callable[..., Any], tuple[jax.Array, ...]]


def speed(out: Path) -> dict[str, Any]:
    """TFLOP/s of true rows of each GEMM by each way; all are compiled first, at once."""
    random = np.random.default_rng(0)
    counts = random.multinomial(PEAK_ROWS, random.dirichlet(np.full(EXPERTS, 20.0)))
    equal = np.full(EXPERTS, ROWS)
    rows = int(tiles_of(counts).sum()) * hopper_grouped_gemm.GROUP_TILE_ROWS
    keys = jax.random.split(jax.random.key(0), 3)
    x, dy = (jax.random.normal(k, (rows, n), jnp.bfloat16) for k, n in zip(keys, (WIDTH, HIDDEN), strict=False))
    w = jax.random.normal(keys[2], (EXPERTS, WIDTH, HIDDEN), jnp.bfloat16)
    jobs = dict(ours("drawn groups", x, w, dy, counts))
    jobs |= ours("equal groups", x[:PEAK_ROWS], w, dy[:PEAK_ROWS], equal)
    jobs |= einsums("equal groups", x, w, dy, ROWS)
    jobs |= einsums("room for the largest group", x, w, dy, int(counts.max()))
    jobs |= raggeds(x, w, dy, jnp.asarray(tiles_of(counts) * hopper_grouped_gemm.GROUP_TILE_ROWS, jnp.int32))
    found: dict[str, Any] = {"rows": rows, "true rows": PEAK_ROWS, "largest group": int(counts.max())}
    if importlib.util.find_spec("tokamax") is None:
        found["tokamax"] = "not installed here"
    work = 2.0 * PEAK_ROWS * WIDTH * HIDDEN
    cases = [Case(name, (), "", fn, [args], work, "TFLOP/s") for name, (fn, args) in jobs.items()]
    for row in run_cases(cases, 16):
        found[row["kernel"]] = row["error"] if "error" in row else round(row["rate"], 1)
    write(out, {"speed": found})
    return found


def tiles_of(counts: np.ndarray) -> np.ndarray:
    return -(-counts // hopper_grouped_gemm.GROUP_TILE_ROWS)


def ours(what: str, x: jax.Array, w: jax.Array, dy: jax.Array, counts: np.ndarray) -> Iterator[tuple[str, Job]]:
    """Our kernels by each tiling tried, the default first; of equal groups by that alone."""
    experts = jnp.asarray(np.repeat(np.arange(EXPERTS), tiles_of(counts)), jnp.int32)
    alpha, sizes = jnp.ones(EXPERTS, jnp.float32), jnp.asarray(counts, jnp.int32)
    gemms: dict[str, Job] = {
        "fprop": (hopper_grouped_gemm.grouped_gemm, (x, w, alpha, experts)),
        "dgrad": (partial(hopper_grouped_gemm.grouped_gemm, layout="nt"), (dy, w, alpha, experts)),
        "wgrad": (hopper_grouped_gemm.grouped_wgrad_gemm, (x, dy, alpha, sizes)),
    }
    for name, (fn, args) in gemms.items():
        for t in TRIED[: None if what == "drawn groups" else 1]:
            yield (
                f"ours {name}, {what}, {t.warpgroup_m}x{t.warpgroup_n} {t.warpgroup_split_dim}",
                (partial(fn, tiling=t), args),
            )


def einsums(what: str, x: jax.Array, w: jax.Array, dy: jax.Array, room: int) -> Iterator[tuple[str, Job]]:
    """A batched einsum whose experts have `room` rows each, of which ROWS on average are true."""
    parts = [jnp.resize(each, (EXPERTS, room, each.shape[1])) for each in (x, dy)]
    yield f"einsum fprop, {what}", (partial(jnp.einsum, "eck,ekn->ecn"), (parts[0], w))
    yield f"einsum dgrad, {what}", (partial(jnp.einsum, "ecn,ekn->eck"), (parts[1], w))
    summed = partial(jnp.einsum, "eck,ecn->ekn", preferred_element_type=jnp.float32)
    yield f"einsum wgrad, {what}, float32 result", (summed, tuple(parts))


def raggeds(x: jax.Array, w: jax.Array, dy: jax.Array, sizes: jax.Array) -> Iterator[tuple[str, Job]]:
    """JAX's own ragged kernels, in one tiling, and tokamax's ragged dot where it is installed."""
    from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu, transposed_ragged_dot_mgpu

    shape = {"block_m": 128, "block_n": 128, "block_k": 64, "max_concurrent_steps": 4, "grid_block_n": 2}
    dot = lambda x, w, g: ragged_dot_mgpu.ragged_dot(x, w, group_sizes=g, **shape)  # noqa: E731
    back = lambda dy, w, g: ragged_dot_mgpu.ragged_dot(dy, w.swapaxes(1, 2), group_sizes=g, **shape)  # noqa: E731
    turned = lambda x, dy, g: transposed_ragged_dot_mgpu.transposed_ragged_dot(x, dy, group_sizes=g, **shape)  # noqa: E731
    yield "jax ragged_dot_mgpu fprop, drawn groups", (dot, (x, w, sizes))
    yield "jax ragged_dot_mgpu dgrad, drawn groups, weight turned first", (back, (dy, w, sizes))
    yield "jax transposed_ragged_dot_mgpu wgrad, drawn groups, bfloat16 result", (turned, (x, dy, sizes))
    if importlib.util.find_spec("tokamax") is not None:
        import tokamax

        yield "tokamax fprop, drawn groups", (tokamax.ragged_dot, (x, w, sizes))


def step(out: Path, recipes: str = "bf16", unroll: str = "1,0") -> dict[str, Any]:
    """Of each of `recipes` and each `unroll` (layers a turn of the loop; 0: all, no loop), several with commas:
    milliseconds a step, shares by kind, and the longest kernels.
    """
    command.prepare_environment(STEP)
    found: dict[str, Any] = {}
    for recipe_name, turns in itertools.product(recipes.split(","), unroll.split(",")):
        one = found[f"{recipe_name}, unroll {turns}"] = captured(recipe_name, int(turns))
        write(out, {"step": found})
        print(recipe_name, "unroll", turns, {name: each for name, each in one.items() if name != "longest"})
        print(*one["longest"], sep="\n", flush=True)
    return found


def captured(recipe_name: str, unroll: int) -> dict[str, Any]:
    """A few steps timed, then a few under the profiler: without CUDA graphs, in which kernels name no instruction."""
    begun = time.perf_counter()
    config = command.bench_config(dataclasses.replace(STEP, unroll=unroll), recipe_name, "none")
    moments = dataclasses.replace(config.optimizer, mu_dtype="bfloat16", nu_dtype="bfloat16")  # or it does not fit
    config = dataclasses.replace(config, optimizer=moments)
    mesh = run_mesh(config)
    run = plan.compile_step(config, mesh, seq=STEP.seq, options={"xla_gpu_enable_command_buffer": ""})
    compile_s = time.perf_counter() - begun
    state, batch = create_state(config, mesh), synthetic_batch(config, mesh, STEP.seq)

    def some() -> float:
        nonlocal state
        begun = time.perf_counter()
        for _ in range(STEPS):
            state, metrics = run(state, batch)
        jax.block_until_ready(metrics)
        return 1e3 * (time.perf_counter() - begun) / STEPS

    some()
    milliseconds = some()
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            some()
        (trace,) = Path(folder).rglob("*.xplane.pb")
        return {
            "milliseconds": round(milliseconds, 1),
            "compile_s": round(compile_s),
            "gib": round(peak_bytes(run) / 2**30, 1),
            "shares": {kind: round(share, 4) for kind, share in step_time_breakdown(trace, run.as_text()).items()},
            "longest": longest(trace, run.as_text()),
        }


def longest(trace: Path, program_text: str) -> list[tuple[float, int, str, str, str]]:
    """(milliseconds a step, calls, kind, name, where it comes from) of the instructions that take most; those of one
    name and origin, as the layers of an unrolled program have, are one."""
    devices, program = device_events(trace), parse_hlo(program_text)
    place, took, calls = (
        EventClassifier(program),
        defaultdict[tuple[str, ...], float](float),
        Counter[tuple[str, ...]](),
    )
    for event in devices[min(devices)]:
        kind, name = place(event), event.instruction or event.kernel
        if kind is not None:
            origin = program.instructions[name].origin[-160:] if name in program.instructions else ""
            key = kind, name.rstrip("0123456789."), origin
            took[key] += 1e3 * (event.stop - event.start) / STEPS
            calls[key] += 1
    first = sorted(took, key=lambda key: -took[key])[:LONGEST]
    return [(round(took[key], 2), calls[key] // STEPS, *key) for key in first]


if __name__ == "__main__":
    commands = {"speed": speed, "step": step}
    print(json.dumps(tyro.extras.subcommand_cli_from_dict(commands, description=__doc__), indent=1))
