"""Several processes and one run directory: starts that race for it, and readers beside a run that trains."""

import signal
import time
from pathlib import Path
from random import Random

from outside import last_step, stop, wait_until
from reference import Bench, at_random_step, is_sentence, kind, refused
from states import checkpoint_steps


@kind(times=1)
def two_runs_in_one_directory(bench: Bench, folder: Path, random: Random) -> str:
    one = bench.trainer.start(folder)
    at_random_step(bench, folder, [one], random)
    stop(one.process)  # or it may be done before the other is awake
    other = bench.trainer.start(folder)
    code = other.wait()
    one.process.send_signal(signal.SIGCONT)
    refused(other, code, "is held by another process")
    assert one.wait() == 0, one.output[-600:]
    bench.same_end(folder)
    return "the second: exit 2; the first: bit-identical"


def race(bench: Bench, folder: Path, random: Random, starts: int, **options: bool) -> str:
    """So many starts into a directory that is not there, up to half a second apart: one has it, every other says so and
    touches nothing, and what is there afterwards is one whole run."""
    runs = []
    for _ in range(starts):
        runs.append(bench.trainer.start(folder, **options))
        time.sleep(random.choice([0.0, 0.5 * random.random()]))
    codes = [one.wait() for one in runs]
    winners = codes.count(0)
    outputs = " // ".join(one.said[-200:] for one in runs)
    assert winners and set(codes) <= {0, 2}, f"ended with {codes}: {outputs}"
    for one, code in zip(runs, codes, strict=True):
        is_sentence(one.output)
        if code == 2:
            refused(one, code, "is held by another process")
    bench.same_end(folder)
    late = f", {winners - 1} came when it was done" if winners > 1 else ""
    return f"{starts} starts: one has it, {codes.count(2)} exit 2{late}; bit-identical"


@kind(times=3)
def two_starts_at_once(bench: Bench, folder: Path, random: Random) -> str:
    return race(bench, folder, random, 2)


@kind(times=2, cores=2)
def four_starts_at_once(bench: Bench, folder: Path, random: Random) -> str:
    return race(bench, folder, random, 4)


@kind(times=1)
def two_starts_of_a_shell_at_once(bench: Bench, folder: Path, random: Random) -> str:
    return race(bench, folder, random, 2, cold=True)


@kind(times=1, cores=2)
def readers_beside_a_run(bench: Bench, folder: Path, random: Random) -> str:
    """A checkpoint every step and one kept: whatever a reader opens is soon deleted under it."""
    flags = ("--steps", "100000", "--checkpoint.every", "1", "--checkpoint.keep-last", "1")
    one = bench.trainer.start(folder, *flags)
    at_random_step(bench, folder, [one], random)
    out = folder.with_name(f"{folder.name}-out")
    readers = {
        "verify": (),
        "eval": ("--limit", "2", "--no-save"),
        "inspect": ("--batches", "1", "--out", str(out)),
        "export": ("--out", str(out / "hf")),
        "generate": ("--prompt", "We", "--max-tokens", "2"),
    }
    deleted = 0
    try:
        for name in ["verify", "verify", "verify", *readers]:
            before = checkpoint_steps(folder)
            code, reader = bench.trainer.run(f"{folder.name}-{name}", name, str(folder), *readers[name])
            assert one.process.poll() is None, f"the run has ended: {one.output[-600:]}"
            deleted += not set(before) & set(checkpoint_steps(folder))
            is_sentence(reader.output)
            accused = [word for word in ("DAMAGED", "NOT WHOLE", "POISONED") if word in reader.output]
            assert code == 0 and not accused, f"{name} beside a whole run: {code}, {accused}: {reader.said[-600:]}"
    finally:
        one.process.send_signal(signal.SIGTERM)
    assert deleted, "no checkpoint was deleted under a reader"
    assert one.wait() == 75, one.output[-600:]
    assert wait_until(lambda: checkpoint_steps(folder)[-1] == last_step(folder), []), "steps were lost"
    code, reader = bench.verify(folder)
    assert code == 0, f"verify afterwards ended with {code}: {reader.said[-600:]}"
    return (
        f"{len(readers) + 3} readers, under {deleted} of them the checkpoint was deleted: all exit 0, none accuses it"
    )
