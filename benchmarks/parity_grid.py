"""The parity grid on real text: three sizes, nine arms, one pass over the corpus, on one GPU.

    python benchmarks/parity_grid.py plan                                     # writes docs/evidence/parity/grid.json
    python benchmarks/parity_grid.py prepare CORPUS --out DATA                # BPE of 8,192, verified shards
    python benchmarks/parity_grid.py run s m l --data DATA --out OUT          # what is not done yet; goes on
    python benchmarks/parity_grid.py collect OUT --into docs/evidence/parity  # JSON of every size that is there

Several processes of the same `run` share the work: each takes the next run that nobody holds. docs/evidence/parity/
README.md says how it is run where a command may last ten minutes. The grid and the margin are committed before the
first step: `run` refuses a grid.json that is not this file's.
"""

import argparse
import contextlib
import dataclasses
import fcntl
import json
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from halfbyte.models import LlamaConfig, count_params
from halfbyte.optim import OptimizerConfig
from halfbyte.parity.arms import BASELINE, CANDIDATE, CONTROL, TWIN, Arm
from halfbyte.parity.margin import parse_margin
from halfbyte.parity.plan import Plan, settle
from halfbyte.train import CheckpointConfig, LogConfig, TrainConfig, ValidationConfig

GRID = Path(__file__).parents[1] / "docs" / "evidence" / "parity" / "grid.json"
MARGIN = "0.5%"
VOCABULARY, SEQ, BATCH = 8192, 512, 128
TOKENS = 50_000_000  # one pass; `run` takes the steps that the prepared data has
# size -> width, hidden width, layers, heads, learning rate
SIZES = {"s": (256, 704, 4, 4, 4e-3), "m": (384, 1024, 6, 6, 3e-3), "l": (576, 1536, 6, 9, 2e-3)}
SEEDS = {"s": (0, 1, 2), "m": (0,), "l": (0,)}
SEEDED = ("bf16", "bf16-twin", "nvfp4_all_linear")  # the arms that all seeds of a size have; the others its first
LATE = {"precision.switch_at": 0.82, "precision.switch_to": "bf16", "precision.switch_part": "forward"}
ARMS = (
    Arm("bf16", BASELINE, {"recipe": "bf16"}),
    Arm("nvfp4_all_linear", CANDIDATE, {"recipe": "nvfp4", "policy": "all_linear"}),
    Arm("bf16-twin", TWIN, {"recipe": "bf16", "precision.twin": 1}),
    Arm("nvfp4_mlp", CANDIDATE, {"recipe": "nvfp4", "policy": "mlp"}),
    Arm("mxfp4_all_linear", CANDIDATE, {"recipe": "mxfp4", "policy": "all_linear"}),
    Arm("fp8_all_linear", CANDIDATE, {"recipe": "fp8", "policy": "all_linear"}),
    Arm("nvfp4_forward_only", CANDIDATE, {"recipe": "nvfp4+bf16_backward", "policy": "all_linear"}),
    Arm("nvfp4_backward_only", CANDIDATE, {"recipe": "nvfp4+bf16_forward", "policy": "all_linear"}),
    Arm("nvfp4_late_switch", CANDIDATE, {"recipe": "nvfp4", "policy": "all_linear", **LATE}),
    Arm("broken", CONTROL, {"recipe": "fp4_one_scale", "policy": "all_linear"}),
)
TASKS = ("wikitext2_test.txt.xz", "lambada_openai.jsonl.xz", "blimp.jsonl.xz")


