"""The league's runs on one GPU: cells of size and tokens a parameter, recipes on all linears, no text repeated.

    python benchmarks/league_grid.py plan                                # docs/evidence/league/plan.json
    python benchmarks/league_grid.py rates --data DATA --out OUT         # the learning rate of each size, by its rule
    python benchmarks/league_grid.py run --data DATA --out OUT --arms bf16,nvfp4 --cells 1M@16 --seeds 0,1
    python benchmarks/league_grid.py collect OUT                         # runs.json: what every run ended with

`league_shown.py` has the table and the picture of a cell, and those of the ablation, which are arms of it.
docs/evidence/league/README.md is the plan in words, committed before the first step; `rates` and `run` refuse a
plan.json that is not this file's. DATA is what the README's `halfbyte data prepare` makes. `--slots` runs share the
card; a run that is done is not run again, and one that would not end within `--minutes` is not begun.
"""

import itertools
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from league_own import OWN

from halfbyte.inputs import read_json, write_json
from halfbyte.metrics import read_rows
from halfbyte.models import LlamaConfig, count_params
from halfbyte.optim import OptimizerConfig
from halfbyte.parity.arms import BASELINE, CANDIDATE, TWIN, Arm
from halfbyte.recipe import spell_recipe
from halfbyte.train import CheckpointConfig, LogConfig, TrainConfig, ValidationConfig, jsonconfig

FOLDER = Path(__file__).parents[1] / "docs" / "evidence" / "league"
VOCABULARY, SEQ, BATCH = 8192, 512, 16
# size -> width, hidden width, layers, heads
SIZES = {"1M": (128, 352, 5, 2), "3M": (256, 640, 4, 4), "10M": (384, 896, 6, 6)}
CELLS = {"1M": (5, 16, 50), "3M": (5, 16), "10M": (5,)}  # tokens a parameter
SEEDED = ("1M@16", "3M@16")  # the cells with three seeds
RATES = (5e-4, 1e-3, 2e-3, 4e-3, 8e-3)
RATE_CELLS, RATE_SEED = ("1M@16", "3M@16", "10M@5"), 100
NEAR, JUMP = 1e-3, 0.1  # a loss this near the best (relative) is as good; a fortieth of a run this far above the one
# before it (nats, means over its steps) is a jump
LATE = {"precision.switch_at": 0.8333, "precision.switch_to": "bf16", "precision.switch_part": "forward"}
JOINED = (  # by a commit before their first step
    "nvfp4_4over6_mse", "nvfp4_4over6_mae", "nvfp4_4over6_sr", "quartet2", "tetrajet2", "ue5m3", "nvfp4_row",
    "nvfp4_unbiased", "amd_mxfp4", "nvfp4_remainder",
)  # fmt: skip


def linear(recipe: str, **changes: Any) -> dict[str, Any]:
    return {"recipe": recipe, "policy": "all_linear", **changes}


ARMS = {
    arm.name: arm
    for arm in (
        Arm("bf16", BASELINE, linear("bf16")),
        Arm("bf16-twin", TWIN, linear("bf16", **{"precision.twin": 1})),
        Arm("nvfp4", CANDIDATE, linear("nvfp4")),
        Arm("nvfp4-twin", TWIN, linear("nvfp4", **{"precision.twin": 1})),
        Arm("mxfp4", CANDIDATE, linear("mxfp4")),
        Arm("fp8", CANDIDATE, linear("fp8")),
        Arm("mxfp8", CANDIDATE, linear("mxfp8")),
        Arm("nvfp4_1d_weights", CANDIDATE, linear("nvfp4_no_2d")),
        Arm("nvfp4_no_rht", CANDIDATE, linear("nvfp4_no_rht")),
        Arm("nvfp4_no_sr", CANDIDATE, linear("nvfp4_no_sr")),
        Arm("nvfp4_sr_everywhere", CANDIDATE, linear("nvfp4_sr_everywhere")),
        Arm("nvfp4_mlp", CANDIDATE, {"recipe": "nvfp4", "policy": "mlp"}),
        Arm("nvfp4_rht_everywhere", CANDIDATE, linear("nvfp4_rht_everywhere")),
        Arm("nvfp4_fwd_mxfp8_bwd", CANDIDATE, linear("nvfp4+mxfp8_backward")),
        Arm("nvfp4_forward_only", CANDIDATE, linear("nvfp4+bf16_backward")),
        Arm("nvfp4_backward_only", CANDIDATE, linear("nvfp4+bf16_forward")),
        Arm("nvfp4_last_bf16", CANDIDATE, {"recipe": "nvfp4", "policy": "all_linear; layers[-1:]=bf16"}),
        Arm("nemotron3", CANDIDATE, {"recipe": "nvfp4", "policy": "mlp; layers[-1:]=bf16"}),
        Arm("nvfp4_late", CANDIDATE, linear("nvfp4", **LATE)),
        *(Arm(name, CANDIDATE, linear(name)) for name in JOINED),
        *(Arm(own.name, CANDIDATE, linear(spell_recipe(own))) for own in OWN),
        Arm("remainder_late", CANDIDATE, linear("nvfp4_remainder", **LATE)),
        *(
            Arm(f"{leader}_{kept}_only", CANDIDATE, linear(f"{leader}+bf16_{other}"))
            for leader in ("quartet2", "ue5m3")
            for kept, other in (("forward", "backward"), ("backward", "forward"))
        ),
        *(
            Arm(f"remainder_{part}", CANDIDATE, {"recipe": "nvfp4", "policy": f"all_linear; {rule}=nvfp4_remainder"})
            for part, rule in (("down", "mlp/down"), ("mlp", "mlp/*"), ("attention", "attention/*"))
        ),
    )
}


