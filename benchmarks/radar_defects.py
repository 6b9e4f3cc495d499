"""Planted defects and healthy runs under the radar: docs/evidence/radar_defects.json.

The fourteen defects of tests/evaluation_diagnosis/defects.py, planted in the operands, twenty seeds
each; and sixty healthy runs, a third of them of kinds that look odd: a norm channel a hundred times as large, every
37th column of all weights eight times as large, a batch of one repeated token, and weights trained for 1,000 steps,
exported and imported. A seed counts if one of two probes, before the first step and before the second, raises an alarm.

    python benchmarks/radar_defects.py --jobs 16                    # a few minutes on 16 cores
    python benchmarks/radar_defects.py --jobs 2 --seeds 2 --out /tmp/radar.json
    python benchmarks/radar_defects.py --jobs 2 --looks 2           # docs/evidence/radar_healthy.json: false alarms

`--looks N`: N looks at each of twenty healthy models (`radar_model.HEALTHY_MODELS`), or of those in `--only`. A look
is one probe of all quantized GEMMs and of the random streams, on weights, a batch of two sequences and a step of its
own.

Each job is a process of its own with one case.
"""

import concurrent.futures
import contextlib
import dataclasses
import json
import multiprocessing
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import tyro

from halfbyte import models
from halfbyte.distributed import DEFAULT_RULES
from halfbyte.evaluation.radar import RadarProbe, judge_gemms, microbatch_key
from halfbyte.hf.exporter import ExportModel, export_model
from halfbyte.hf.hf_folder import HfFolder
from halfbyte.hf.import_model import import_hf_folder
from halfbyte.hf.load_weights import load_params
from halfbyte.recipes import recipe
from halfbyte.train import create_state, jit_train_step, resolve_policy, run_mesh
from halfbyte.train.run_directory import ORIGIN

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "evaluation_diagnosis"))

from defects import DEFECTS  # noqa: E402
from radar_model import CONFIG, HEALTHY_MODELS, MODEL, batch_of, tiny_config  # noqa: E402

EVIDENCE = ROOT / "docs" / "evidence"
SEEDS, PROBES, STEPS = 20, 2, 1000
Weights = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Args:
    jobs: int = 1
    """Processes."""
    seeds: int = SEEDS
    only: tuple[str, ...] = ()
    """Cases; none: all."""
    recipe: str = "nvfp4"
    policy: str = "mlp"
    out: Path | None = None
    """Written after every job."""
    looks: int = 0
    """At each healthy model, instead of planted defects."""


def trained(seed: int, *, steps: int, recipe_name: str, policy: str, rows: int = 4) -> Weights:
    """Weights after `steps` steps of `rows` sequences."""
    config = dataclasses.replace(CONFIG, seed=seed, steps=steps, batch=rows, recipe=recipe_name, policy=policy, mesh="")
    mesh = run_mesh(config, jax.devices()[:1])
    step = jit_train_step(config, resolve_policy(MODEL, policy, recipe(recipe_name)), mesh)
    state = create_state(config, mesh)
    for place in range(steps):
        state, _ = step(state, batch_of(seed, place, rows))
    return state.params


def changed(params: Weights, change: Any) -> Weights:
    """`change(path, weight)` of every leaf."""
    return jax.tree_util.tree_map_with_path(lambda path, leaf: change(jax.tree_util.keystr(path), leaf), params)


def loud_channel(params: Weights, seed: int, args: Args) -> Weights:
    return changed(params, lambda path, w: w.at[..., :1].multiply(100) if "norm" in path and "final" not in path else w)


def loud_columns(params: Weights, seed: int, args: Args) -> Weights:
    return changed(params, lambda path, w: w.at[..., ::37].multiply(8) if w.ndim == 3 else w)


