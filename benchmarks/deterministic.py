"""Whether a GPU run repeats itself with --deterministic, and what that costs, in one call of about four minutes.

    python benchmarks/deterministic.py                                # llama-60m: bf16, nvfp4, fp8
    python benchmarks/deterministic.py --model demo --steps 20        # the same on a CPU, to try the script

For each recipe one run is killed with -9 after its last step but before its end, and started again from the checkpoint
of step `--from`: the losses of the next `--steps` steps must be equal, bit for bit. The second start compiles and
autotunes anew: nothing comes from a cache. The recipes run side by side, since only bits matter there; then each
recipe is timed alone, with and without --deterministic, from cached programs.
"""

import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from halfbyte.train import read_rows

ENTRY = [sys.executable, "-c", "from halfbyte.cli.main import entry; entry()"]
SOURCE = str(Path(__file__).resolve().parents[1] / "src")


@dataclass(frozen=True)
class Args:
    model: str = "llama-60m"
    recipes: str = "bf16,nvfp4,fp8"
    start: Annotated[int, tyro.conf.arg(name="from")] = 20
    """Step of the checkpoint that the second start goes on from."""
    steps: int = 100
    timed: int = 45
    """Steps of a timed run; 0: compare bits alone."""
    batch: int = 0
    seq: int = 0
    limit: float = 240.0
    """Seconds that one start may take."""
    json: str = ""
    """Also write the result here."""


def command(args: Args, recipe: str, folder: Path, *flags: str) -> list[str]:
    """One start of `halfbyte train`."""
    shape = ["--batch", str(args.batch), "--seq", str(args.seq)] if args.batch else []
    quiet = ["--log.no-tensorboard", "--no-sample", "--validation.batches", "1", "--optimizer.warmup", "1"]
    words = ["train", args.model, "--recipe", recipe, "--data", "synthetic", "--run-dir", str(folder), *shape, *quiet]
    return [*ENTRY, *words, *flags]


def environment(*, share: float) -> dict[str, str]:
    """The child's environment; several runs at once share the card's memory."""
    path = f"{SOURCE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    return {**os.environ, "PYTHONPATH": path, "XLA_PYTHON_CLIENT_MEM_FRACTION": f"{share:.2f}"}


def rows(folder: Path) -> list[dict]:
    """Rows of a run's metrics, as far as they are written."""
    file = folder / "metrics.jsonl"
    return read_rows(file) if file.exists() else []


def run_to(process: subprocess.Popen, folder: Path, step: int, log: Path, *, limit_s: float) -> None:
    """Wait until `step` is written down, then kill -9."""
    deadline = time.monotonic() + limit_s
    while process.poll() is None and time.monotonic() < deadline:
        found = rows(folder)
        if found and found[-1]["step"] >= step:
            process.kill()
            process.wait()
            return
        time.sleep(0.2)
    process.kill()
    raise SystemExit(f"step {step} was never reached; the end of {log}:\n{log.read_text()[-3000:]}")


def repeat(args: Args, recipe: str, root: Path) -> dict:
    """Kill a run and resume it; how many of the losses after the checkpoint are bit-equal."""
    folder, log = root / recipe, root / f"{recipe}.log"
    last = args.start + args.steps
    saves = ["--checkpoint.every", str(args.start), "--checkpoint.keep-every", str(args.start)]
    saves += ["--steps", str(last + 1000)]
    environ = environment(share=share_of(args))
    cached = ["--compile-cache", str(root / "cache")]
    with open(log, "w") as output:
        first = command(args, recipe, folder, "--deterministic", *saves, *cached)
        process = subprocess.Popen(first, env=environ, stdout=output, stderr=subprocess.STDOUT)
        run_to(process, folder, last + 1, log, limit_s=args.limit)
        before = {row["step"]: row for row in rows(folder)}
        kept = [json.dumps(row) + "\n" for row in rows(folder) if row["step"] <= args.start]
        (folder / "metrics.jsonl").write_text("".join(kept))  # or the second run would seem to be done at once
        for newer in (folder / "checkpoints").iterdir():  # go on from the first checkpoint, whatever came after
            if newer.name != str(args.start):
                shutil.rmtree(newer)
        again = command(args, recipe, folder, "--deterministic", *saves)
        process = subprocess.Popen(again, env=environ, stdout=output, stderr=subprocess.STDOUT)
        run_to(process, folder, last + 1, log, limit_s=args.limit)
    after = {row["step"]: row for row in rows(folder)}
    compared = range(args.start + 1, last + 1)
    equal = [step for step in compared if before[step]["loss"] == after[step]["loss"]]
    norms = [step for step in compared if before[step]["grad_norm"] == after[step]["grad_norm"]]
    first_other = next((step for step in compared if step not in equal), None)
    largest = max(abs(before[step]["loss"] - after[step]["loss"]) for step in compared)
    resumed = f"after step {args.start}" in log.read_text()
    return {
        "recipe": recipe,
        "resumed": resumed,
        "losses": len(compared),
        "equal": len(equal),
        "equal_gradient_norms": len(norms),
        "first_difference": first_other,
        "largest_difference": largest,
    }


