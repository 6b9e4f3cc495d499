"""Planted defects and healthy runs under the radar, twenty seeds each: docs/evidence/radar_defects.json.

The defects are those of tests/diagnosis/defects.py, planted in the operands; the seeds are others than those that the
bands were fixed from. A seed is caught if one probe, at initialisation, raises an alarm.

    python benchmarks/radar_defects.py --workers 2
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import json
import multiprocessing
import sys
import time
from pathlib import Path
from typing import Any

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
SEEDS = 20
POLICY = "mlp"
HEALTHY = "healthy"


def alarms(name: str, seeds: int) -> list[list[str]]:
    """The alarms of one probe of every seed, traced anew inside the defect."""
    jax.config.update("jax_disable_most_optimizations", True)
    jax.clear_caches()
    with DEFECTS[name]() if name != HEALTHY else contextlib.nullcontext():
        config = dataclasses.replace(CONFIG, recipe="nvfp4", policy=POLICY)
        probe = Probe(config, resolve(MODEL, POLICY, recipe("nvfp4")), None)
        init = jax.jit(lambda key: models.init(MODEL, key))
        found = []
        for seed in range(seeds):
            _, texts = judged(probe.gemms(init(jax.random.key(seed)), batch_of(seed), step_of(seed, 0)))
            shared = (not texts or name == HEALTHY) and probe.bits(seed, 0)["alarm"]
            found.append([*texts, *(["random bits are shared"] if shared else [])])
        return found


def row(name: str, seeds: int) -> dict[str, Any]:
    """One line of the table."""
    began = time.monotonic()
    found = alarms(name, seeds)
    first = next((texts[0] for texts in found if texts), "")
    seconds = round(time.monotonic() - began)
    return {"alarms": sum(bool(texts) for texts in found), "of": seeds, "first": first, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=1, help="processes; each takes a whole defect")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--out", default=str(OUT), help="written after every defect")
    args = parser.parse_args()
    about = {"seeds": [0, args.seeds - 1], "model": dataclasses.asdict(MODEL), "policy": POLICY, "recipe": "nvfp4"}
    names, table = [HEALTHY, *DEFECTS], {}
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(args.workers, context) as pool:
        jobs = {pool.submit(row, name, args.seeds): name for name in names}
        for job in concurrent.futures.as_completed(jobs):
            name = jobs[job]
            table[name] = made = job.result()
            print(f"{name}: {made['alarms']} of {made['of']}  ({made['seconds']} s)  {made['first']}", flush=True)
            ordered = {name: table[name] for name in names if name in table}
            whole = {**about, "jax": jax.__version__, "defects": ordered}
            Path(args.out).write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
