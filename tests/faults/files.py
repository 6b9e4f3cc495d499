"""Files that were damaged, lost or put where they do not belong."""

import gzip
import json
import lzma
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random

import zstandard
from outside import flip
from reference import Bench, is_sentence, kind, refused
from states import checkpoint_steps


def finished_copy(bench: Bench, folder: Path) -> int:
    """A copy of the undisturbed run; its newest step."""
    shutil.copytree(bench.whole, folder)
    return checkpoint_steps(folder)[-1]


def damaged(bench: Bench, folder: Path, random: Random, act: Callable[[Path], None], files: list[Path]) -> str:
    """Damage one file of the newest checkpoint of a finished run, and resume it."""
    victim = random.choice(files)
    name = victim.relative_to(folder)
    act(victim)
    found, _ = bench.verify(folder)
    code, output = bench.trainer.finish(folder)
    assert code == 0, f"{name}: ended with {code}: {output[-800:]}"
    bench.same_end(folder)
    noticed = "DAMAGED CHECKPOINT" in output
    assert found == (3 if noticed else 0), f"{name}: verify ended with {found}, train noticed: {noticed}"
    said = "named by verify and train, the one before used" if noticed else "harmless to both"
    return f"{name.parts[-1]}: {said}; bit-identical"


def checkpoint_files(bench: Bench, folder: Path, *, arrays: bool | None = None) -> list[Path]:
    """Files of the newest checkpoint of a finished run, copied to `folder`: its arrays, all but them, or both."""
    finished_copy(bench, folder)
    newest = folder / "checkpoints" / str(checkpoint_steps(folder)[-1])
    files = [path for path in sorted(newest.rglob("*")) if path.is_file() and path.stat().st_size]
    return [path for path in files if arrays is None or (path.parent.name == "d") == arrays]


@kind(times=3)
def flip_in_an_array(bench: Bench, folder: Path, random: Random) -> str:
    act = partial(flip, at=random.random(), bit=random.randrange(8))
    return damaged(bench, folder, random, act, checkpoint_files(bench, folder, arrays=True))


@kind(times=3)
def flip_in_metadata(bench: Bench, folder: Path, random: Random) -> str:
    act = partial(flip, at=random.random(), bit=random.randrange(8))
    return damaged(bench, folder, random, act, checkpoint_files(bench, folder, arrays=False))


@kind(times=2)
def truncated_file(bench: Bench, folder: Path, random: Random) -> str:
    share = random.random()
    act = lambda path: os.truncate(path, int(path.stat().st_size * share))  # noqa: E731
    return damaged(bench, folder, random, act, checkpoint_files(bench, folder))


@kind(times=2)
def deleted_file(bench: Bench, folder: Path, random: Random) -> str:
    return damaged(bench, folder, random, Path.unlink, checkpoint_files(bench, folder))


@kind(times=3)
def flip_in_the_config(bench: Bench, folder: Path, random: Random) -> str:
    finished_copy(bench, folder)
    victim = folder / random.choice(["config.json", "run.json"])
    flip(victim, random.random(), random.randrange(8))
    one = bench.trainer.start(folder)
    code = one.wait()
    assert code == 2, f"{victim.name}: ended with {code}: {one.output[-600:]}"
    is_sentence(one.output)
    return f"{victim.name}: exit 2, named"


@kind(times=2)
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
    how = random.choice(["removed", "emptied"])
    if how == "emptied":
        (folder / "checkpoints").mkdir()
    one = bench.trainer.start(folder)
    refused(one, one.wait(), "checkpoints")
    assert (folder / "metrics.jsonl").read_bytes() == rows, "the rows were lost"
    return f"{how}: exit 2, the rows kept"


@kind(times=2)
def flip_in_a_shard(bench: Bench, folder: Path, random: Random) -> str:
    assert bench.data is not None
    shutil.copytree(bench.data, folder / "data")
    shards = sorted((folder / "data").glob("*.array_record"))
    victim = random.choice([*shards, folder / "data" / "manifest.json"])
    flip(victim, random.random(), random.randrange(8))
    one = bench.trainer.start(folder / "run", "--data", str(folder / "data"))
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


@kind(times=4)
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