def share_of(args: Args) -> float:
    """The card's memory for each of the runs that go side by side: one a recipe, and one that warms up its timing."""
    return 0.9 / ((2 if args.timed else 1) * len(args.recipes.split(",")))


def prepare(args: Args, recipe: str, root: Path) -> None:
    """Compile the ordinary program into the cache, so that timing it later starts at once."""
    flags = ["--steps", "3", "--checkpoint.every", "0", "--compile-cache", str(root / "cache")]
    timed(args, recipe, root / f"warm-{recipe}", flags, share=share_of(args))


def timed(args: Args, recipe: str, folder: Path, flags: list[str], *, share: float) -> float:
    """Median seconds a step of a short run; the first steps are left out."""
    words = command(args, recipe, folder, *flags)
    ended = subprocess.run(
        words, env=environment(share=share), capture_output=True, text=True, timeout=args.limit, check=False
    )
    if ended.returncode:
        raise SystemExit(f"{' '.join(words)} ended with {ended.returncode}:\n{(ended.stdout + ended.stderr)[-3000:]}")
    return statistics.median(row["step_time_s"] for row in rows(folder)[len(rows(folder)) // 3 :])


def cost(args: Args, recipe: str, root: Path) -> dict:
    """Step time with and without, one after the other on an idle card; nothing with --timed 0."""
    if not args.timed:
        return {"step_s": None, "deterministic_step_s": None, "ratio": None}
    flags = ["--steps", str(args.timed), "--checkpoint.every", "0", "--compile-cache", str(root / "cache")]
    plain = timed(args, recipe, root / f"plain-{recipe}", flags, share=0.9)
    exact = timed(args, recipe, root / f"timed-{recipe}", [*flags, "--deterministic"], share=0.9)
    return {"step_s": plain, "deterministic_step_s": exact, "ratio": exact / plain}


def main(args: Args) -> int:
    """Run all recipes; 0 if every loss was equal."""
    began, root, recipes = time.monotonic(), Path(tempfile.mkdtemp(prefix="halfbyte-")), args.recipes.split(",")
    with ThreadPoolExecutor(2 * len(recipes)) as threads:
        repeats = [threads.submit(repeat, args, recipe, root) for recipe in recipes]
        warm = [threads.submit(prepare, args, recipe, root) for recipe in recipes if args.timed]
        found = [job.result() for job in repeats]
        for job in warm:
            job.result()
    print(f"bits compared after {time.monotonic() - began:.0f} s", flush=True)
    results = [{**row, **cost(args, row["recipe"], root)} for row in found]
    facts = {
        "model": args.model, "python": platform.python_version(),
        "seconds": time.monotonic() - began, "results": results,
    }  # fmt: skip
    print(f"{'recipe':8} {'equal losses':>14} {'equal norms':>12} {'first other':>12} {'largest':>9} {'cost':>7}")
    for row in results:
        ratio = f"{row['ratio']:>6.3f}x" if row["ratio"] else "not timed"
        print(
            f"{row['recipe']:8} {row['equal']:>7} of {row['losses']:<4} {row['equal_gradient_norms']:>11} "
            f"{row['first_difference'] or '-':>12} {row['largest_difference']:>9.1e} {ratio}"
        )
    print(json.dumps(facts))
    if args.json:
        Path(args.json).write_text(json.dumps(facts, indent=1) + "\n")
    shutil.rmtree(root, ignore_errors=True)
    return 0 if all(row["resumed"] and row["equal"] == row["losses"] for row in results) else 3


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args, description=__doc__)))
