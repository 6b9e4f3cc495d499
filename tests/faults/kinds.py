"""Every kind of fault: what is done to the trainer, and what must come of it.

A fault is a function of (bench, folder, random generator). It returns a sentence about what happened, and raises
AssertionError when that is not what must happen. `Bench` holds the reference: the run that nobody disturbed.
"""

import json
import os
import shutil
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from outside import (
    STACKS,
    Started,
    Trainer,
    change_memory,
    fill,
    flip,
    free_port,
    last_step,
    losses,
    saved_state,
    small_disk,
    take_inodes,
    wait_until,
)

GONE = r"has gone|has stopped|not answered"


@dataclass
class Bench:
    """The trainer and its references: `whole` is an undisturbed run of one process, `reference` its losses and state.
    Both layouts (one process of two devices, two of one) give the same bits."""

    trainer: Trainer
    whole: Path
    steps: int
    every: int
    data: Path | None = None

    def same_end(self, folder: Path) -> None:
        """The run in `folder` ended as the undisturbed one did, bit for bit."""
        assert losses(folder) == losses(self.whole), "losses differ from the undisturbed run"
        assert saved_state(folder) == saved_state(self.whole), "the end state differs from the undisturbed run"

    def goes_on(self, folder: Path, *flags: str, ranks: int = 1) -> str:
        """Start again, run to the end, compare; the output."""
        code, output = self.trainer.finish(folder, *flags, ranks=ranks)
        assert code == 0, f"ended with {code}: {output[-800:]}"
        self.same_end(folder)
        return output


Fault = Callable[[Bench, Path, Random], str]
KINDS: dict[str, tuple[Fault, int]] = {}


def kind(times: int) -> Callable[[Fault], Fault]:
    """Register a fault under its function's name, to be tried `times` times in a full run."""

    def register(fault: Fault) -> Fault:
        KINDS[fault.__name__] = (fault, times)
        return fault

    return register


