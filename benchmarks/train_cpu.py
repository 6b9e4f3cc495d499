"""Step time of every recipe on this CPU, as ratios measured in one run, and the share of a step spent waiting for
input.

    python benchmarks/train_cpu.py                       # demo and llama-60m shapes
    python benchmarks/train_cpu.py --models demo --recipes bf16,nvfp4 --rounds 5

`float32` is the bf16 recipe with float32 activations, the faster baseline on CPUs without bf16 units. Programs are
compiled first; then rounds of one step of each recipe alternate, so that a busy machine slows all of them alike, and
each recipe reports its fastest round. The limit: nvfp4 at most 1.6x of the faster of bf16 and float32, input stall
under 2%.
"""

import argparse
import dataclasses
import json
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from halfbyte.devices.platform import settle_platform

import os  # isort: skip

settle_platform(os.environ)

import jax  # noqa: E402

from halfbyte import data  # noqa: E402
from halfbyte.recipe import recipe_names  # noqa: E402
from halfbyte.runs import run_config  # noqa: E402
from halfbyte.train import (  # noqa: E402
    PrecisionConfig,
    TrainConfig,
    create_state,
    lower_train_step,
    phases,
    run_mesh,
)
from halfbyte.train.source import open_source, to_mesh  # noqa: E402

LIMIT, STALL = 1.6, 0.02
SHAPES = {"demo": {"batch": 8, "seq": 128}, "llama-60m": {"batch": 1, "seq": 256}}


def config_of(model: str, recipe: str) -> TrainConfig:
    """The run of one recipe at one model's shapes."""
    precision = PrecisionConfig(compute_dtype="float32" if recipe == "float32" else "bfloat16")
    name = "bf16" if recipe == "float32" else recipe
    return dataclasses.replace(run_config(model), recipe=name, precision=precision, data="synthetic", **SHAPES[model])


def measure(model: str, recipes: list[str], rounds: int) -> dict[str, float]:
    """Fastest seconds a step, by recipe: one step of each in turn, on one state that all of them advance."""
    config = config_of(model, recipes[0])
    mesh = run_mesh(config, jax.devices()[:1])
    loader = open_source(config).loader(mesh)
    batch = to_mesh(next(loader), mesh, batch=config.batch)
    loader.close()
    state = create_state(config, mesh)
    programs = {}
    for recipe in recipes:
        began, config = time.perf_counter(), config_of(model, recipe)
        resolved = phases(config)[0].resolved(config)
        programs[recipe] = lower_train_step(config, resolved, mesh, seq=config.seq).compile()
        state, metrics = programs[recipe](state, batch)
        jax.block_until_ready(metrics)
        print(f"  {model} {recipe}: compiled in {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    best = dict.fromkeys(recipes, float("inf"))
    for _ in range(rounds):
        for recipe, program in programs.items():
            began = time.perf_counter()
            state, metrics = program(state, batch)
            jax.block_until_ready(metrics)
            best[recipe] = min(best[recipe], time.perf_counter() - began)
    return best


def input_stall(step_s: float, batches: int = 100) -> float:
    """Part of a demo step spent waiting for a prepared data set, when the loop comes back every `step_s` seconds."""
    config = run_config("demo")
    mesh = run_mesh(config, jax.devices()[:1])
    with tempfile.TemporaryDirectory() as folder:
        dataset = data.demo_dataset(folder)
        loader = data.loader(dataset, batch=config.batch)
        next(loader)
        waited = 0.0
        for _ in range(batches):
            time.sleep(min(step_s, 0.02))  # the device works; the loader reads ahead
            began = time.perf_counter()
            to_mesh(next(loader), mesh, batch=config.batch)
            waited += time.perf_counter() - began
        loader.close()
    return waited / batches / step_s


def commit() -> str:
    """The commit these numbers belong to."""
    here = Path(__file__).parent
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True, check=False
    )
    return found.stdout.strip() or "unknown"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="demo,llama-60m")
    parser.add_argument("--recipes", default=",".join(["float32", *recipe_names()]))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, the table on stderr")
    args = parser.parse_args()
    out = sys.stderr if args.json else sys.stdout
    host = f"{platform.machine()}, {os.cpu_count()} cores, jax {jax.__version__}, commit {commit()}"
    print(f"train step on CPU: {host}", file=out)
    results, passed = {}, True
    for model in args.models.split(","):
        seconds = measure(model, args.recipes.split(","), args.rounds)
        base = min(seconds[name] for name in ("float32", "bf16") if name in seconds)
        print(f"\n{model}, {SHAPES[model]['batch']} x {SHAPES[model]['seq']} tokens a step", file=out)
        for recipe, value in seconds.items():
            print(f"  {recipe:<22} {1e3 * value:9.1f} ms   {value / base:5.2f}x", file=out)
        ratio = seconds.get("nvfp4", base) / base
        results[model] = {"seconds": seconds, "nvfp4_ratio": ratio}
        passed &= ratio <= LIMIT
        if model == "demo":
            stall = input_stall(base)
            results[model]["input_stall"] = stall
            passed &= stall < STALL
            print(f"  input stall with a prepared data set: {100 * stall:.2f}% of a step", file=out)
    print(f"\nnvfp4 at most {LIMIT}x, stall under {100 * STALL:.0f}%: {'held' if passed else 'MISSED'}", file=out)
    if args.json:
        print(json.dumps({"host": host, "models": results, "passed": passed}))
    return 0 if passed else 3


if __name__ == "__main__":
    sys.exit(main())
