"""Values that are not numbers, or other numbers: in a checkpoint, in memory, in the data, in a step."""

import dataclasses
import fcntl
import json
import os
import re
import shutil
import signal
import struct
import termios
import threading
import time
from pathlib import Path
from random import Random
from typing import Any

from files import finished_copy
from outside import Started, change_memory, last_step, stop, wait_until
from reference import Bench, is_sentence, kind
from states import arrays, checkpoint_steps, losses, saved_state


def read_items(folder: Path, step: int) -> tuple[Any, dict]:
    """(record, arrays by item and name) of one checkpoint."""
    from halfbyte.checkpoint import CheckpointManager
    from halfbyte.cli.verify import abstract_of

    store = CheckpointManager(folder / "checkpoints")
    record = store.record(step)
    items = store.restore(step, abstract_of(record)).items
    store.close()
    return record, items


ONE_WRITER = threading.Lock()  # Orbax shares its signals within a process, and faults run beside each other


def poison(folder: Path, value: float) -> int:
    """Write the newest checkpoint again with one value replaced, its checksum too, as a run that did not look would."""
    from orbax.checkpoint import v1 as ocp

    from halfbyte.checkpoint import CheckpointRecord, checksum_tree

    step = checkpoint_steps(folder)[-1]
    record, items = read_items(folder, step)
    leaves = json.loads(json.dumps(record.leaves))
    name = next(name for name in items["params"] if name.endswith("mlp/down"))
    items["params"][name] = items["params"][name].at[0, 1, 1].set(value)
    leaves["params"][name]["checksum"] = checksum_tree({"x": items["params"][name]})["x"].checksum
    shutil.rmtree(folder / "checkpoints" / str(step))
    flat = {item: {name.replace("/", "."): leaf for name, leaf in tree.items()} for item, tree in items.items()}
    with ONE_WRITER:
        writer = ocp.training.Checkpointer(folder / "checkpoints")
        record = CheckpointRecord(step, leaves, record.extra)
        writer.save_checkpointables(step, flat, force=True, custom_metadata=record.to_json())
        writer.close()
    return step


@kind(times=2)
def poisoned_checkpoint(bench: Bench, folder: Path, random: Random) -> str:
    finished_copy(bench, folder)
    value = random.choice([float("nan"), float("inf"), float("-inf"), 1e30, 3e38])  # the last two have no square
    step = poison(folder, value)
    found, one = bench.verify(folder)
    assert found == 3 and "not finite" in one.said, f"verify ended with {found}: {one.said[-600:]}"
    code, output = bench.trainer.finish(folder)
    assert code == 0 and "POISONED CHECKPOINT" in output, f"ended with {code}: {output[-800:]}"
    bench.same_end(folder)
    return f"{value} in the weights of step {step}: named by verify and train, the one before used; bit-identical"


def with_bad_tokens(bench: Bench, folder: Path, random: Random) -> Path:
    """A data set with tokens outside its vocabulary, its checksums those of what it holds."""
    from halfbyte.data.dataset import open_dataset
    from halfbyte.data.shard_files import ShardWriter

    shutil.copytree(bench.data, folder)
    found = open_dataset(folder)
    manifest = found.manifest
    shard = next(shard for shard in manifest.shards if shard.split == "train")
    rows = found.rows("train", shard.source).read_all().copy()
    rows["tokens"][random.randrange(4) :: 4, 3] = manifest.vocab_size + random.randrange(100)
    writer = ShardWriter(
        folder, "train", shard.source, int(shard.file.split("-")[1]), dtype=rows.dtype, shard_bytes=1 << 30
    )
    writer.write(rows)
    writer.close()
    lying = dataclasses.replace(writer.shards[0], max_token=shard.max_token)
    shards = tuple(lying if known.file == shard.file else known for known in manifest.shards)
    (folder / "manifest.json").write_text(dataclasses.replace(manifest, shards=shards).to_json())
    return folder


