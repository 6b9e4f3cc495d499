"""Disks that fill up or cannot be written, and files that were damaged, lost or put where they do not belong."""

import gzip
import json
import lzma
import os
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random

import zstandard
from outside import (
    fill,
    flip,
    last_step,
    saved_state,
    small_disk,
    take_inodes,
    wait_until,
)
from reference import Bench, at_random_step, is_sentence, kind

# The disk


def finished_copy(bench: Bench, folder: Path) -> int:
    """A copy of the undisturbed run without its last checkpoint's successors; its newest step."""
    shutil.copytree(bench.whole, folder)
    return saved_state(folder)[0]


def ends_the_same(bench: Bench, folder: Path, *, again: bool) -> None:
    """The end state is that of the undisturbed run, after starting `again` where it had to stop. Rows of metrics that a
    full disk refused are gone, so losses are not compared."""
    if again:
        code, output = bench.trainer.finish(folder)
        assert code == 0, f"resumed, ended with {code}: {output[-800:]}"
    assert saved_state(folder) == saved_state(bench.whole), "the end state differs"


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
        ends_the_same(bench, disk / "run", again=bool(code) or last_step(disk / "run") != bench.steps)
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
        ends_the_same(bench, disk / "run", again=True)
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
        ends_the_same(bench, disk / "run", again=bool(code))
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


def checkpoint_files(bench: Bench, folder: Path, *, arrays: bool | None = None) -> list[Path]:
    """Files of the newest checkpoint of a finished run, copied to `folder`: its arrays, all but them, or both."""
    finished_copy(bench, folder)
    newest = folder / "checkpoints" / str(saved_state(folder)[0])
    files = [path for path in sorted(newest.rglob("*")) if path.is_file() and path.stat().st_size]
    return [path for path in files if arrays is None or (path.parent.name == "d") == arrays]


@kind(times=8)
def flip_in_an_array(bench: Bench, folder: Path, random: Random) -> str:
    act = partial(flip, at=random.random(), bit=random.randrange(8))
    return damaged(bench, folder, random, act, checkpoint_files(bench, folder, arrays=True))


@kind(times=6)
def flip_in_metadata(bench: Bench, folder: Path, random: Random) -> str:
    act = partial(flip, at=random.random(), bit=random.randrange(8))
    return damaged(bench, folder, random, act, checkpoint_files(bench, folder, arrays=False))


@kind(times=4)
def truncated_file(bench: Bench, folder: Path, random: Random) -> str:
    share = random.random()
    act = lambda path: os.truncate(path, int(path.stat().st_size * share))  # noqa: E731
    return damaged(bench, folder, random, act, checkpoint_files(bench, folder))


@kind(times=4)
def deleted_file(bench: Bench, folder: Path, random: Random) -> str:
    return damaged(bench, folder, random, Path.unlink, checkpoint_files(bench, folder))


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


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.ZstdCompressor(write_checksum=True).compress,
}


def prepared(bench: Bench, text: Path, out: Path) -> tuple[int, str, list]:
    """`halfbyte data prepare` of one file: exit code, output, and the shards with their hashes."""
    words = ("data", "prepare", str(text), "--tokenizer", "bytes", "--seq-len", "64", "--out", str(out))
    one = bench.trainer.command(f"{text.parent.name}-prepare", *words)
    code = one.wait()
    shards = json.loads((out / "manifest.json").read_text())["shards"] if code == 0 else []
    return code, one.output, shards


@kind(times=6)
def flip_in_compressed_text(bench: Bench, folder: Path, random: Random) -> str:
    folder.mkdir()
    suffix = random.choice(sorted(PACKERS))
    lines = [json.dumps({"text": f"{n} " + "".join(random.choices("etaoin ", k=200))}) for n in range(200)]
    text = folder / f"text.jsonl{suffix}"
    text.write_bytes(PACKERS[suffix]("\n".join(lines).encode()))
    code, output, whole = prepared(bench, text, folder / "whole")
    assert code == 0, output[-600:]
    flip(text, random.random(), random.randrange(8))
    code, output, shards = prepared(bench, text, folder / "flipped")
    if code == 0:
        assert shards == whole, f"{suffix}: other text was prepared without a word"
        return f"{suffix}: harmless, the same shards"
    assert code == 2 and text.name in output.replace("\n", ""), f"{suffix}: ended with {code}: {output[-600:]}"
    is_sentence(output)
    assert not (folder / "flipped").exists(), "something was left"
    return f"{suffix}: exit 2, the file named, nothing prepared"


@kind(times=2)
def two_runs_in_one_directory(bench: Bench, folder: Path, random: Random) -> str:
    one = bench.trainer.start(folder)
    at_random_step(bench, folder, [one], random)
    one.process.send_signal(signal.SIGSTOP)  # or it may be done before the other is awake
    other = bench.trainer.start(folder)
    code = other.wait()
    one.process.send_signal(signal.SIGCONT)
    assert code == 2 and "is held by another process" in other.output.replace("\n ", ""), other.output[-600:]
    assert one.wait() == 0, one.output[-600:]
    bench.same_end(folder)
    return "the second: exit 2; the first: bit-identical"