def at_random_step(bench: Bench, folder: Path, started: list[Started], random: Random) -> int:
    """Wait for a step somewhere in the middle of the run, and a little longer."""
    step = random.randint(bench.every // 2, bench.steps - bench.every)
    assert wait_until(lambda: last_step(folder) >= step, started), f"step {step} never came: {started[0].output[-800:]}"
    time.sleep(random.random() * 0.05)
    return step


def is_sentence(output: str) -> None:
    """No page of C++ stack, no Python traceback."""
    assert not STACKS.search(output), "a C++ stack"
    assert "Traceback (most recent call last)" not in output, "a traceback"


# Killed


@kind(times=8)
def kill_during_a_step(bench: Bench, folder: Path, random: Random) -> str:
    one = bench.trainer.start(folder)
    step = at_random_step(bench, folder, [one], random)
    one.process.kill()
    one.wait()
    bench.goes_on(folder)
    return f"killed after step {step}; resumed, bit-identical"


@kind(times=6)
def kill_during_a_save(bench: Bench, folder: Path, random: Random) -> str:
    one = bench.trainer.start(folder)
    at_random_step(bench, folder, [one], random)
    wait_until(lambda: any((folder / "checkpoints").glob("*tmp*")), [one], 20)
    time.sleep(random.random() * 0.02)
    one.process.kill()
    one.wait()
    bench.goes_on(folder)
    assert not list((folder / "checkpoints").glob("*tmp*")), "an unfinished save was left behind"
    return "killed in a save; resumed, bit-identical, nothing left behind"


@kind(times=4)
def kill_during_a_restore(bench: Bench, folder: Path, random: Random) -> str:
    one = bench.trainer.start(folder)
    at_random_step(bench, folder, [one], random)
    one.process.kill()
    one.wait()
    again = bench.trainer.start(folder)
    wait_until(lambda: "TFLOP/s counted" in again.output, [again])
    time.sleep(random.random() * 0.5)
    again.process.kill()
    again.wait()
    bench.goes_on(folder)
    return "killed again while it restored; resumed, bit-identical"


@kind(times=5)
def kill_one_rank(bench: Bench, folder: Path, random: Random) -> str:
    ranks = bench.trainer.start_all(folder, ranks=2)
    step = at_random_step(bench, folder, ranks, random)
    victim = random.randrange(2)
    ranks[victim].process.kill()
    code = ranks[1 - victim].wait(60)
    output = ranks[1 - victim].output
    assert code == 1, f"the other rank ended with {code}: {output[-800:]}"
    is_sentence(output)
    assert f"rank {victim}" in output.splitlines()[-1] and "has gone" in output, output[-400:]
    bench.goes_on(folder, ranks=2)
    return f"rank {victim} killed after step {step}; the other named it and ended; resumed, bit-identical"


# Told to stop


def told(bench: Bench, folder: Path, random: Random, numbers: list[signal.Signals]) -> str:
    one = bench.trainer.start(folder)
    at_random_step(bench, folder, [one], random)
    for number in numbers:
        one.process.send_signal(number)
        time.sleep(0.02)
    code = one.wait()
    assert code == 75, f"ended with {code}: {one.output[-800:]}"
    step = last_step(folder)
    assert saved_state(folder)[0] == step, "steps were lost"
    output = bench.goes_on(folder)
    assert f"after step {step}" in output, "it did not go on where it stopped"
    return f"exit 75 after step {step}, none lost; bit-identical"


@kind(times=4)
def sigterm(bench: Bench, folder: Path, random: Random) -> str:
    return told(bench, folder, random, [signal.SIGTERM])


@kind(times=2)
def sigterm_twice(bench: Bench, folder: Path, random: Random) -> str:
    return told(bench, folder, random, [signal.SIGTERM, signal.SIGTERM])


@kind(times=2)
def sighup(bench: Bench, folder: Path, random: Random) -> str:
    return told(bench, folder, random, [signal.SIGHUP])


@kind(times=3)
def sigterm_during_a_save(bench: Bench, folder: Path, random: Random) -> str:
    one = bench.trainer.start(folder)
    at_random_step(bench, folder, [one], random)
    wait_until(lambda: any((folder / "checkpoints").glob("*tmp*")), [one], 20)
    one.process.send_signal(signal.SIGTERM)
    code = one.wait()
    assert code in (75, 0), f"ended with {code}: {one.output[-800:]}"
    assert saved_state(folder)[0] == last_step(folder), "steps were lost"
    bench.goes_on(folder)
    return "exit 75 out of a save, none lost; bit-identical"


@kind(times=3)
def sigterm_before_the_loop(bench: Bench, folder: Path, random: Random) -> str:
    one = bench.trainer.start(folder)
    time.sleep(1.0 + 3.0 * random.random())
    one.process.send_signal(signal.SIGTERM)
    code = one.wait()
    assert code == 75, f"ended with {code}: {one.output[-800:]}"
    bench.goes_on(folder)
    return "exit 75 before the first step or after it; bit-identical"


@kind(times=2)
def closed_pipe(bench: Bench, folder: Path, random: Random) -> str:
    reading, writing = os.pipe()
    one = bench.trainer.start(folder, stdout=writing)
    os.close(writing)
    at_random_step(bench, folder, [one], random)
    os.close(reading)
    code = one.wait()
    assert code == 75, f"ended with {code}"
    assert saved_state(folder)[0] == last_step(folder), "steps were lost"
    bench.goes_on(folder)
    return "exit 75 when nobody read any more, none lost; bit-identical"


@kind(times=3)
def sigterm_one_rank(bench: Bench, folder: Path, random: Random) -> str:
    ranks = bench.trainer.start_all(folder, ranks=2)
    at_random_step(bench, folder, ranks, random)
    ranks[random.randrange(2)].process.send_signal(signal.SIGTERM)
    codes = [one.wait() for one in ranks]
    assert codes == [75, 75], f"ended with {codes}: {ranks[0].output[-600:]}"
    assert saved_state(folder)[0] == last_step(folder), "steps were lost"
    bench.goes_on(folder, ranks=2)
    return f"both exit 75 after step {last_step(folder)}, none lost; bit-identical"


# Hung, absent, different


@kind(times=3)
def stop_one_rank(bench: Bench, folder: Path, random: Random) -> str:
    ranks = bench.trainer.start_all(folder, "--watchdog-s", "20", ranks=2)
    at_random_step(bench, folder, ranks, random)
    victim = random.randrange(2)
    ranks[victim].process.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    code = ranks[1 - victim].wait(60)
    seconds = time.monotonic() - began
    ranks[victim].process.send_signal(signal.SIGCONT)
    codes = code, ranks[victim].wait(60)
    output = ranks[1 - victim].output
    assert code == 1 and codes[1] != 999, f"ended with {codes}: {output[-600:]}"
    is_sentence(output)
    assert f"rank {victim}" in output.splitlines()[-1], output[-400:]
    bench.goes_on(folder, ranks=2)
    return f"rank {victim} stopped: named by the other after {seconds:.0f} s; bit-identical"


@kind(times=2)
def port_taken(bench: Bench, folder: Path, random: Random) -> str:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        one = bench.trainer.start(folder, rank=0, ranks=2, port=holder.getsockname()[1])
        code = one.wait(60)
    assert code == 2 and "another port" in one.output, f"ended with {code}: {one.output[-600:]}"
    is_sentence(one.output)
    return "exit 2 with the port named, before anybody connects"


@kind(times=2)
def too_few_ranks(bench: Bench, folder: Path, random: Random) -> str:
    rank = random.randrange(2)
    flags = ("--distributed.initialization-timeout-s", "8")
    one = bench.trainer.start(folder, *flags, rank=rank, ranks=2, port=free_port())
    code = one.wait(90)
    assert code in (1, 2), f"ended with {code}: {one.output[-600:]}"
    assert "did not find its 1 peers" in one.output.replace("\n ", ""), one.output[-600:]
    return f"rank {rank} alone: exit {code} with a sentence"


DIFFERENT = {
    "seed": ("--seed", "5"),
    "optimizer.learning_rate": ("--optimizer.learning-rate", "0.003"),
    "steps": ("--steps", "77"),
    "data": ("--data", "demo"),
    "recipe": ("--recipe", "bf16"),
    "run_dir": ("--run-dir", "elsewhere"),
}


@kind(times=6)
def ranks_that_differ(bench: Bench, folder: Path, random: Random) -> str:
    name = random.choice(sorted(DIFFERENT))
    others = DIFFERENT[name] if name != "run_dir" else ("--run-dir", str(folder) + "-other")
    ranks = bench.trainer.start_all(folder, ranks=2, others=others)
    codes = [one.wait(120) for one in ranks]
    assert codes == [2, 2], f"ended with {codes}: {ranks[0].output[-600:]}"
    for one in ranks:
        is_sentence(one.output)
        assert f"rank 1 has {name}" in one.output, one.output[-400:]
    assert not folder.exists(), "something was written"
    return f"another {name}: both exit 2, rank and field named, nothing written"


# The disk


def finished_copy(bench: Bench, folder: Path) -> int:
    """A copy of the undisturbed run without its last checkpoint's successors; its newest step."""
    shutil.copytree(bench.whole, folder)
    return saved_state(folder)[0]


@kind(times=4)
def disk_full_for_a_while(bench: Bench, folder: Path, random: Random) -> str:
    with small_disk(folder, megabytes=64) as disk:
        one = bench.trainer.start(disk / "run")
        at_random_step(bench, disk / "run", [one], random)
        filler = fill(disk)
        wait_until(lambda: "WAS NOT WRITTEN" in one.output, [one], 30)
        filler.unlink()
        code = one.wait()
        said = "WAS NOT WRITTEN" in one.output or "dropped" in one.output
        assert code in (0, 1), f"ended with {code}: {one.output[-800:]}"
        assert "Traceback" not in one.output, one.output[-800:]
        if code or last_step(disk / "run") != bench.steps:
            code, output = bench.trainer.finish(disk / "run")
            assert code == 0, f"resumed, ended with {code}: {output[-800:]}"
        assert saved_state(disk / "run") == saved_state(bench.whole), "the end state differs"
        assert not list((disk / "run" / "checkpoints").glob("*tmp*")), "temporary directories are left"
    return f"{'said and survived' if said else 'not noticed by a save'}; end state bit-identical"


@kind(times=2)
def disk_full_to_the_end(bench: Bench, folder: Path, random: Random) -> str:
    with small_disk(folder, megabytes=64) as disk:
        one = bench.trainer.start(disk / "run")
        wait_until(lambda: any((disk / "run" / "checkpoints").glob("[0-9]*")), [one])
        at_random_step(bench, disk / "run", [one], random)
        filler = fill(disk)
        code = one.wait()
        assert code == 1 and "Traceback" not in one.output, f"ended with {code}: {one.output[-800:]}"
        filler.unlink()
        code, output = bench.trainer.finish(disk / "run")
        assert code == 0, f"resumed, ended with {code}: {output[-800:]}"
        assert saved_state(disk / "run") == saved_state(bench.whole), "the end state differs"
    return "exit 1 with a sentence, the last good checkpoint stayed; resumed, end state bit-identical"


@kind(times=2)
def out_of_inodes(bench: Bench, folder: Path, random: Random) -> str:
    with small_disk(folder, megabytes=64, inodes=400) as disk:
        one = bench.trainer.start(disk / "run")
        at_random_step(bench, disk / "run", [one], random)
        taken = take_inodes(disk)
        wait_until(lambda: "WAS NOT WRITTEN" in one.output, [one], 30)
        for path in taken:
            path.unlink()
        code = one.wait()
        assert code in (0, 1) and "Traceback" not in one.output, f"ended with {code}: {one.output[-800:]}"
        if code:
            code, output = bench.trainer.finish(disk / "run")
            assert code == 0, f"resumed, ended with {code}: {output[-800:]}"
        assert saved_state(disk / "run") == saved_state(bench.whole), "the end state differs"
    return "said and survived; end state bit-identical"


@kind(times=2)
def read_only_directory(bench: Bench, folder: Path, random: Random) -> str:
    with small_disk(folder, megabytes=64) as disk:
        shutil.copytree(bench.whole, disk / "run")
        os.system(f"mount -o remount,ro {folder}")
        code, output = bench.trainer.finish(disk / "run", "--steps", str(bench.steps + 10))
        assert code in (1, 2) and "Traceback" not in output, f"ended with {code}: {output[-800:]}"
        assert "read-only" in output.lower().replace("\n ", ""), output[-400:]
    return f"exit {code} with a sentence"


# Files


def damaged(bench: Bench, folder: Path, random: Random, act: Callable[[Path], None], files: list[Path]) -> str:
    """Damage one file of the newest checkpoint of a finished run, and resume it."""
    victim = random.choice(files)
    name = victim.relative_to(folder)
    act(victim)
    code, output = bench.trainer.finish(folder)
    assert code == 0, f"{name}: ended with {code}: {output[-800:]}"
    bench.same_end(folder)
    noticed = "DAMAGED CHECKPOINT" in output
    return f"{name.parts[-1]}: {'named, the one before used' if noticed else 'harmless'}; bit-identical"


def checkpoint_files(folder: Path, *, arrays: bool) -> list[Path]:
    newest = folder / "checkpoints" / str(saved_state(folder)[0])
    files = [path for path in sorted(newest.rglob("*")) if path.is_file() and path.stat().st_size]
    return [path for path in files if (path.parent.name == "d") == arrays]


@kind(times=8)
def flip_in_an_array(bench: Bench, folder: Path, random: Random) -> str:
    finished_copy(bench, folder)
    act = lambda path: flip(path, random.random(), random.randrange(8))  # noqa: E731
    return damaged(bench, folder, random, act, checkpoint_files(folder, arrays=True))


@kind(times=6)
def flip_in_metadata(bench: Bench, folder: Path, random: Random) -> str:
    finished_copy(bench, folder)
    act = lambda path: flip(path, random.random(), random.randrange(8))  # noqa: E731
    return damaged(bench, folder, random, act, checkpoint_files(folder, arrays=False))


@kind(times=4)
def truncated_file(bench: Bench, folder: Path, random: Random) -> str:
    finished_copy(bench, folder)
    files = checkpoint_files(folder, arrays=True) + checkpoint_files(folder, arrays=False)
    act = lambda path: os.truncate(path, int(path.stat().st_size * random.random()))  # noqa: E731
    return damaged(bench, folder, random, act, files)


@kind(times=4)
def deleted_file(bench: Bench, folder: Path, random: Random) -> str:
    finished_copy(bench, folder)
    files = checkpoint_files(folder, arrays=True) + checkpoint_files(folder, arrays=False)
    return damaged(bench, folder, random, lambda path: path.unlink(), files)


@kind(times=5)
def flip_in_the_config(bench: Bench, folder: Path, random: Random) -> str:
    finished_copy(bench, folder)
    victim = folder / random.choice(["config.json", "run.json"])
    flip(victim, random.random(), random.randrange(8))
    one = bench.trainer.start(folder)
    code = one.wait()
    assert code == 2, f"{victim.name}: ended with {code}: {one.output[-600:]}"
    is_sentence(one.output)
    return f"{victim.name}: exit 2, named"


@kind(times=3)
def foreign_checkpoint(bench: Bench, folder: Path, random: Random) -> str:
    newest = finished_copy(bench, folder)
    checkpoints = folder / "checkpoints"
    if random.random() < 0.5:
        (checkpoints / str(newest)).rename(checkpoints / str(newest + 1))
    else:
        older = min(int(path.name) for path in checkpoints.iterdir() if path.name.isdigit())
        shutil.rmtree(checkpoints / str(newest))
        shutil.copytree(checkpoints / str(older), checkpoints / str(newest))
    code, output = bench.trainer.finish(folder)
    assert code == 0 and "under the name of step" in output, f"ended with {code}: {output[-800:]}"
    bench.same_end(folder)
    return "a checkpoint under another name: refused by name, the one before used; bit-identical"


@kind(times=2)
def lost_checkpoints(bench: Bench, folder: Path, random: Random) -> str:
    finished_copy(bench, folder)
    rows = (folder / "metrics.jsonl").read_bytes()
    shutil.rmtree(folder / "checkpoints")
    code, output = bench.trainer.finish(folder)
    assert code == 2 and "is gone" in output, f"ended with {code}: {output[-800:]}"
    assert (folder / "metrics.jsonl").read_bytes() == rows, "the rows were lost"
    return "exit 2, the rows kept"


@kind(times=3)
def flip_in_a_shard(bench: Bench, folder: Path, random: Random) -> str:
    assert bench.data is not None
    shutil.copytree(bench.data, folder / "data")
    shards = sorted((folder / "data").glob("*.array_record"))
    victim = random.choice([*shards, folder / "data" / "manifest.json"])
    flip(victim, random.random(), random.randrange(8))
    one = bench.trainer.start(
        folder / "run", "--data", str(folder / "data"), "--model.vocab-size", "1024", "--seq", "0"
    )
    code = one.wait()
    assert code == 2, f"{victim.name}: ended with {code}: {one.output[-600:]}"
    is_sentence(one.output)
    return f"{victim.name}: exit 2, the file named"


@kind(times=2)
def two_runs_in_one_directory(bench: Bench, folder: Path, random: Random) -> str:
    one = bench.trainer.start(folder)
    at_random_step(bench, folder, [one], random)
    other = bench.trainer.start(folder)
    code = other.wait()
    assert code == 2 and "is held by another process" in other.output.replace("\n ", ""), other.output[-600:]
    assert one.wait() == 0, one.output[-600:]
    bench.same_end(folder)
    return "the second: exit 2; the first: bit-identical"


# Values


def read_items(folder: Path, step: int) -> tuple[Any, dict]:
    """(record, arrays by item and name) of one checkpoint."""
    from halfbyte.checkpoint import Checkpoints
    from halfbyte.cli.verify import abstract_of

    store = Checkpoints(folder / "checkpoints")
    record = store.record(step)
    items = store.restore(step, abstract_of(record)).items
    store.close()
    return record, items


def poison(folder: Path, value: float) -> int:
    """Write the newest checkpoint again with one value replaced, its checksum too, as a run that did not look would."""
    from orbax.checkpoint import v1 as ocp

    from halfbyte.checkpoint import Record, inspect

    step, leaves = saved_state(folder)
    record, items = read_items(folder, step)
    name = next(name for name in items["params"] if name.endswith("mlp/down"))
    items["params"][name] = items["params"][name].at[0, 1, 1].set(value)
    leaves["params"][name]["checksum"] = inspect({"x": items["params"][name]})["x"].checksum
    shutil.rmtree(folder / "checkpoints" / str(step))
    flat = {item: {name.replace("/", "."): leaf for name, leaf in tree.items()} for item, tree in items.items()}
    writer = ocp.training.Checkpointer(folder / "checkpoints")
    writer.save_checkpointables(step, flat, force=True, custom_metadata=Record(step, leaves, record.extra).to_json())
    writer.close()
    return step


@kind(times=3)
def poisoned_checkpoint(bench: Bench, folder: Path, random: Random) -> str:
    finished_copy(bench, folder)
    value = random.choice([float("nan"), float("inf"), float("-inf")])
    step = poison(folder, value)
    code, output = bench.trainer.finish(folder)
    assert code == 0 and "POISONED CHECKPOINT" in output, f"ended with {code}: {output[-800:]}"
    bench.same_end(folder)
    return f"{value} in the weights of step {step}: named, the one before used; bit-identical"


QUIET = ("--model.vocab-size", "4096", "--optimizer.weight-decay", "0")
"""A vocabulary so large that most rows of the embedding are never touched: their bytes can be found in memory."""


ONE_REFERENCE = threading.Lock()


def untouched_row(folder: Path) -> bytes:
    """A row of the embedding that two checkpoints hold alike, bit for bit."""
    import numpy as np

    steps = sorted(int(path.name) for path in (folder / "checkpoints").iterdir() if path.name.isdigit())
    tables = [np.asarray(read_items(folder, step)[1]["params"]["embed"]) for step in (steps[0], steps[-1])]
    alike = np.flatnonzero((tables[0] == tables[1]).all(axis=1))
    return tables[1][alike[-1]].tobytes()


def changed_weight(bench: Bench, folder: Path, random: Random, value: bytes | None) -> str:
    flags = (*QUIET, "--steps", "400")
    whole = folder.parent / "quiet-reference"
    with ONE_REFERENCE:
        if not whole.exists():
            code, output = bench.trainer.finish(whole, *flags)
            assert code == 0, output[-800:]
    one = bench.trainer.start(folder, *flags)
    ready = lambda: last_step(folder) > 4 * bench.every  # noqa: E731
    assert wait_until(ready, [one]), one.output[-800:]
    row = untouched_row(whole)
    offset = 4 * random.randrange(len(row) // 4)
    new = value or struct.pack("<I", struct.unpack_from("<I", row, offset)[0] ^ (1 << random.randrange(31)))
    copies = change_memory(one.process.pid, row, offset, new)
    code = one.wait()
    assert copies, "the weight was not found in memory"
    assert code == 0, f"ended with {code}: {one.output[-800:]}"
    noticed = "GOING BACK" in one.output
    assert losses(folder) == losses(whole) and saved_state(folder) == saved_state(whole), (
        f"the end differs from the undisturbed run ({copies} copies changed, noticed: {noticed})"
    )
    return f"{copies} copies changed: {'noticed, went back' if noticed else 'harmless'}; bit-identical"


@kind(times=3)
def flipped_bit_of_a_weight_in_memory(bench: Bench, folder: Path, random: Random) -> str:
    return changed_weight(bench, folder, random, None)


@kind(times=2)
def nan_or_infinity_in_a_weight_in_memory(bench: Bench, folder: Path, random: Random) -> str:
    return changed_weight(bench, folder, random, struct.pack("<f", random.choice([float("nan"), float("inf")])))


@kind(times=2)
def loss_spike(bench: Bench, folder: Path, random: Random) -> str:
    rate = random.choice(["3", "30"])
    flags = (
        "--optimizer.learning-rate",
        rate,
        "--guard.spike",
        "1.5",
        "--on-divergence",
        "bf16",
        "--optimizer.warmup",
        "40",
    )
    one = bench.trainer.start(folder, *flags)
    code = one.wait()
    output = one.output.replace("\n", " ")
    assert code in (0, 1), f"ended with {code}: {output[-600:]}"
    if code == 0 and "GOING BACK" not in output:
        return "no spike came"
    assert "GOING BACK" in output and "BF16" in output, output[-600:]
    kept = json.loads((folder / "manifest.json").read_text())["returns"]
    assert 1 <= len(kept) <= 3, kept
    return f"rate {rate}: {len(kept)} returns to a checkpoint in bf16, then exit {code}; kept in the manifest"
