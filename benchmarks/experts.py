"""Experts on a Hopper GPU: are the grouped kernels right, and how fast are they? Prints tables, writes JSON.

    python benchmarks/experts.py check --out FILE      # grouped_qdot against a loop of qdot, by recipe
    python benchmarks/experts.py speed --out FILE      # TFLOP/s of true rows, Qwen3-30B-A3B's shapes
    python benchmarks/experts.py step --out FILE       # where the time of a step goes, kernel by kernel

`check`: groups of 0 to 2,000 rows, experts that differ by 10^6 in size; operands and results. `speed`: 128 experts,
2,048 rows each on average, sizes drawn at random, and equal ones; beside them a batched einsum of equal groups, one
with room for the largest group, tokamax's ragged dot where it is installed, and JAX's own ragged kernels. `step`: 8
layers of Qwen3-30B-A3B, 8 x 4096 tokens, policy `experts`, by recipe, in a loop (`--unroll 1`) and without one (0):
milliseconds, shares by kind, the longest kernels.
"""

import dataclasses
import importlib.util
import itertools
import json
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from kernel_timing import Case, run_cases, write

from halfbyte import bench, kernels, ops
from halfbyte.bench.fitting import bytes_needed
from halfbyte.bench.timing import synthetic_batch
from halfbyte.cli import bench as command
from halfbyte.diagnosis.definition import matrix
from halfbyte.diagnosis.replay import Linear
from halfbyte.diagnosis.truth import run_linear
from halfbyte.kernels import grouped
from halfbyte.kernels.matmul import GemmTiling, with_float32_output
from halfbyte.ops.grouped_linear import grouped_operands
from halfbyte.ops.tiles import Tiles
from halfbyte.profiling.breakdown import Placer, breakdown, events_of
from halfbyte.program import read
from halfbyte.recipe import recipe
from halfbyte.train import create_state, run_mesh

COUNTS = (0, 1, 15, 16, 17, 2000)
RECIPES = ("nvfp4", "nvfp4_no_rht", "mxfp4", "mxfp8", "fp8", "bf16")
MOST, INPUTS, OUTPUTS = 2048, 256, 384
EXPERTS, WIDTH, HIDDEN, ROWS = 128, 2048, 768, 2048
PEAK_ROWS = EXPERTS * ROWS
STEP = command.Args("qwen3-30b-a3b", policy="experts", batch=8, seq=4096, layers=8, state="bfloat16")
STEPS, LONGEST = 3, 40


