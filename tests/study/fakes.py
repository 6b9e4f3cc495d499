"""A parity directory whose runs were never trained: curves with known gaps, as `halfbyte train` would have left
them."""

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np

from halfbyte.data.text_files import sha256_of
from halfbyte.io import dataclass_json
from halfbyte.models import LlamaConfig
from halfbyte.study.arms import standard_arms
from halfbyte.study.equivalence_test import EquivalenceMargin
from halfbyte.study.study_plan import StudyPlan, write_or_check_plan
from halfbyte.study.study_runs import cell_directory
from halfbyte.train import LogConfig, TrainConfig, ValidationConfig
from halfbyte.train.run_identity import RunIdentity, new_run_id, save_identity, software_versions

SPEC = importlib.util.spec_from_file_location(
    "parity_error_rate", Path(__file__).parents[2] / "benchmarks" / "parity_error_rate.py"
)
rate = importlib.util.module_from_spec(SPEC)  # the benchmark, which puts losses in place of training
sys.modules[SPEC.name] = rate
SPEC.loader.exec_module(rate)

MODEL = LlamaConfig(
    name="tiny", vocab_size=64, embed=32, mlp=64, layers=2, heads=4, kv_heads=2, head_dim=16, max_seq=64
)
BASE = TrainConfig(
    name="tiny",
    model=MODEL,
    data="synthetic",
    steps=60,
    batch=8,
    seq=32,
    validation=ValidationConfig(every=10, batches=1),
    log=LogConfig(tensorboard=False),
)
GAPS = {"bf16": 0.0, "nvfp4": 0.004, "mxfp4": 0.03, "bf16-twin": 0.0, "control-fp4_one_scale": 0.4}
"""Nats; 0.5% of a loss of 3 is 0.015."""


def plan_of(seeds=3, margin="0.5%", candidates=("nvfp4", "mxfp4"), base=BASE, looks=()):
    value, relative = (
        (float(margin[:-1]), True) if margin.endswith("%") else (float(margin.removesuffix("nats")), False)
    )
    arms = tuple(standard_arms("bf16", list(candidates)))
    command = "halfbyte parity <tiny> & co"
    return StudyPlan(base, arms, tuple(range(seeds)), EquivalenceMargin(value, relative), command=command, looks=looks)


def fake_parity(folder, plan=None, *, gaps=GAPS, noise=0.0005, skip=(), diverged=()):
    """Settle `plan` in `folder` and write every run but those in `skip`; (arm, seed) in `diverged` stop half way."""
    plan = write_or_check_plan(folder, plan or plan_of())
    for arm, seed in plan.jobs():
        if (arm.name, seed) not in skip:
            fake_run(cell_directory(folder, arm, seed), plan, arm, seed, gap=gaps[arm.name], noise=noise,
                     diverged=(arm.name, seed) in diverged)  # fmt: skip
    return plan


def fake_run(folder, plan, arm, seed, *, gap, noise, diverged):
    folder.mkdir(parents=True)
    config = arm.configure(plan.base, seed)
    shared = np.random.default_rng(seed)
    own = np.random.default_rng([seed, *arm.name.encode()])
    level = 3.0 + shared.normal(0, 0.02)
    end = gap + own.normal(0, noise)
    rows = []
    for step in range(1, plan.base.steps + 1):
        loss = level + 2 * np.exp(-step / 12) + end * step / plan.base.steps
        row = {"step": step, "tokens": 256 * step, "loss": loss + shared.normal(0, 0.1), "step_time_s": 0.1,
               "tokens_per_s_per_device": 2560.0, "tflops_per_device": 0.1, "input_wait_s": 0.0}  # fmt: skip
        if step % 10 == 0:
            row |= {
                "validation_loss": loss,
                "validation_loss/laws": loss - 0.1,
                "validation_loss/<b>news</b>": loss + 0.1,
            }
        rows.append(row)
        if diverged and step == plan.base.steps // 2:
            (folder / "diverged.json").write_text(json.dumps({"step": step, "error": "loss nan"}))
            break
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    dataclass_json.save_config(config, folder / "config.json")
    sealed = {"config.json": sha256_of(folder / "config.json")}
    save_identity(folder, RunIdentity(new_run_id(), "synthetic", sealed, software_versions()))
    kinds = ("fprop", "dgrad", "wgrad")
    how = "plain" if config.recipe == "bf16" else "emulated"
    gemm = {"left": f"{config.recipe} 1d rne", "right": "x", "bits": 4, "runs_in": "bf16", "execution": how}
    site = {"path": "layers/mlp/down", "layers": [0, 2], "recipe": config.recipe, "backend": "emulated"}
    sites = [{**site, "gemms": dict.fromkeys(kinds, gemm)}]
    (folder / "manifest.json").write_text(json.dumps({"device": "cpu", "share_4bit": 0.5, "sites": sites}))
    if config.recipe != "bf16":
        numbers = {"gain": 0.99, "bias": 0.0, "cosine": 0.99, "snr_db": 15.0, "band": [0.9, 1.1], "alarm": False}
        probe = [{"layer": at, "site": "mlp/down", "gemm": g, "kind": g, **numbers} for at in (0, 1) for g in kinds]
        alarms = ["wgrad: gain <0.88>"] if "control" in arm.name else []
        row = {"step": 30, "gemms": probe, "bits": {}, "alarms": alarms}
        (folder / "radar.jsonl").write_text(json.dumps(row) + "\n")