@kind(times=1)
def tokens_outside_the_vocabulary_in_the_batch(bench: Bench, folder: Path, random: Random) -> str:
    """A batch holds whole numbers, so this is its NaN: a row that no embedding has."""
    data = with_bad_tokens(bench, folder / "data", random)
    one = bench.trainer.start(folder / "run", "--data", str(data))
    code = one.wait()
    said = " ".join(one.output.split())
    assert code == 2 and "outside the vocabulary" in said, f"ended with {code}: {said[-600:]}"
    is_sentence(one.output)
    return f"exit 2, file and row named, after step {last_step(folder / 'run')}"


# Weights in memory

QUIET = ("--optimizer.weight-decay", "0")
ONE_REFERENCE = threading.Lock()
WATCHED: dict[Path, tuple[Path, list[Any]]] = {}


def watched_reference(bench: Bench, folder: Path) -> tuple[Path, list[Any]]:
    """(an undisturbed run without weight decay, its arrays after each step), which the first that asks makes."""
    root = folder.parent
    with bench.places.idle():
        ONE_REFERENCE.acquire()
    try:
        if root not in WATCHED:
            whole = root / "quiet-reference"
            flags = ("--checkpoint.every", "1", "--checkpoint.keep-every", "1")
            code, output = bench.trainer.finish(whole, *QUIET, *flags)
            assert code == 0, output[-800:]
            WATCHED[root] = whole, [arrays(whole / "checkpoints" / str(n + 1)) for n in range(bench.steps)]
        return WATCHED[root]
    finally:
        ONE_REFERENCE.release()