def imported(params: Weights, seed: int, args: Args) -> Weights:
    """Weights trained under the recipe, as they come back from an export: bf16, or the codes of NVFP4."""
    resolved = resolve_policy(MODEL, args.policy, recipe(args.recipe))
    codes = seed % 2 == 1 and args.recipe.startswith("nvfp4")
    made = trained(seed, steps=STEPS, recipe_name=args.recipe, policy=args.policy)
    with tempfile.TemporaryDirectory(prefix="halfbyte-radar-") as place:
        out, run = Path(place) / "exported", Path(place) / "run"
        export_model(ExportModel(MODEL, made), out, to="compressed-tensors" if codes else "hf", resolved=resolved)
        import_hf_folder(out, run)
        with HfFolder(run / ORIGIN) as folder:
            return load_params(folder, MODEL, mesh=None, rules=DEFAULT_RULES)


def one_token(batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {name: jnp.full_like(v, 7) if name in ("tokens", "targets") else v for name, v in batch.items()}


@dataclasses.dataclass(frozen=True)
class Case:
    """Runs of one kind: a defect, or what is odd about their weights or batches. `many`: how many for 20 seeds."""

    name: str
    many: int
    plant: Any = contextlib.nullcontext
    weights: Any = None
    batch: Any = None


HEALTHY = [
    Case("healthy", 2 * SEEDS),
    Case("healthy, a norm channel times 100", SEEDS // 4, weights=loud_channel),
    Case("healthy, every 37th column times 8", SEEDS // 4, weights=loud_columns),
    Case("healthy, one repeated token", SEEDS // 4, batch=one_token),
    Case("healthy, trained, exported and imported", SEEDS // 4, weights=imported),
]
CASES = {case.name: case for case in [*HEALTHY, *(Case(name, SEEDS, plant) for name, plant in DEFECTS.items())]}


def probed(name: str, seeds: list[int], args: Args) -> dict[int, dict[str, Any]]:
    """seed -> which probe raised an alarm (0: none), and what it said; traced anew inside the defect."""
    jax.config.update("jax_disable_most_optimizations", True)  # compiling is most of the time
    jax.clear_caches()
    case, found = CASES[name], {}
    init = jax.jit(lambda key: models.init(MODEL, key))
    healthy = {s: case.weights(init(jax.random.key(s)), s, args) if case.weights else init(jax.random.key(s))
               for s in seeds}  # fmt: skip
    with case.plant():
        config = dataclasses.replace(CONFIG, recipe=args.recipe, policy=args.policy)
        probe = RadarProbe(config, resolve_policy(MODEL, args.policy, recipe(args.recipe)), None)
        for seed in seeds:
            found[seed] = {"probe": 0, "first": ""}
            for place in range(PROBES):
                batch = (case.batch or (lambda rows: rows))(batch_of(seed, place))
                _, texts = judge_gemms(probe.gemms(healthy[seed], batch, microbatch_key(seed, place)))
                if not texts and probe.bits(seed, place)["alarm"]:
                    texts = ["random bits are shared"]
                if texts:
                    found[seed] = {"probe": place + 1, "first": texts[0]}
                    break
    return found


def healthy_looks(number: int, looks: int) -> dict[str, Any]:
    """Looks at one of HEALTHY_MODELS: alarms, and how near to one the largest correlation and mean gain have come."""
    jax.config.update("jax_disable_most_optimizations", True)
    began, config = time.process_time(), tiny_config(*HEALTHY_MODELS[number])
    probe = RadarProbe(config, resolve_policy(config.model, config.policy, recipe(config.recipe)), None)
    init = jax.jit(lambda key: models.init(config.model, key))
    alarms: list[str] = []
    nearest, gains, gemms = 0.0, 0.0, 0
    for look in range(looks):
        seed = 1000 * number + look
        found = probe.gemms(init(jax.random.key(seed)), batch_of(seed, rows=2), microbatch_key(seed, look))
        _, texts = judge_gemms(found)
        bits = probe.bits(seed, look)
        alarms += [*texts, *(["random bits are shared"] if bits["alarm"] else [])]
        nearest = max(nearest, bits["largest"] / bits["limit"] if bits["pairs"] else 0.0)
        for kind in {gemm["gemm"] for gemm in found}:
            mean = [gemm["reference_gain"] for gemm in found if gemm["gemm"] == kind]
            gains = max(gains, abs(sum(mean) / len(mean) - 1))
        gemms = len(found)
    return {"alarms": alarms, "gemms": gemms, "largest_correlation_over_limit": nearest,
            "largest_deviation_of_a_mean_gain": gains, "cpu_seconds": round(time.process_time() - began)}  # fmt: skip


def false_alarms(args: Args) -> int:
    """Writes radar_healthy.json; the exit code."""
    out, rows = args.out or EVIDENCE / "radar_healthy.json", {}
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(args.jobs, context, max_tasks_per_child=1) as pool:
        names = [" ".join(kind) for kind in HEALTHY_MODELS]
        chosen = [number for number, name in enumerate(names) if not args.only or name in args.only]
        jobs = {pool.submit(healthy_looks, number, args.looks): names[number] for number in chosen}
        for job in concurrent.futures.as_completed(jobs):
            rows[jobs[job]] = job.result()
            print(jobs[job], job.result(), flush=True)
            many = args.looks * len(rows)
            about = {"jax": jax.__version__, "looks": many, "alarms": sum(len(row["alarms"]) for row in rows.values())}
            out.write_text(json.dumps({**about, "models": rows}, indent=1) + "\n", encoding="utf-8")
    return 1 if about["alarms"] else 0


def slices(case: Case, args: Args) -> list[list[int]]:
    """The seeds of a case, by job: one for weights that are trained first, twenty for others."""
    many = max(1, round(case.many * args.seeds / SEEDS))
    size = 1 if case.weights is imported else SEEDS
    return [list(range(many))[i : i + size] for i in range(0, many, size)]


def table(rows: dict[str, dict[int, dict[str, Any]]]) -> dict[str, Any]:
    """Of each case: how many seeds raised an alarm, in the first probe and in two, and the first text."""
    made = {}
    for name in CASES:
        if found := rows.get(name):
            said = [one for _, one in sorted(found.items()) if one["probe"]]
            made[name] = {"alarms": len(said), "in_the_first_probe": sum(one["probe"] == 1 for one in said),
                          "of": len(found), "first": said[0]["first"] if said else ""}  # fmt: skip
    return made


def main(args: Args) -> int:
    if args.looks:
        return false_alarms(args)
    out, began, chosen = args.out or EVIDENCE / "radar_defects.json", time.monotonic(), args.only or tuple(CASES)
    about = {"model": dataclasses.asdict(MODEL), "recipe": args.recipe, "policy": args.policy, "jax": jax.__version__}
    rows: dict[str, dict[int, dict[str, Any]]] = {}
    todo = [(name, part) for name in chosen for part in slices(CASES[name], args)]
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(args.jobs, context, max_tasks_per_child=1) as pool:
        jobs = {pool.submit(probed, name, part, args): name for name, part in sorted(todo, key=lambda t: -len(t[1]))}
        for done, job in enumerate(concurrent.futures.as_completed(jobs), 1):
            rows.setdefault(jobs[job], {}).update(job.result())
            made = table(rows)
            told = made[jobs[job]]
            print(f"{done}/{len(jobs)} {jobs[job]}: {told['alarms']} of {told['of']}  {told['first']}", flush=True)
            whole = {**about, "seconds": round(time.monotonic() - began), "cases": made, "runs": rows}
            out.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    wrong = [n for n, t in table(rows).items() if t["alarms"] != (0 if CASES[n] in HEALTHY else t["of"])]
    print("every defect seen, nothing healthy accused" if not wrong else f"NOT AS IT SHOULD BE: {', '.join(wrong)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args, description=__doc__)))