class Given:
    """x, dy and w of experts that differ by 10^6 in size: rows one after another with seven that belong to nobody, in
    tiles, and each expert's alone, filled up to MOST."""

    def __init__(self) -> None:
        random = np.random.default_rng(0)
        sizes = 10.0 ** np.linspace(-3, 3, len(COUNTS))
        self.x = [random.normal(size=(n, INPUTS)) * size for n, size in zip(COUNTS, sizes, strict=True)]
        self.dy = [random.normal(size=(n, OUTPUTS)) / size for n, size in zip(COUNTS, sizes, strict=True)]
        self.w = jnp.asarray(random.normal(size=(len(COUNTS), INPUTS, OUTPUTS)), jnp.float32)
        self.counts = jnp.asarray(COUNTS, jnp.int32)
        self.key = jax.random.key(5)
        self.room = sum(-(-n // grouped.ROWS) * grouped.ROWS for n in COUNTS)

    def in_turn(self, parts: list[np.ndarray]) -> jax.Array:
        return jnp.asarray(np.concatenate([*parts, np.full((7, parts[0].shape[1]), 1e4)]), jnp.bfloat16)

    def in_tiles(self, parts: list[np.ndarray]) -> jax.Array:
        return jnp.concatenate([filled(part, -(-len(part) // grouped.ROWS) * grouped.ROWS) for part in parts])

    def programs(self, name: str) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
        """The op, its operands, and the linear of an expert alone, each with its arguments."""
        chosen = recipe(name)

        def op(x, w, dy, counts, key):
            y, back = jax.vjp(lambda x, w: ops.grouped_qdot(x, w, counts, recipe=chosen, key=key), x, w)
            return y, *back(dy)

        def operands(x, w, dy, counts, key):
            tiles = Tiles.of(counts, self.room, grouped.ROWS)
            return grouped_operands(x, w, dy, tiles, recipe=chosen, key=key)

        def alone(x, w, dy, key):
            made, results = run_linear(Linear("", chosen, x, w, dy, w, key, key, None, w), backend="auto")
            one = jnp.ones((), jnp.float32)
            values = {role: matrix(each.values()).astype(jnp.bfloat16) for role, each in made.items()}
            return values, {role: one if each.factor is None else each.factor for role, each in made.items()}, results

        turn, tile = (tuple(map(way, (self.x, self.dy))) for way in (self.in_turn, self.in_tiles))
        own = filled(self.x[0], MOST), self.w[0], filled(self.dy[0], MOST), self.key
        return {
            "op": (op, (turn[0], self.w, turn[1], self.counts, self.key)),
            "operands": (operands, (tile[0], self.w, tile[1], self.counts, self.key)),
            "alone": (alone, own),
        }


def filled(part: np.ndarray, rows: int) -> jax.Array:
    return jnp.asarray(np.pad(part, ((0, rows - len(part)), (0, 0))), jnp.bfloat16)


@partial(jax.jit, static_argnames=("layout", "dtype"))
def by_the_dense_kernel(a, b, alpha, *, layout: str, dtype: str):
    """A product by the walk of a dense linear's GEMM kernel, in the tiling of grouped ones."""
    tiling = GemmTiling(n=128)
    tiling = with_float32_output(tiling) if dtype == "float32" else tiling
    one = jnp.ones((), jnp.float32)
    return kernels.matmul(a, b, alpha, one, layout=layout, out_dtype=jnp.dtype(dtype), tiling=tiling)


def units_apart(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """Of bfloat16 elements, by how many units of their last place they differ."""
    a, b = (each.view(np.int16).astype(np.int64) for each in (ours, theirs))
    a, b = (np.where(each < 0, -(each & 0x7FFF), each) for each in (a, b))
    return np.abs(a - b)


GEMM = {"y": ("fprop_x", "fprop_w", "nn"), "dx": ("dgrad_dy", "dgrad_w", "nt"), "dw": ("wgrad_x", "wgrad_dy", "tn")}
RESULT = {"y": "fprop", "dx": "dgrad", "dw": "wgrad"}


def compared(given: Given, ran: dict[str, Any]) -> dict[str, Any]:
    """The op beside the loop of `qdot` over experts, by what a GPU runs for it; beside a loop of the dense GEMM kernel
    over the same operands; and both beside exact sums: how far they are from them over half a unit of their last place,
    in float32 units (2^-24) of the lengths of a sum's two vectors."""
    op, made = jax.device_get(ran["op"]), ran["operands"]
    far: dict[str, list[np.ndarray]] = {name: [] for name in ("y", "dx", "y kernel", "dx kernel")}
    worst = dict.fromkeys(("operands", "dw", "dw kernel", "excess of op", "excess of loop"), 0.0)
    row, begin = 0, 0
    for expert, count in enumerate(COUNTS):
        rows, own = -(-count // grouped.ROWS) * grouped.ROWS, slice(row, row + count)
        if not count:
            worst["dw"] = max(worst["dw"], float(np.abs(op[2][expert]).max()))
            continue
        part = filled(given.x[expert], MOST), given.w[expert], filled(given.dy[expert], MOST)
        values, factors, results = ran["alone"](*part, jax.random.fold_in(given.key, expert))
        mine = {r: o.array[expert] if r.endswith("_w") else o.array[begin : begin + rows] for r, o in made.items()}
        mine = {r: jnp.pad(a, ((0, 0 if r.endswith("_w") else MOST - rows), (0, 0))) for r, a in mine.items()}
        owed = {r: jnp.float32(1) if o.factor is None else o.factor[expert] for r, o in made.items()}
        for r in mine:
            share = float(jnp.mean(mine[r].astype(jnp.bfloat16) != values[r]))
            worst["operands"] = max(worst["operands"], share if bool(owed[r] == factors[r]) else 1.0)
        for n, (name, (left, right, layout)) in enumerate(GEMM.items()):
            a, b, alpha = mine[left], mine[right], owed[left] * owed[right]
            dtype = "float32" if name == "dw" else "bfloat16"
            kernel = by_the_dense_kernel(
                *(each.astype(jnp.bfloat16) for each in (a, b)), alpha, layout=layout, dtype=dtype
            )
            ours = np.asarray(op[n][expert] if name == "dw" else op[n][own])
            loop, kernel = (np.asarray(each)[: len(ours)] for each in (results[RESULT[name]], kernel))
            exact, lengths = exactly(a, b, float(alpha), layout)
            exact, lengths = exact[: len(ours)], lengths[: len(ours)]
            for whose, found in (("op", ours), ("loop", loop)):
                half = 0 if name == "dw" else 2.0**-8
                over = np.abs(found.astype(np.float64) - exact) - half * np.abs(exact) * (1 + 2.0**-7)
                worst[f"excess of {whose}"] = max(worst[f"excess of {whose}"], float((over / lengths).max() * 2**24))
            if name == "dw":
                worst[name] = max(worst[name], float(np.abs(ours - loop).max() / np.abs(loop).max()))
                worst["dw kernel"] = max(worst["dw kernel"], float(np.abs(ours - kernel).max()))
            else:
                far[name].append(units_apart(ours, loop))
                far[f"{name} kernel"].append(units_apart(ours, kernel))
        row, begin = row + count, begin + rows
    return verdict({name: np.concatenate(each) for name, each in far.items()}, worst)


def verdict(far: dict[str, np.ndarray], worst: dict[str, float]) -> dict[str, Any]:
    shares = {
        name: [float(np.mean(units > 0)), float(np.mean(units > 1)), int(units.max())] for name, units in far.items()
    }
    holds = (
        worst["operands"] == 0
        and worst["dw"] <= 1e-6
        and all(shares[n][0] < 1e-3 and shares[n][2] <= 1 for n in ("y", "dx"))
    )
    same = worst["dw kernel"] == 0 and all(shares[f"{n} kernel"][2] == 0 for n in ("y", "dx"))
    return {"holds": holds, "bits of the dense kernel": same, **shares, **worst}


def exactly(a: jax.Array, b: jax.Array, alpha: float, layout: str) -> tuple[np.ndarray, np.ndarray]:
    """float64 (a product, the lengths of its sums' two vectors)."""
    left, right = (np.asarray(each).astype(np.float64) for each in (a, b))
    left, right = left.T if layout == "tn" else left, right.T if layout == "nt" else right
    lengths = np.linalg.norm(left, axis=1)[:, None] * np.linalg.norm(right, axis=0)[None]
    return left @ right * alpha, np.maximum(lengths * abs(alpha), 1e-300)


def check(out: Path) -> dict[str, Any]:
    """A line for each recipe as it ends: programs are compiled in the background, while others are traced."""
    given, found, compiling = Given(), dict[str, Any](), dict[str, Any]()

    def finish(name: str) -> None:
        done = {what: (job.result(), args) for what, (job, args) in compiling.pop(name).items()}
        ran = {what: run(*args) for what, (run, args) in done.items() if what != "alone"}
        found[name] = compared(given, ran | {"alone": done["alone"][0]})
        print(json.dumps({"recipe": name, "seconds": round(time.perf_counter() - begun), **found[name]}), flush=True)
        write(out, {"check": found})

    begun = time.perf_counter()
    with ThreadPoolExecutor(16) as pool:
        for name in RECIPES:
            lowered = {what: (jax.jit(fn).lower(*args), args) for what, (fn, args) in given.programs(name).items()}
            compiling[name] = {what: (pool.submit(low.compile), args) for what, (low, args) in lowered.items()}
            for ready in [name for name, jobs in compiling.items() if all(job.done() for job, _ in jobs.values())]:
                finish(ready)
        for name in list(compiling):
            finish(name)
    return found


TRIED = (GemmTiling(), GemmTiling(in_flight=1), GemmTiling(64, 256, split="m", in_flight=1))
Job = tuple[Callable[..., Any], tuple[jax.Array, ...]]


def speed(out: Path) -> dict[str, Any]:
    """TFLOP/s of true rows of each GEMM by each way; all are compiled first, at once."""
    random = np.random.default_rng(0)
    counts = random.multinomial(PEAK_ROWS, random.dirichlet(np.full(EXPERTS, 20.0)))
    equal = np.full(EXPERTS, ROWS)
    rows = int(tiles_of(counts).sum()) * grouped.ROWS
    keys = jax.random.split(jax.random.key(0), 3)
    x, dy = (jax.random.normal(k, (rows, n), jnp.bfloat16) for k, n in zip(keys, (WIDTH, HIDDEN), strict=False))
    w = jax.random.normal(keys[2], (EXPERTS, WIDTH, HIDDEN), jnp.bfloat16)
    jobs = dict(ours("drawn groups", x, w, dy, counts))
    jobs |= ours("equal groups", x[:PEAK_ROWS], w, dy[:PEAK_ROWS], equal)
    jobs |= einsums("equal groups", x, w, dy, ROWS)
    jobs |= einsums("room for the largest group", x, w, dy, int(counts.max()))
    jobs |= raggeds(x, w, dy, jnp.asarray(tiles_of(counts) * grouped.ROWS, jnp.int32))
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
    return -(-counts // grouped.ROWS)


def ours(what: str, x: jax.Array, w: jax.Array, dy: jax.Array, counts: np.ndarray) -> Iterator[tuple[str, Job]]:
    """Our kernels by each tiling tried, the default first; of equal groups by that alone."""
    experts = jnp.asarray(np.repeat(np.arange(EXPERTS), tiles_of(counts)), jnp.int32)
    alpha, sizes = jnp.ones(EXPERTS, jnp.float32), jnp.asarray(counts, jnp.int32)
    gemms: dict[str, Job] = {
        "fprop": (grouped.rows, (x, w, alpha, experts)),
        "dgrad": (partial(grouped.rows, layout="nt"), (dy, w, alpha, experts)),
        "wgrad": (grouped.contraction, (x, dy, alpha, sizes)),
    }
    for name, (fn, args) in gemms.items():
        for t in TRIED[: None if what == "drawn groups" else 1]:
            yield f"ours {name}, {what}, {t.m}x{t.n} {t.split} in flight {t.in_flight}", (partial(fn, tiling=t), args)


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
    command.prepare(STEP)
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
    config = command.config_of(dataclasses.replace(STEP, unroll=unroll), recipe_name, "none")
    mesh = run_mesh(config)
    run = bench.compile_step(config, mesh, seq=STEP.seq, options={"xla_gpu_enable_command_buffer": ""})
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
            "gib": round(bytes_needed(run) / 2**30, 1),
            "shares": {kind: round(share, 4) for kind, share in breakdown(trace, run.as_text()).items()},
            "longest": longest(trace, run.as_text()),
        }


def longest(trace: Path, program_text: str) -> list[tuple[float, int, str, str, str]]:
    """(milliseconds a step, calls, kind, name, where it comes from) of the instructions that take most; those of one
    name and origin, as the layers of an unrolled program have, are one."""
    devices, program = events_of(trace), read(program_text)
    place, took, calls = Placer(program), defaultdict[tuple[str, ...], float](float), Counter[tuple[str, ...]]()
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
    commands = {"check": check, "speed": speed, "step": step}
    print(json.dumps(tyro.extras.subcommand_cli_from_dict(commands, description=__doc__), indent=1))