def base_run(size: str, *, steps: int, data: str) -> TrainConfig:
    """What all arms of a size share."""
    width, hidden, layers, heads, rate = SIZES[size]
    model = LlamaConfig(
        name=f"grid-{size}", vocab_size=VOCABULARY, embed=width, mlp=hidden, layers=layers, heads=heads, kv_heads=heads,
        head_dim=64, max_seq=SEQ, tied=True, rope_theta=10_000.0,
    )  # fmt: skip
    return TrainConfig(
        name=f"grid-{size}", model=model, data=data, steps=steps, batch=BATCH, seq=SEQ,
        optimizer=OptimizerConfig(learning_rate=rate, warmup=0.05),
        validation=ValidationConfig(every=max(1, steps // 8), batches=0),
        checkpoint=CheckpointConfig(every=0, keep_last=1), log=LogConfig(every=max(1, steps // 20), tensorboard=False),
    )  # fmt: skip


def plan_of(size: str, *, steps: int, data: str) -> Plan:
    arms = tuple(arm if arm.name in SEEDED else dataclasses.replace(arm, seeds=1) for arm in ARMS)
    return Plan(base_run(size, steps=steps, data=data), arms, SEEDS[size], parse_margin(MARGIN))


def without_embeddings(size: str) -> int:
    model = base_run(size, steps=100, data="synthetic").model
    return count_params(model) - model.vocab_size * model.embed


def grid() -> dict[str, Any]:
    """The whole plan as data."""
    names = ("embed", "mlp", "layers", "heads", "learning_rate")
    sizes = {
        size: {
            **dict(zip(names, SIZES[size], strict=True)),
            "parameters_without_embeddings": without_embeddings(size),
            "tokens_a_parameter": round(TOKENS / without_embeddings(size), 2),
            "seeds": list(SEEDS[size]),
        }
        for size in SIZES
    }
    about = {"margin": MARGIN, "vocabulary": VOCABULARY, "seq": SEQ, "batch": BATCH, "tokens": TOKENS, "tasks": TASKS}
    arms = {arm.name: {"kind": arm.kind, **arm.changes} for arm in ARMS}
    return {**about, "arms_of_every_seed": SEEDED, "arms": arms, "sizes": sizes}


def command_plan(args: argparse.Namespace) -> None:
    GRID.parent.mkdir(parents=True, exist_ok=True)
    GRID.write_text(json.dumps(grid(), indent=1) + "\n", encoding="utf-8")


def command_prepare(args: argparse.Namespace) -> None:
    from halfbyte import data

    files = sorted(Path(args.corpus).glob("train-*.jsonl.xz"))
    held_out = sorted(Path(args.corpus).glob("validation.jsonl.xz"))
    tokenizer = args.tokenizer or f"bpe:{VOCABULARY}"
    made = data.prepare(files, tokenizer=tokenizer, out=Path(args.out), seq_len=SEQ, validation=held_out)
    print(made)


Job = tuple[str, Arm, int]  # size, arm, seed


def jobs_of(plans: Mapping[str, Plan]) -> list[Job]:
    """Every run of these sizes, what matters most first: the seeded arms of each size, then the other arms of its first
    seed."""
    jobs = [(size, arm, seed) for size, plan in plans.items() for arm, seed in plan.jobs()]
    return sorted(jobs, key=lambda job: job[1].name not in SEEDED)


@contextlib.contextmanager
def held(path: Path, *, wait: bool = False) -> Iterator[bool]:
    """Whether this process alone holds `path`; it lets go when it ends, however it ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        yield True


def command_run(args: argparse.Namespace) -> None:
    from halfbyte.train import open_source

    if json.loads(GRID.read_text(encoding="utf-8")) != json.loads(json.dumps(grid())):
        raise SystemExit(f"{GRID} is not the grid of this file; the grid is committed before the first step")
    until = time.monotonic() + 60 * args.minutes
    steps = args.steps or rows_of(open_source(base_run(args.sizes[0], steps=100, data=args.data))) // BATCH
    out = Path(args.out)
    with held(out / "held" / "plan", wait=True):
        plans = {s: settle(out / s, plan_of(s, steps=steps, data=args.data)) for s in args.sizes}
    slowest = dict.fromkeys(args.sizes, 0.0)  # seconds of a run, by size
    for job in jobs_of(plans):
        size, arm, seed = job
        with held(out / "held" / f"{size}-{arm.name}-{seed}") as mine:
            if not mine or finished(out, job, steps, tasks=args.tasks):
                continue
            if time.monotonic() + slowest[size] > until:
                print(f"no time for {size} {arm.name} seed {seed}; the same command goes on", flush=True)
                continue
            began = time.monotonic()
            if run_job(plans[size], out, job, args):
                return
            slowest[size] = max(slowest[size], time.monotonic() - began)


def finished(out: Path, job: Job, steps: int, *, tasks: str) -> bool:
    """Whether a run has nothing left to do."""
    from halfbyte.parity.cells import DIVERGED, DONE, run_directory, status_of

    size, arm, seed = job
    folder = run_directory(out / size, arm, seed)
    state = status_of(folder, steps).state
    return state == DIVERGED or (state == DONE and (not tasks or (folder / "evaluations.jsonl").is_file()))


def run_job(plan: Plan, out: Path, job: Job, args: argparse.Namespace) -> str | None:
    """Train and evaluate one run; the name of the signal that stopped it."""
    from halfbyte.parity.cells import DONE, run_directory, status_of
    from halfbyte.parity.runner import run_jobs

    size, arm, seed = job
    folder = run_directory(out / size, arm, seed)
    stopped = run_jobs(plan, out / size, [(arm, seed)], say=lambda text: print(f"{size} {text}", flush=True))
    if stopped:
        print(f"stopped by {stopped}; the same command goes on", flush=True)
        return stopped
    if args.tasks and status_of(folder, plan.base.steps).state == DONE:
        evaluate(folder, Path(args.tasks))
    if not args.keep:
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    return None


def rows_of(source: Any) -> int:
    """Rows of one pass over the training data."""
    return sum(shard.rows for shard in source.dataset.manifest.shards if shard.split == "train")


def evaluate(folder: Path, tasks: Path) -> None:
    """WikiText, LAMBADA and BLiMP on the run's last checkpoint, inside the call that made it."""
    from halfbyte.cli.main import main as halfbyte

    halfbyte(["eval", str(folder), *(str(tasks / name) for name in TASKS)])


def command_collect(args: argparse.Namespace) -> None:
    """The report of every size, its JSON with the downstream scores, and the gap against tokens a parameter."""
    from halfbyte.parity.analysis import analyse
    from halfbyte.parity.plan import load_plan
    from halfbyte.parity.report import write_report

    into = Path(args.into)
    points = []
    for size in SIZES:
        folder = Path(args.out) / size
        plan = load_plan(folder)
        if plan is None:
            continue
        if args.data:  # where it lies now: the report has its hash
            plan = dataclasses.replace(plan, base=dataclasses.replace(plan.base, data=args.data))
        files = write_report(plan, folder, analyse(plan, folder))
        found = json.loads(files["json"].read_text(encoding="utf-8"))
        found["evaluations"] = evaluations(folder)
        found["facts"] |= {"plan": "plan.json", "the runs": args.ran_with}
        text = json.dumps(found, indent=1).replace(plan.base.data, "DATA")
        (into / f"{size}.json").write_text(text + "\n", encoding="utf-8")
        ratio = plan.base.steps * plan.base.batch * plan.base.seq / without_embeddings(size)
        points += [point for arm in found["arms"] if (point := gap_point(size, arm, ratio))]
    (into / "gaps.json").write_text(json.dumps(fitted(points), indent=1) + "\n", encoding="utf-8")


def gap_point(size: str, arm: dict[str, Any], ratio: float) -> dict[str, Any] | None:
    if not arm["gaps"]:
        return None
    facts = {"size": size, "arm": arm["name"], "kind": arm["kind"], "tokens_a_parameter": ratio}
    return {**facts, "gaps": list(arm["gaps"].values()), "interval": arm["interval"]}


def fitted(points: list[dict[str, Any]]) -> dict[str, Any]:
    """Points, and for each arm a + b ln(tokens a parameter) through all of its runs with the interval of b."""
    import numpy as np

    from halfbyte.parity.statistics import fit_line, t_quantile

    lines = {}
    for name in dict.fromkeys(point["arm"] for point in points):
        mine = [(np.log(p["tokens_a_parameter"]), gap) for p in points if p["arm"] == name for gap in p["gaps"]]
        if len({x for x, _ in mine}) < 2:
            continue
        line = fit_line([x for x, _ in mine], [y for _, y in mine])
        error = None if line.covariance is None else float(np.sqrt(line.covariance[1][1]))
        half = None if error is None else t_quantile(0.95, line.freedom) * error
        bounds = None if half is None else [line.slope - half, line.slope + half]
        covariance = None if line.covariance is None else np.asarray(line.covariance).tolist()
        fit = {"covariance": covariance, "freedom": line.freedom, "runs": len(mine)}
        lines[name] = {"a": line.intercept, "b": line.slope, "b_90": bounds, **fit}
    return {"unit": "% of the baseline's loss", "points": points, "lines": lines}


def evaluations(folder: Path) -> dict[str, dict[str, Any]]:
    """arm/seed -> task -> its metrics, each with its standard error."""
    found: dict[str, dict[str, Any]] = {}
    for file in sorted(folder.glob("arms/*/seed-*/evaluations.jsonl")):
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        found[f"{file.parent.parent.name}/{file.parent.name}"] = {
            row["task"]: {"examples": row["examples"], "tokens": row["tokens"], **row["metrics"]} for row in rows
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    commands.add_parser("plan").set_defaults(run=command_plan)
    prepare = commands.add_parser("prepare")
    prepare.add_argument("corpus")
    prepare.add_argument("--out", required=True)
    prepare.add_argument("--tokenizer", default="", help="one that was trained before; default: trained now")
    prepare.set_defaults(run=command_prepare)
    run = commands.add_parser("run")
    run.add_argument("sizes", nargs="+", choices=SIZES)
    run.add_argument("--data", required=True)
    run.add_argument("--out", required=True)
    run.add_argument("--minutes", type=float, default=9.0)
    run.add_argument("--steps", type=int, default=0, help="0: one pass over the data")
    run.add_argument("--tasks", default="", help="folder of the downstream tasks; empty: none")
    run.add_argument("--keep", action="store_true", help="keep checkpoints")
    run.set_defaults(run=command_run)
    collect = commands.add_parser("collect")
    collect.add_argument("out")
    collect.add_argument("--into", default=str(GRID.parent))
    collect.add_argument("--data", default="", help="where the data set lies now; default: where the runs had it")
    collect.add_argument("--ran-with", default="", help="device and versions of the runs, for the JSON")
    collect.set_defaults(run=command_collect)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
