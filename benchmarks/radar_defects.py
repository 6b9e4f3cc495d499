"""Planted defects and healthy runs under the radar, twenty seeds each: docs/evidence/radar_defects.json.

The defects are those of tests/diagnosis/defects.py, planted in the operands; the seeds are others than those that the
bands were fixed from. A seed is caught if one probe, at initialisation, raises an alarm.

    python benchmarks/radar_defects.py
"""

import contextlib
import dataclasses
import json
import sys
import time
from pathlib import Path

import jax

from halfbyte import models
from halfbyte.diagnosis.radar import Probe, judged, step_of
from halfbyte.recipe import recipe
from halfbyte.train import resolve

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests" / "diagnosis"), str(ROOT / "benchmarks")]

from defects import DEFECTS  # noqa: E402
from radar_bands import CONFIG, MODEL, batch_of  # noqa: E402

OUT = ROOT / "docs" / "evidence" / "radar_defects.json"
SEEDS = range(20)
POLICY = "mlp"


def alarms(defect) -> list[list[str]]:
    """The alarms of one probe of every seed, traced anew inside the defect."""
    jax.clear_caches()
    with defect():
        config = dataclasses.replace(CONFIG, recipe="nvfp4", policy=POLICY)
        probe = Probe(config, resolve(MODEL, POLICY, recipe("nvfp4")), None)
        init = jax.jit(lambda key: models.init(MODEL, key))
        found = []
        for seed in SEEDS:
            _, texts = judged(probe.gemms(init(jax.random.key(seed)), batch_of(seed), step_of(seed, 0)))
            shared = not texts and probe.bits(seed, 0)["alarm"]
            found.append([*texts, *(["random bits are shared"] if shared else [])])
        return found


def main() -> None:
    jax.config.update("jax_disable_most_optimizations", True)
    table = {}
    for name, defect in {"healthy": contextlib.nullcontext, **DEFECTS}.items():
        began = time.monotonic()
        found = alarms(defect)
        caught = sum(bool(texts) for texts in found)
        table[name] = {"alarms": caught, "of": len(found), "first": next((t[0] for t in found if t), "")}
        took = f"{time.monotonic() - began:.0f} s"
        print(f"{name}: {caught} of {len(found)}  ({took})  {table[name]['first']}", flush=True)
    about = {"seeds": [0, SEEDS.stop - 1], "model": dataclasses.asdict(MODEL), "policy": POLICY, "recipe": "nvfp4"}
    OUT.write_text(json.dumps({**about, "jax": jax.__version__, "defects": table}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
