"""Parity of a small mixture of experts on one GPU: bf16 against nvfp4 experts, three seeds, a margin fixed beforehand.

    python benchmarks/experts_grid.py plan                           # docs/evidence/experts/plan.json
    python benchmarks/experts_grid.py run --data DATA --out OUT      # all runs, sharing the card
    python benchmarks/experts_grid.py collect OUT                    # docs/evidence/experts/runs.json, and the verdict

docs/evidence/experts/README.md is the plan in words, committed before the first step. DATA is the league's.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import tyro
from league_grid import BATCH, SEQ, VOCABULARY, Job, outcome, refuse_other_plan, run_all, run_of, write

from halfbyte.models import LlamaConfig, count_params
from halfbyte.parity.arms import BASELINE, CANDIDATE, TWIN, Arm
from halfbyte.parity.statistics import equivalence_p, over_seeds

FOLDER = Path(__file__).parents[1] / "docs" / "evidence" / "experts"
STEPS, RATE, MARGIN, SEEDS = 1500, 2e-3, 0.005, (0, 1, 2)
MODEL = LlamaConfig(
    name="experts-10m", vocab_size=VOCABULARY, embed=256, mlp=256, layers=4, heads=4, kv_heads=4, head_dim=64,
    max_seq=SEQ, tied=True, rope_theta=10_000.0, qk_norm=True, experts=8, experts_per_token=2, norm_topk=True,
)  # fmt: skip
LATER = ("router", "shared_experts")  # fields that models have had since the plan was committed; here as it was before
ARMS = (
    Arm("bf16", BASELINE, {"recipe": "bf16", "policy": "experts"}),
    Arm("nvfp4", CANDIDATE, {"recipe": "nvfp4", "policy": "experts"}),
    Arm("bf16-twin", TWIN, {"recipe": "bf16", "policy": "experts", "precision.twin": 1}, seeds=1),
)


def plan() -> dict[str, Any]:
    """Everything that is fixed before the first step, as data."""
    about = {"margin": MARGIN, "seeds": SEEDS, "steps": STEPS, "batch": BATCH, "seq": SEQ, "learning_rate": RATE}
    arms = {arm.name: {"kind": arm.kind, "seeds": arm.seeds or len(SEEDS), **arm.changes} for arm in ARMS}
    fields = dataclasses.asdict(MODEL).items()
    shape = {key: value for key, value in fields if value is not None and key not in LATER}
    return {**about, "parameters": count_params(MODEL), "model": shape, "arms": arms}


def run(data: str, out: Path, slots: int = 7, minutes: float = 9.0, steps: int = STEPS) -> None:
    """Fewer `steps`, to see that a run starts; they are not collected."""
    refuse_other_plan(FOLDER, plan())
    base = run_of("experts", MODEL, rate=RATE, data=data, steps=steps, validated=-(-steps // 2))
    jobs = [
        Job(out / f"{arm.name}-{seed}", arm.configure(base, seed), "experts")
        for arm in ARMS
        for seed in SEEDS[: arm.seeds]
    ]
    run_all(jobs, slots=slots, minutes=minutes)


def collect(out: tyro.conf.Positional[Path]) -> None:
    """What every run ended with; the gaps of the seeds that both arms have, and what they say."""
    ended = {file.parent.name: outcome(file.parent) for file in sorted(out.glob("*/metrics.jsonl"))}
    ended = {name: run for name, run in ended.items() if run["curve"][-1][0] == STEPS}
    losses = {name: run["validation_loss"] for name, run in ended.items()}
    both = [seed for seed in SEEDS if {f"bf16-{seed}", f"nvfp4-{seed}"} <= losses.keys()]
    gaps = [losses[f"nvfp4-{seed}"] / losses[f"bf16-{seed}"] - 1 for seed in both]
    found = {"runs": ended, "gaps": gaps}
    if len(gaps) > 1:
        interval = over_seeds(gaps)
        found |= {"interval": dataclasses.asdict(interval), "p": equivalence_p(interval, MARGIN)}
    write(FOLDER, "runs.json", found)
    print(json.dumps({**losses, **{key: value for key, value in found.items() if key != "runs"}}, indent=1))


if __name__ == "__main__":
    commands = {"plan": lambda: write(FOLDER, "plan.json", plan()), "run": run, "collect": collect}
    tyro.extras.subcommand_cli_from_dict(commands, description=__doc__)
