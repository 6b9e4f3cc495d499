"""Records of playbooks that were never run: a study with known gaps, as the stages would have left it."""

import importlib.util
import sys
from pathlib import Path

from halfbyte.study import STAGES, StageRecords
from halfbyte.study.analysis import analyse_study
from halfbyte.study.arms import standard_arms
from halfbyte.study.equivalence_test import EquivalenceMargin
from halfbyte.study.study_plan import StudyPlan

SPEC = importlib.util.spec_from_file_location("parity_fakes", Path(__file__).parents[1] / "study" / "fakes.py")
fakes = importlib.util.module_from_spec(SPEC)
sys.modules[SPEC.name] = fakes
SPEC.loader.exec_module(fakes)

ARMS = ("fp8", "nvfp4", "nvfp4_no_rht")
HEALTHY = {"fp8": 0.0, "nvfp4": 0.004, "nvfp4_no_rht": 0.005, "fp8-twin": 0.0, "control-fp4_one_scale": 0.4}
"""Nats; 0.5% of a loss of 3 is 0.015."""
COSTS = {"step_s": 1.0, "first_s": 60.0, "again_s": 10.0}


def study(folder, *, gaps=HEALTHY, seeds=3, noise=0.0005, done=None):
    """`done`: how many of its runs there was time for."""
    plan = StudyPlan(fakes.BASE, tuple(standard_arms("fp8", ["nvfp4", "nvfp4_no_rht"])), tuple(range(seeds)),
                EquivalenceMargin(0.5, True))  # fmt: skip
    skip = [] if done is None else [(arm.name, seed) for arm, seed in plan.jobs()[done:]]
    return analyse_study(fakes.fake_parity(folder, plan, gaps=gaps, noise=noise, skip=skip), folder)


def records(folder, *, found=None, wait=0.0, execution="native", rates=(100.0, 140.0, 150.0), passed=True, seconds=1.0):
    """A whole set; `found`: the study's data, None for a budget that had no room for one."""
    made = StageRecords(folder / "records")
    made.put("settings", data={"model": "tiny"})
    checks = [{"name": "nvfp4", "passed": passed}]
    row = {"execution": [execution], "share_4bit": 0.5, "memory_gib": 1.0, "remarks": []}
    speed = {"step_time_s": 0.1, "input_wait": wait}
    empty = {"milliseconds": 10.0, "tflops": 1.0, "mfu": None, "peak_gib": None, "needed_gib": 1.0}
    data = {
        "doctor": {"passed": passed, "checks": checks},
        "preflight": {"arms": dict.fromkeys(ARMS, row), "device_memory_gib": 80.0},
        "bench": {"baseline": "fp8", "rows": [{"arm": arm, "tokens_per_s": rate, **empty}
                                              for arm, rate in zip(ARMS, rates, strict=True)]},
        "plan": {"seeds": 3 if found else 0, "steps": 60 if found else 0, "fewest_steps": 30, "needs_s": 900.0,
                 "seconds": 240.0, "before_s": 100.0, "reserve": 0.08, "costs": COSTS},
        "compare": {"runs": [{"arm": arm, "speed": speed, "gradient_norm": {"median": 1.0, "largest": 2.0}}
                             for arm in ARMS]},
    }  # fmt: skip
    if found is not None:
        data["parity"] = found
    for stage in STAGES:  # in their order: a record drops those of later stages
        if stage in data:
            took = seconds if stage == "parity" else 1.0
            made.put(stage, command=f"halfbyte {stage} tiny", seconds=took, data=data[stage])
        else:
            made.put(stage, command=f"halfbyte {stage} tiny", seconds=0.0, missing=f"no room for {stage}")
    return made