def parameters(size: str) -> int:
    """Without embeddings."""
    model = model_of(size)
    return count_params(model) - model.vocab_size * model.embed


def model_of(size: str) -> LlamaConfig:
    width, hidden, layers, heads = SIZES[size]
    return LlamaConfig(
        name=f"league-{size}", vocab_size=VOCABULARY, embed=width, mlp=hidden, layers=layers, heads=heads,
        kv_heads=heads, head_dim=64, max_seq=SEQ, tied=True, rope_theta=10_000.0,
    )  # fmt: skip


def cells() -> list[str]:
    return [f"{size}@{ratio}" for size, ratios in CELLS.items() for ratio in ratios]


def steps_of(cell: str) -> int:
    size, ratio = cell.split("@")
    return round(parameters(size) * int(ratio) / (BATCH * SEQ))


def run_of(name: str, model: LlamaConfig, *, rate: float, data: str, steps: int, validated: int) -> TrainConfig:
    """What all arms of a study share; `validated` so many steps apart."""
    return TrainConfig(
        name=name, model=model, data=data, steps=steps, batch=BATCH, seq=SEQ,
        optimizer=OptimizerConfig(learning_rate=rate, schedule="cosine", warmup=0.05, final=0.1),
        validation=ValidationConfig(every=validated, batches=0), checkpoint=CheckpointConfig(every=0, keep_last=1),
        log=LogConfig(every=max(1, steps // 40), tensorboard=False),
    )  # fmt: skip


def base_run(cell: str, *, rate: float, data: str) -> TrainConfig:
    """What all arms of a cell share."""
    name, model, steps = f"league-{cell.replace('@', '-')}", model_of(cell.split("@")[0]), steps_of(cell)
    return run_of(name, model, rate=rate, data=data, steps=steps, validated=steps)


def plan() -> dict[str, Any]:
    """Everything that is fixed before the first step, as data."""
    sizes = {
        size: {**dict(zip(("embed", "mlp", "layers", "heads"), shape, strict=True)), "parameters": parameters(size)}
        for size, shape in SIZES.items()
    }
    rule = {"rates": RATES, "cells": RATE_CELLS, "seed": RATE_SEED, "near": NEAR, "jump": JUMP}
    about = {"margin": "0.5%", "vocabulary": VOCABULARY, "seq": SEQ, "batch": BATCH, "seeded_cells": SEEDED}
    steps = {cell: steps_of(cell) for cell in cells()}
    arms = {arm.name: {"kind": arm.kind, **arm.changes} for arm in ARMS.values()}
    return {**about, "sizes": sizes, "cells": steps, "learning_rate": rule, "arms": arms}


@dataclass(frozen=True)
class Job:
    """One run: where it lies and what it is."""

    folder: Path
    config: TrainConfig
    cell: str

    def done(self) -> bool:
        rows = read_rows(self.folder / "metrics.jsonl") if (self.folder / "metrics.jsonl").is_file() else []
        return any(row.get("step") == self.config.steps and "validation_loss" in row for row in rows)

    def start(self, slots: int) -> subprocess.Popen[bytes]:
        self.folder.mkdir(parents=True, exist_ok=True)
        config = self.folder.parent / f"{self.folder.name}.json"
        jsonconfig.save(self.config, config)
        command = [sys.executable, "-m", "halfbyte", "train", "--config", str(config), "--run-dir", str(self.folder)]
        shared = {"XLA_PYTHON_CLIENT_MEM_FRACTION": f"{0.85 / slots:.3f}"}
        with open(self.folder.parent / f"{self.folder.name}.log", "ab") as log:
            return subprocess.Popen([*command, "--no-sample"], stdout=log, stderr=log, env={**os.environ, **shared})


def run_all(jobs: list[Job], *, slots: int, minutes: float) -> None:
    """Every job that is not done, `slots` at a time."""
    until, running = time.monotonic() + 60 * minutes, {}
    longest: dict[str, float] = {}
    waiting = [job for job in jobs if not job.done()]
    while waiting or running:
        for process in [process for process in running if process.poll() is not None]:
            job, began = running.pop(process)
            took = time.monotonic() - began
            longest[job.cell] = max(longest.get(job.cell, 0.0), took)
            outcome = "done" if job.done() else f"FAILED ({process.returncode})"
            print(f"{job.folder} {outcome} in {took:.0f} s", flush=True)
        while waiting and len(running) < slots:
            job = waiting.pop(0)
            if time.monotonic() + longest.get(job.cell, 0.0) > until:
                print(f"{job.folder} no time left", flush=True)
                continue
            running[job.start(slots)] = (job, time.monotonic())
        if time.monotonic() > until + 20:
            for process in running:
                process.terminate()
        time.sleep(0.2)


def jumps(curve: list[float]) -> bool:
    """Whether the mean loss of a fortieth of the run stands more than JUMP above that of the one before."""
    size = len(curve) // 40
    means = [sum(curve[i * size : (i + 1) * size]) / size for i in range(40)]
    return any(after > before + JUMP for before, after in itertools.pairwise(means))


def rate_folder(out: Path, cell: str, rate: float) -> Path:
    return out / "rates" / f"{cell}-{rate:g}"


def chosen_rates(out: Path) -> dict[str, float]:
    """size -> the smallest rate without a jump whose loss is within NEAR of the best such."""
    found = {}
    for cell in RATE_CELLS:
        runs = {rate: outcome(rate_folder(out, cell, rate)) for rate in RATES}
        calm = {rate: run["validation_loss"] for rate, run in runs.items() if not run["jumps"]}
        best = min(calm.values())
        found[cell.split("@")[0]] = min(rate for rate, loss in calm.items() if loss <= best * (1 + NEAR))
    return found


def write(folder: Path, name: str, found: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / name, found)


def write_plan() -> None:
    write(FOLDER, "plan.json", plan())


def refuse_other_plan(folder: Path = FOLDER, made: dict[str, Any] | None = None) -> None:
    if read_json(folder / "plan.json") != json.loads(json.dumps(made or plan())):
        raise SystemExit("plan.json is not the plan of this file; the plan is committed before the first step")


def rates(data: str, out: Path, slots: int = 5, minutes: float = 9.0) -> None:
    refuse_other_plan()
    jobs = [
        Job(rate_folder(out, c, r), ARMS["bf16"].configure(base_run(c, rate=r, data=data), RATE_SEED), c)
        for c in RATE_CELLS
        for r in RATES
    ]
    run_all(jobs, slots=slots, minutes=minutes)
    runs = {f"{job.cell} {job.config.optimizer.learning_rate:g}": outcome(job.folder) for job in jobs}
    ended = {name: {key: run[key] for key in ("validation_loss", "jumps")} for name, run in runs.items()}
    write(out, "rates.json", {"chosen": chosen_rates(out), "runs": ended})


def run(data: str, out: Path, arms: str, cells: str, seeds: str = "0", slots: int = 5, minutes: float = 9.0) -> None:
    refuse_other_plan()
    chosen = read_json(out / "rates.json" if (out / "rates.json").is_file() else FOLDER / "rates.json")["chosen"]
    jobs = [
        Job(
            out / "runs" / cell / f"{name}-{seed}",
            ARMS[name].configure(base_run(cell, rate=chosen[cell.split("@")[0]], data=data), int(seed)),
            cell,
        )
        for seed in seeds.split(",")
        for cell in cells.split(",")
        for name in arms.split(",")
    ]
    run_all(jobs, slots=slots, minutes=minutes)


def outcome(folder: Path) -> dict[str, Any]:
    """What a run ended with."""
    rows = read_rows(folder / "metrics.jsonl")
    validated = [row for row in rows if "validation_loss" in row]
    kept = {key: value for key, value in validated[-1].items() if key.startswith("validation")}
    curve = [[row["step"], row["validation_loss"]] for row in validated]
    return {**kept, "curve": curve, "jumps": jumps([row["loss"] for row in rows if "loss" in row])}


def collect(out: tyro.conf.Positional[Path]) -> None:
    """What every run ended with, added to what is there."""
    found = read_json(FOLDER / "runs.json") if (FOLDER / "runs.json").is_file() else {}
    for metrics in sorted(out.glob("runs/*/*/metrics.jsonl")):
        cell, name = metrics.parts[-3:-1]
        if any(row["step"] == steps_of(cell) and "validation_loss" in row for row in read_rows(metrics)):
            found.setdefault(cell, {})[name] = outcome(metrics.parent)
    write(FOLDER, "runs.json", found)
    if (out / "rates.json").is_file():
        write(FOLDER, "rates.json", read_json(out / "rates.json"))


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict(
        {"plan": write_plan, "rates": rates, "run": run, "collect": collect}, description=__doc__
    )
