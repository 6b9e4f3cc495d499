"""Values that are not numbers, or other numbers: in a checkpoint, in memory, in the data, in a step."""

import dataclasses
import json
import shutil
import signal
import struct
import threading
from pathlib import Path
from random import Random
from typing import Any

from outside import change_memory, last_step, losses, saved_state, wait_until
from reference import Bench, at_random_step, is_sentence, kind
from storage import finished_copy


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


STRICT = ("--loss-scale.mode", "off", "--guard.skips", "2")


@kind(times=3)
def gradient_that_is_not_finite(bench: Bench, folder: Path, random: Random) -> str:
    """A weight so large that the gradient through it is not finite, or its norm is not; the weight itself is."""
    one = bench.trainer.start(folder, *STRICT)
    at_random_step(bench, folder, [one], random)
    one.process.send_signal(signal.SIGTERM)
    assert one.wait() == 75, one.output[-600:]
    step = poison(folder, random.choice([1e30, 3e38]))
    before = saved_state(folder)
    code, output = bench.trainer.finish(folder, *STRICT)
    assert code == 1, f"ended with {code}: {output[-800:]}"
    is_sentence(output)
    said = " ".join(output.split())
    named = said.partition("the first that is not finite is ")[2].partition(";")[0]
    assert "gradient" in named or "forward pass" in named, said[-800:]
    after = saved_state(folder)  # a skipped step may be saved: it counts, and its weights are those before it
    same = {item: after[1][item] == before[1][item] for item in ("params", "optimizer")}
    assert all(same.values()), f"a step with such a gradient was kept: {before[0]} to {after[0]}, {same}"
    return f"after step {step}: {named}; exit 1"


def with_bad_tokens(bench: Bench, folder: Path, random: Random) -> Path:
    """A data set with tokens outside its vocabulary, its checksums those of what it holds."""
    from halfbyte.data.dataset import open_dataset
    from halfbyte.data.shards import ShardWriter

    assert bench.data is not None
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


@kind(times=2)
def tokens_outside_the_vocabulary_in_the_batch(bench: Bench, folder: Path, random: Random) -> str:
    """A batch holds whole numbers, so this is its NaN: a row that no embedding has."""
    data = with_bad_tokens(bench, folder / "data", random)
    flags = ("--data", str(data), "--model.vocab-size", "1024", "--seq", "0")
    one = bench.trainer.start(folder / "run", *flags)
    code = one.wait()
    said = " ".join(one.output.split())
    assert code == 2 and "outside the vocabulary" in said, f"ended with {code}: {said[-600:]}"
    is_sentence(one.output)
    return f"exit 2, file and row named, after step {last_step(folder / 'run')}"


LARGE = ("--model.vocab-size", "8192", "--steps", "60")
QUIET = (*LARGE, "--optimizer.weight-decay", "0", "--checkpoint.keep-every", "30")
"""A vocabulary so large that many rows of the embedding are never touched: their bytes can be found in memory."""


ONE_REFERENCE = threading.Lock()
ROWS: dict[Path, bytes] = {}


def untouched_row(folder: Path) -> bytes:
    """Half a row of the embedding that no step has changed: what lies in one piece in memory, also where two devices
    hold half of each row."""
    import numpy as np

    steps = sorted(int(path.name) for path in (folder / "checkpoints").iterdir() if path.name.isdigit())
    tables = [np.asarray(read_items(folder, step)[1]["params"]["embed"]) for step in (steps[0], steps[-1])]
    alike = np.flatnonzero((tables[0] == tables[1]).all(axis=1))
    row = tables[1][alike[-1]]
    return row[: len(row) // 2].tobytes()


def quiet_row(bench: Bench, whole: Path) -> bytes:
    """An untouched row of the undisturbed run in `whole`, which the first that asks makes."""
    with bench.places.idle():
        ONE_REFERENCE.acquire()
    try:
        if whole not in ROWS:
            code, output = bench.trainer.finish(whole, *QUIET)
            assert code == 0, output[-800:]
            ROWS[whole] = untouched_row(whole)
        return ROWS[whole]
    finally:
        ONE_REFERENCE.release()


def changed_weight(bench: Bench, folder: Path, random: Random, value: bytes | None) -> str:
    whole = folder.parent / "quiet-reference"
    row = quiet_row(bench, whole)
    one = bench.trainer.start(folder, *QUIET)
    assert wait_until(lambda: last_step(folder) > 24, [one]), one.output[-800:]
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
        "24",
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
