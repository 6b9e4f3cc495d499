"""The parity grid on real text: three sizes, nine arms, one pass over the corpus, on one GPU.

    python benchmarks/parity_grid.py plan                                     # writes docs/evidence/parity/grid.json
    python benchmarks/parity_grid.py prepare CORPUS --out DATA                # BPE of 8,192, verified shards; any
    machine python benchmarks/parity_grid.py run s --data DATA --out OUT --minutes 9  # one size; goes on
    python benchmarks/parity_grid.py collect OUT --into docs/evidence/parity  # JSON of every size that is there

docs/evidence/parity/README.md says how it is run where a command may last ten minutes. The grid and the margin are
committed before the first step: `run` refuses a grid.json that is not this file's.
"""

import argparse
import json
import shutil
import time
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
    return Plan(base_run(size, steps=steps, data=data), ARMS, SEEDS[size], parse_margin(MARGIN))


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
    made = data.prepare(files, tokenizer=f"bpe:{VOCABULARY}", out=Path(args.out), seq_len=SEQ, validation=held_out)
    print(made)


def jobs_of(plan: Plan) -> list[tuple[Arm, int]]:
    """The seeded arms of all seeds first, then the others of the first seed: what matters most is done first."""
    first = plan.seeds[0]
    seeded = [(arm, seed) for seed in plan.seeds for arm in plan.arms if arm.name in SEEDED]
    return seeded + [(arm, first) for arm in plan.arms if arm.name not in SEEDED]


def command_run(args: argparse.Namespace) -> None:
    from halfbyte.parity.analysis import analyse
    from halfbyte.parity.report import write_report
    from halfbyte.parity.runner import DONE, run_directory, run_jobs, status_of
    from halfbyte.train import open_source

    if json.loads(GRID.read_text(encoding="utf-8")) != json.loads(json.dumps(grid())):
        raise SystemExit(f"{GRID} is not the grid of this file; the grid is committed before the first step")
    until = time.monotonic() + 60 * args.minutes
    probe = base_run(args.size, steps=100, data=args.data)
    steps = args.steps or rows_of(open_source(probe)) // BATCH
    out = Path(args.out) / args.size
    plan = settle(out, plan_of(args.size, steps=steps, data=args.data))
    slowest = 0.0
    for arm, seed in jobs_of(plan):
        folder = run_directory(out, arm, seed)
        if status_of(folder, steps).state == DONE and (not args.tasks or (folder / "evaluations.jsonl").is_file()):
            continue
        if time.monotonic() + 1.3 * slowest > until:
            print(f"time is up before {arm.name} seed {seed}; the same command goes on", flush=True)
            break
        began = time.monotonic()
        run_jobs(plan, out, [(arm, seed)], say=lambda text: print(text, flush=True))
        if args.tasks and status_of(folder, steps).state == DONE:
            evaluate(folder, Path(args.tasks))
        if not args.keep:
            shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        slowest = max(slowest, time.monotonic() - began)
    write_report(plan, out, analyse(plan, out))
    if args.clean:
        shutil.rmtree(out / "compiled", ignore_errors=True)


def rows_of(source: Any) -> int:
    """Rows of one pass over the training data."""
    return sum(shard.rows for shard in source.dataset.manifest.shards if shard.split == "train")


def evaluate(folder: Path, tasks: Path) -> None:
    """WikiText, LAMBADA and BLiMP on the run's last checkpoint, inside the call that made it."""
    from halfbyte.cli.main import main as halfbyte

    halfbyte(["eval", str(folder), *(str(tasks / name) for name in TASKS)])


def command_collect(args: argparse.Namespace) -> None:
    """The report of every size as JSON, and the gap against tokens a parameter."""
    into = Path(args.into)
    points = []
    for size in SIZES:
        path = Path(args.out) / size / "report.json"
        if not path.is_file():
            continue
        found = json.loads(path.read_text(encoding="utf-8"))
        found["evaluations"] = evaluations(Path(args.out) / size)
        (into / f"{size}.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        points += [point for arm in found["arms"] if (point := gap_point(size, arm))]
    (into / "gaps.json").write_text(json.dumps(fitted(points), indent=1) + "\n", encoding="utf-8")


def gap_point(size: str, arm: dict[str, Any]) -> dict[str, Any] | None:
    if not arm["gaps"]:
        return None
    values = list(arm["gaps"].values())
    ratio = TOKENS / without_embeddings(size)
    return {"size": size, "arm": arm["name"], "tokens_a_parameter": ratio, "gaps": values, "interval": arm["interval"]}


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
        lines[name] = {"a": line.intercept, "b": line.slope, "b_90": bounds}
    return {"unit": "% of the baseline's loss", "points": points, "lines": lines}


def evaluations(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """arm/seed -> the rows of its evaluations."""
    files = {f.parent: f.read_text().splitlines() for f in sorted(folder.glob("arms/*/seed-*/evaluations.jsonl"))}
    return {f"{run.parent.name}/{run.name}": [json.loads(line) for line in lines] for run, lines in files.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    commands.add_parser("plan").set_defaults(run=command_plan)
    prepare = commands.add_parser("prepare")
    prepare.add_argument("corpus")
    prepare.add_argument("--out", required=True)
    prepare.set_defaults(run=command_prepare)
    run = commands.add_parser("run")
    run.add_argument("size", choices=SIZES)
    run.add_argument("--data", required=True)
    run.add_argument("--out", required=True)
    run.add_argument("--minutes", type=float, default=9.0)
    run.add_argument("--steps", type=int, default=0, help="0: one pass over the data")
    run.add_argument("--tasks", default="", help="folder of the downstream tasks; empty: none")
    run.add_argument("--keep", action="store_true", help="keep checkpoints")
    run.add_argument("--clean", action="store_true", help="remove compiled programs at the end")
    run.set_defaults(run=command_run)
    collect = commands.add_parser("collect")
    collect.add_argument("out")
    collect.add_argument("--into", default=str(GRID.parent))
    collect.set_defaults(run=command_collect)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