def half(row: Any) -> bytes:
    """What of a row lies in one piece in memory, also where two devices hold half of each row."""
    return row[: len(row) // 2].tobytes()


def flipped(row: bytes, offset: int, random: Random) -> bytes:
    """One of its numbers with one bit changed: any but the sign of a number."""
    return struct.pack("<I", struct.unpack_from("<I", row, offset)[0] ^ (1 << random.randrange(31)))


def stopped_between_saves(bench: Bench, folder: Path) -> Started:
    """A run that was stopped at any place of a step, with a checkpoint and no save under way. All that looks like the
    weight is changed, the copy that a save is made from too: two faults at once, and one spoils the only checkpoint."""

    def between() -> bool:
        return checkpoint_steps(folder) == [bench.steps // 2] and last_step(folder) < bench.steps - 5

    def caught() -> bool:
        if between():
            stop(one.process)
            if between():
                return True
            one.process.send_signal(signal.SIGCONT)
        return False

    for _ in range(5):  # on a busy machine the whole half may be gone before we look
        one = bench.trainer.start(folder, *QUIET, "--checkpoint.every", str(bench.steps // 2))
        if wait_until(caught, [one]):
            return one
        assert one.wait() == 0, f"ended before: {one.output[-800:]}"
        shutil.rmtree(folder)
    raise AssertionError("it was never caught between two saves")


def ended_as(whole: Path, folder: Path, what: str) -> None:
    assert losses(folder) == losses(whole) and saved_state(folder) == saved_state(whole), f"the end differs ({what})"


def changed_weight(bench: Bench, folder: Path, random: Random, value: bytes | None) -> str:
    """In a row of the embedding that no step has touched, while steps run: its bytes stay where they are."""
    whole, states = watched_reference(bench, folder)
    first, last = states[0]["params/embed"], states[-1]["params/embed"]
    row = half(last[(first == last).all(axis=1).nonzero()[0][-1]])
    one = stopped_between_saves(bench, folder)
    offset = 4 * random.randrange(len(row) // 4)
    copies = change_memory(one.process.pid, row, offset, value or flipped(row, offset, random))
    code = one.wait()
    assert copies, "the weight was not found in memory"
    assert code == 0, f"ended with {code}: {one.output[-800:]}"
    noticed = "GOING BACK" in one.output
    ended_as(whole, folder, f"{copies} copies changed, noticed: {noticed}")
    return f"{copies} copies changed: {'noticed, went back' if noticed else 'harmless'}; bit-identical"


@kind(times=2)
def flipped_bit_of_a_weight_in_memory(bench: Bench, folder: Path, random: Random) -> str:
    return changed_weight(bench, folder, random, None)


@kind(times=1)
def nan_or_infinity_in_a_weight_in_memory(bench: Bench, folder: Path, random: Random) -> str:
    return changed_weight(bench, folder, random, struct.pack("<f", random.choice([float("nan"), float("inf")])))


@kind(times=2)
def flipped_bit_where_every_step_looks(bench: Bench, folder: Path, random: Random) -> str:
    """In a weight that every step multiplies with and changes, between two steps: nobody reads the run's output, so it
    stands still with its weights in memory, and these are known from the undisturbed run."""
    whole, states = watched_reference(bench, folder)
    with Held(bench, folder, random.randint(5, 20), *QUIET) as held:
        reached = last_step(folder)
        row, offset, copies = random.randrange(64), 4 * random.randrange(16), 0
        for step in range(min(reached + 3, bench.steps - 1), reached - 2, -1):  # steps are ahead of what is written
            pattern = half(states[step - 1]["params/layers.mlp.down"][random.randrange(2), row])
            copies = change_memory(held.one.process.pid, pattern, offset, flipped(pattern, offset, random))
            if copies:
                break
        assert copies, f"the weight was not found in memory after step {reached}"
        code, output = held.finish()
    assert code == 0, f"ended with {code}: {output[-800:]}"
    assert "GOING BACK" in output, f"{copies} copies changed after step {step}, and nobody noticed"
    ended_as(whole, folder, f"{copies} copies changed")
    return f"{copies} copies changed between steps {step} and {step + 1}: noticed, went back; bit-identical"


class Held:
    """A run whose output nobody reads after a step: it stands still once the pipe is full."""

    def __init__(self, bench: Bench, folder: Path, step: int, *flags: str):
        self.reading, writing = os.pipe()
        fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
        self.one = bench.trainer.start(folder, *flags, "--log.every", "1", stdout=writing)
        os.close(writing)
        self.text = b""
        while not re.search(rb"step +%d/" % step, self.text):
            more = os.read(self.reading, 256)
            assert more, f"ended before step {step}: {self.text[-800:]!r}"
            self.text += more

    def __enter__(self) -> "Held":
        still, before = 0, -1
        while still < 10:
            time.sleep(0.2)
            waiting = struct.unpack("i", fcntl.ioctl(self.reading, termios.FIONREAD, b"\0" * 4))[0]
            still = still + 1 if waiting == before and waiting > 3000 else 0
            before = waiting
            assert self.one.process.poll() is None, "ended before its output stood still"
        return self

    def finish(self) -> tuple[int, str]:
        """Read on to the end: (exit code, output)."""
        while more := os.read(self.reading, 65536):
            self.text += more
        return self.one.wait(), self.text.decode(errors="replace")

    def __exit__(self, *_: object) -> None:
        os.close(self.reading)
        self.one.process.kill()


@kind(times=1, run="hard")
def loss_spike(bench: Bench, folder: Path, random: Random) -> str:
    """A learning rate that grows to 30: what comes of it on a CPU is the same each time, so a spike must come."""
    flags = ("--steps", "36", "--optimizer.learning-rate", "30", "--optimizer.warmup", "24")
    guard = ("--guard.spike-threshold", "1.5", "--on-divergence", "bf16")
    one = bench.trainer.start(folder, *flags, *guard)
    code = one.wait()
    assert "LOSS SPIKE" in one.said, f"no spike came, exit {code}: {one.said[-600:]}"
    assert code in (0, 1) and "GOING BACK" in one.said and "BF16" in one.said, f"ended with {code}: {one.said[-600:]}"
    kept = json.loads((folder / "manifest.json").read_text())["returns"]
    assert 1 <= len(kept) <= 3 and "LOSS SPIKE" in kept[0]["reason"], kept
    return f"{len(kept)} returns to a checkpoint in bf16, then exit {code}; kept in the manifest"
