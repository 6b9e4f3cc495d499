"""`make faults`: seeded faults of every kind against a small run, each with the outcome that it must have.

    python tests/faults/harness.py                                # all, on two cores
    python tests/faults/harness.py --kinds kill_one_rank,sigterm --times 1
    python tests/faults/harness.py --write docs/evidence/faults.md

FAULTS_SLACK=4 waits four times as long for a step, where others load the machine: "step 8 never came" and "ended with
999" are then no sign of a hang. Needs Linux; small file systems need the right to mount (root), and are left out, and
said to be, without it.
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
os.environ["JAX_PLATFORMS"] = "cpu"

from kinds import KINDS, Benches
from outside import Warm, can_mount, keep_bytecode
from places import Places

WAITING = 4  # more faults than there are places: those that wait for a watchdog hold none


def one_fault(benches: Benches, name: str, number: int, seed: int) -> dict:
    """Do it, and say what came of it."""
    kind = KINDS[name]
    folder = benches.root / f"{name}-{number}"
    with benches.places.taken(kind.cores):
        bench = benches.of(kind.run)
        began = time.monotonic()
        text, good = tried(lambda: kind.fault(bench, folder, Random(f"{seed}/{name}/{number}")))
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


HEAD = """# Faults

`make faults`: what each fault must end in is in [tests/faults](../../tests/faults/kinds.py). The end states that are
compared are compared by the bytes of every array, read without Halfbyte, and `halfbyte verify` must find them whole.

"""


def table(rows: list[dict], seconds: float, spent: float, seed: int, *, planned: int, left_out: list[str]) -> str:
    """The table that is printed and committed, of the faults that were tried so far."""
    rows = sorted(rows, key=lambda row: row["number"])
    bad = [row for row in rows if not row["good"]]
    kinds = {row["kind"] for row in rows}
    head = (
        f"{len(rows)} faults of {len(kinds)} kinds, seed {seed}, in {seconds / 60:.1f} minutes and "
        f"{spent / 60:.1f} of the processes' own time: "
        f"{len(rows) - len(bad)} as they must be, {len(bad)} not.\nLinux, CPU, {len(os.sched_getaffinity(0))} cores, "
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


def own_seconds() -> float:
    """Processor time of the harness and of the processes that it started itself."""
    spent = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in spent)


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
    benches = Benches(root, Warm(root), root / "cache", Places(args.cores))
    left_out = [] if can_mount() else [name for name in args.kinds if KINDS[name].mounts]
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
        jobs = [threads.submit(one_fault, benches, name, number, args.seed) for name, number in plan]
        for job in as_completed(jobs):
            row = job.result()
            rows.append(row)
            mark = "ok  " if row["good"] else "BAD "
            print(f"{mark} {row['seconds']:5.0f} s  {row['kind']} {row['number']}: {row['text']}", flush=True)
            spent = benches.warm.seconds + own_seconds()
            text = table(rows, time.monotonic() - began, spent, args.seed, planned=len(plan), left_out=left_out)
            if args.write:
                Path(args.write).write_text(HEAD + text, encoding="utf-8")
    benches.warm.close()
    print("\n" + text)
    bad = [row for row in rows if not row["good"]]
    if not bad and not args.keep:
        shutil.rmtree(root, ignore_errors=True)
    else:
        print(f"folders and logs: {root}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
