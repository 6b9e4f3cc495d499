"""`make faults`: seeded faults of every kind against a small run, each with the outcome that it must have.

    python tests/faults/harness.py                                # all, on two cores
    python tests/faults/harness.py --kinds kill_one_rank,sigterm --times 1
    python tests/faults/harness.py --write docs/evidence/faults.md

Needs Linux; small file systems need the right to mount (root), and are left out, and said to be, without it.
"""

import argparse
import importlib.metadata
import os
import platform
import resource
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).parent))
os.environ["JAX_PLATFORMS"] = "cpu"  # the harness reads checkpoints itself

from kinds import KINDS, Bench
from outside import Trainer, can_mount, keep_bytecode, saved_state
from places import Places

NEEDS_MOUNT = ("disk_full_for_a_while", "disk_full_to_the_end", "out_of_inodes", "read_only_directory")
STEPS, EVERY = 36, 6
WAITING = 4  # more faults than there are places: those that wait for a watchdog hold none


def write_config(path: Path) -> None:
    """A run with everything that makes resuming hard: 4 bits, accumulation, dynamic loss scale, two devices."""
    from halfbyte.models import LlamaConfig
    from halfbyte.optim import OptimizerConfig
    from halfbyte.train import (
        CheckpointConfig,
        LogConfig,
        LossScaleConfig,
        TrainConfig,
        ValidationConfig,
        jsonconfig,
    )

    model = LlamaConfig(
        name="tiny", vocab_size=64, embed=32, mlp=64, layers=2, heads=4, kv_heads=2, head_dim=16, max_seq=64
    )
    config = TrainConfig(
        name="faults",
        model=model,
        recipe="nvfp4",
        mesh="fsdp=2",
        data="synthetic",
        steps=STEPS,
        batch=8,
        seq=32,
        accumulate=2,
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup=1),
        loss_scale=LossScaleConfig(mode="dynamic", initial=8.0, growth_interval=12),
        validation=ValidationConfig(every=0, batches=1),
        checkpoint=CheckpointConfig(every=EVERY, keep_last=3),
        log=LogConfig(tensorboard=False, every=18),
    )
    jsonconfig.save(config, path)


def prepare(root: Path, *, two_ranks: bool = True) -> Bench:
    """The undisturbed run, as one process and as two; their compiled programs are kept for all others."""
    (root / "logs").mkdir()
    write_config(root / "config.json")
    trainer = Trainer(root / "config.json", root / "cache", root / "logs")
    code, output = trainer.finish(root / "whole")
    if code:
        raise SystemExit(f"the undisturbed run ended with {code}:\n{output[-3000:]}")
    if two_ranks:
        code, output = trainer.finish(root / "two", ranks=2)
        if code or saved_state(root / "two") != saved_state(root / "whole"):
            raise SystemExit(f"two undisturbed ranks ended with {code}, or otherwise than one:\n{output[-3000:]}")
    from halfbyte.data import demo_dataset

    data = Path(demo_dataset(root / "data", seq_len=32).directory)
    return Bench(trainer, root / "whole", STEPS, EVERY, data)


def one_fault(bench: Bench, root: Path, name: str, number: int, seed: int) -> dict:
    """Do it, and say what came of it."""
    fault, _, cores = KINDS[name]
    folder = root / f"{name}-{number}"
    with bench.places.taken(cores):
        began = time.monotonic()
        text, good = tried(lambda: fault(bench, folder, Random(f"{seed}/{name}/{number}")))
        seconds = time.monotonic() - began
    if good:
        shutil.rmtree(folder, ignore_errors=True)
    return {"kind": name, "number": number, "good": good, "text": text, "seconds": seconds}


def tried(fault: Callable[[], str]) -> tuple[str, bool]:
    """(what came of it, whether that is what must come of it)."""
    try:
        return fault(), True
    except AssertionError as error:
        return " ".join(str(error).split())[:300], False
    except Exception:
        return "harness: " + " ".join(traceback.format_exc().split())[-300:], False


