"""`make soak`: the demo under `halfbyte launch`, a random fault every 20 steps, against a run that nobody disturbs.

    python tests/faults/soak.py                   # 500 steps
    python tests/faults/soak.py --steps 100       # a taste

Bit-identical at the end; memory, threads and file handles of the supervisor and of the ranks flat; disk bounded.
"""

import argparse
import collections
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from outside import ENTRY, SOURCE, keep_bytecode, last_step
from states import losses, saved_state

FAULTS = ("kill", "term", "stop", "flip", "truncate", "hup")


def ranks_of(supervisor: int) -> list[int]:
    """The processes that the supervisor has started."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = status.read_text()
        except OSError:  # it ended meanwhile
            continue
        if int(text.rpartition(")")[2].split()[1]) == supervisor:  # after the name: state, parent
            found.append(int(status.parent.name))
    return sorted(found)


def usage(pid: int) -> dict[str, int]:
    """Memory in MiB, threads and open files of a process; zeros when it is gone."""
    try:
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        handles = len(os.listdir(f"/proc/{pid}/fd"))
        return {"mib": int(status["VmRSS"].split()[0]) // 1024, "threads": int(status["Threads"]), "handles": handles}
    except (OSError, KeyError):
        return {"mib": 0, "threads": 0, "handles": 0}


def disk(folder: Path) -> int:
    """Bytes under a folder."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size
        except OSError:
            continue
    return total


def disturb(fault: str, pid: int, folder: Path, random: Random) -> None:
    """One fault, from outside."""
    if fault in ("flip", "truncate"):
        newest = max((int(p.name) for p in (folder / "checkpoints").iterdir() if p.name.isdigit()), default=0)
        files = [p for p in (folder / "checkpoints" / str(newest)).rglob("*") if p.is_file() and p.stat().st_size > 8]
        steps = [p for p in (folder / "checkpoints").iterdir() if p.name.isdigit()]
        if files and len(steps) > 1:  # the one before it must be there
            victim = random.choice(sorted(files))
            content = bytearray(victim.read_bytes())
            content[random.randrange(len(content))] ^= 1 << random.randrange(8)
            victim.write_bytes(content if fault == "flip" else content[: len(content) // 2])
        os.kill(pid, signal.SIGKILL)
    elif fault == "stop":
        os.kill(pid, signal.SIGSTOP)
        time.sleep(2.0)
        os.kill(pid, signal.SIGCONT)
    else:
        os.kill(pid, {"kill": signal.SIGKILL, "term": signal.SIGTERM, "hup": signal.SIGHUP}[fault])


def summary(seen: list[dict], args: argparse.Namespace) -> dict[str, Any]:
    """How many faults of each kind, and from what to what memory, threads, file handles and disk went."""
    spans = {
        f"{who} {what}": [min(row[who][what] for row in seen), max(row[who][what] for row in seen)]
        for who in ("rank", "supervisor")
        for what in ("mib", "threads", "handles")
    }
    spans["disk_mib"] = [min(row["disk_mib"] for row in seen), max(row["disk_mib"] for row in seen)]
    faults = dict(collections.Counter(row["fault"] for row in seen))
    return {"steps": args.steps, "every": args.every, "seed": args.seed, "faults": faults, "from_to": spans}


def keep(path: str | None, found: dict[str, Any]) -> None:
    """Write it, if a place was given."""
    if path:
        Path(path).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    """Soak; 1 if the end differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--every", type=int, default=20, help="steps between faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", help="also write what was seen here, after every fault")
    args = parser.parse_args()
    random, root = Random(args.seed), Path(tempfile.mkdtemp(prefix="halfbyte-soak-"))
    keep_bytecode(root / "bytecode")
    flags = ["--steps", str(args.steps), "--batch", "4", "--checkpoint.every", "10", "--checkpoint.keep-last", "3"]
    flags += ["--validation.batches", "2", "--no-sample", "--log.every", "50", "--compile-cache", str(root / "cache")]
    environ = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": f"{SOURCE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }
    with open(root / "whole.log", "w") as log:
        whole = [*ENTRY, "train", "demo", *flags, "--run-dir", str(root / "whole")]
        subprocess.run(whole, env=environ, stdout=log, stderr=subprocess.STDOUT, check=True)
    folder, seen = root / "run", []
    with open(root / "run.log", "w") as log:
        command = [*ENTRY, "launch", "--pause-s", "0.1", "--", "train", "demo", *flags, "--run-dir", str(folder)]
        supervisor = subprocess.Popen(command, env=environ, stdout=log, stderr=subprocess.STDOUT)
        due = args.every
        while supervisor.poll() is None:
            time.sleep(0.05)
            if last_step(folder) < due or due >= args.steps:
                continue
            ranks = ranks_of(supervisor.pid)
            if not ranks:
                continue
            fault = random.choice(FAULTS)
            seen.append({"step": due, "fault": fault, "rank": usage(ranks[0]), "supervisor": usage(supervisor.pid)})
            seen[-1]["disk_mib"] = disk(folder / "checkpoints") >> 20
            disturb(fault, ranks[0], folder, random)
            keep(args.write, {"unfinished": True, **summary(seen, args), "seen": seen})
            due += args.every
    same = losses(folder) == losses(root / "whole") and saved_state(folder) == saved_state(root / "whole")
    found = {"exit": supervisor.returncode, "identical": same, **summary(seen, args)}
    print(json.dumps(found))
    keep(args.write, {**found, "seen": seen})
    good = same and supervisor.returncode == 0
    print(f"{len(seen)} faults in {args.steps} steps: {'bit-identical' if good else f'NOT THE SAME, see {root}'}")
    if good:
        shutil.rmtree(root, ignore_errors=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