HEAD = "# Faults\n\n`make faults`: what each fault must end in is in tests/faults/kinds.py.\n\n"


def table(rows: list[dict], seconds: float, seed: int, *, planned: int, left_out: list[str]) -> str:
    """The table that is printed and committed, of the faults that were tried so far."""
    rows = sorted(rows, key=lambda row: row["number"])
    bad = [row for row in rows if not row["good"]]
    kinds = {row["kind"] for row in rows}
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    head = (
        f"{len(rows)} faults of {len(kinds)} kinds, seed {seed}, in {seconds / 60:.1f} minutes and "
        f"{(spent.ru_utime + spent.ru_stime) / 60:.1f} of the processes' own time: "
        f"{len(rows) - len(bad)} as they must be, {len(bad)} not. Linux, CPU, {len(os.sched_getaffinity(0))} cores, "
        f"Python {platform.python_version()}, JAX {importlib.metadata.version('jax')}.\n\n"
        "| kind | n | s each | as it must be | what came of it (the last) |\n|---|---|---|---|---|\n"
    )
    lines = []
    for name in KINDS:
        mine = [row for row in rows if row["kind"] == name]
        if mine:
            good = sum(row["good"] for row in mine)
            each = sum(row["seconds"] for row in mine) / len(mine)
            said = next((row["text"] for row in mine if not row["good"]), mine[-1]["text"]).replace("|", "/")
            lines.append(f"| {name.replace('_', ' ')} | {len(mine)} | {each:.0f} | {good} | {said} |")
    foot = "" if len(rows) == planned else f"\nNot finished: {len(rows)} of {planned} planned.\n"
    if left_out:
        foot += f"\nLeft out, because file systems cannot be mounted here: {', '.join(left_out)}.\n"
    return head + "\n".join(lines) + "\n" + foot


def main() -> int:
    """Run them; 1 if any was not as it must be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=list(KINDS))
    parser.add_argument("--times", type=int, default=0, help="of each kind; 0: as each says")
    parser.add_argument("--cores", type=int, default=2, help="that the faults share")
    parser.add_argument("--write", help="also write the table here")
    parser.add_argument("--keep", action="store_true", help="keep the folders")
    args = parser.parse_args()
    if unknown := set(args.kinds) - set(KINDS):
        parser.error(f"--kinds {','.join(sorted(unknown))}: no such kind; there are {', '.join(KINDS)}")
    began, root = time.monotonic(), Path(tempfile.mkdtemp(prefix="halfbyte-faults-"))
    keep_bytecode(root / "bytecode")
    bench = prepare(root)
    bench.places = Places(args.cores)
    left_out = [] if can_mount() else [name for name in NEEDS_MOUNT if name in args.kinds]
    plan = [
        (name, number)
        for name in args.kinds
        if name not in left_out
        for number in range(args.times or KINDS[name].times)
    ]
    Random(args.seed).shuffle(plan)
    plan.sort(key=lambda fault: KINDS[fault[0]].cores == 1)  # one by one, a core would stand idle before each pair
    print(f"{len(plan)} faults, on {args.cores} cores; cannot be mounted here: {left_out or 'nothing'}", flush=True)
    rows: list[dict] = []
    text = ""
    with ThreadPoolExecutor(args.cores + WAITING) as threads:
        jobs = [threads.submit(one_fault, bench, root, name, number, args.seed) for name, number in plan]
        for job in as_completed(jobs):
            row = job.result()
            rows.append(row)
            mark = "ok  " if row["good"] else "BAD "
            print(f"{mark} {row['seconds']:5.0f} s  {row['kind']} {row['number']}: {row['text']}", flush=True)
            text = table(rows, time.monotonic() - began, args.seed, planned=len(plan), left_out=left_out)
            if args.write:
                Path(args.write).write_text(HEAD + text, encoding="utf-8")
    print("\n" + text)
    bad = [row for row in rows if not row["good"]]
    if not bad and not args.keep:
        shutil.rmtree(root, ignore_errors=True)
    else:
        print(f"folders and logs: {root}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
