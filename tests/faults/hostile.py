"""Directories that somebody else made: nothing in them is executed, nothing is waited for, nothing leads out of them,
and what is refused is refused with a sentence, in little memory and time.
"""

import json
import os
import pty
import shutil
import struct
import threading
import zlib
from pathlib import Path
from random import Random

from files import finished_copy
from outside import HUNG, Started, peak_memory, wait_until
from reference import Bench, is_sentence, kind, refused
from states import checkpoint_steps, contents, digest

LIMIT_S = 120.0
MOST_MEMORY = 3 << 30
GENERATE = ("--prompt", "aaaa", "--max-tokens", "2")


def tried(bench: Bench, folder: Path, *words: str, **options) -> tuple[int, Started]:
    """A command that must come to its end by itself, soon, in bounded memory and without a traceback."""
    one = bench.trainer.command(folder.name, *words, **options)
    too_much = wait_until(lambda: peak_memory(one.process) > MOST_MEMORY, [one], LIMIT_S)
    code = one.wait(0.0 if too_much else 10.0)
    assert not too_much, f"{words[0]} took more than {MOST_MEMORY >> 20} MiB: {one.said[-300:]}"
    assert code != HUNG, f"{words[0]} hung: {one.said[-400:]}"
    is_sentence(one.output)
    return code, one


def reading(run: Path, out: Path) -> dict[str, tuple[str, ...]]:
    """Commands that read a run directory and are told nothing but its name."""
    return {
        "verify": ("verify", str(run)),
        "generate": ("generate", str(run), *GENERATE),
        "eval": ("eval", str(run), "--limit", "1"),
        "inspect": ("inspect", str(run), "--batches", "1", "--out", str(out / "inspected")),
        "export": ("export", str(run), "--out", str(out / "exported")),
        "compare": ("compare", str(run), str(run)),
        "train": ("train", "--run-dir", str(run), "--distributed.cpu-devices", "2"),
    }


def seal_again(run: Path, name: str) -> None:
    """What somebody does who changes a file of a run directory and does not want it to be noticed."""
    stored = json.loads((run / "run.json").read_text())
    values = json.loads(stored["run"])
    values["files"][name] = digest((run / name).read_bytes())
    text = json.dumps(values, sort_keys=True)
    (run / "run.json").write_text(json.dumps({"run": text, "crc32": zlib.crc32(text.encode())}) + "\n")


# Pipes in place of files


@kind(times=1)
def pipe_in_place_of_a_file(bench: Bench, folder: Path, random: Random) -> str:
    """Whoever opens one waits for a writer that never comes."""
    finished_copy(bench, folder)
    newest = folder / "checkpoints" / str(checkpoint_steps(folder)[-1])
    train, generate = ("train", "--run-dir", str(folder), "--distributed.cpu-devices", "2"), ("generate", str(folder))
    array = random.choice([path for path in sorted(newest.rglob("*")) if path.is_file()])
    places = [(folder / "metrics.jsonl", train), (folder / ".lock", train), (folder / "config.json", train)]
    places += [(folder / "tokenizer.json", generate), (array, ("verify", str(folder)))]
    for path, words in places:
        kept = path.read_bytes()
        path.unlink()
        os.mkfifo(path)
        found, one = tried(bench, folder, *words)
        refused(one, found, path.name)
        path.unlink()
        path.write_bytes(kept)
    return f"{', '.join(path.name for path, _ in places)}: refused by name, nothing waits"


# What a directory would like to be run


OWN = """import dataclasses
from halfbyte.recipes import recipe
open({marker!r}, "a").write("run")
mine = dataclasses.replace(recipe("bf16"), description="own")
"""


@kind(times=1)
def recipe_file_of_a_run_directory(bench: Bench, folder: Path, random: Random) -> str:
    """Inside the directory or beside it: a program that nobody named on this command line."""
    folder.mkdir()
    marker, own, run = folder / "marker", folder / "own.py", folder / "run"
    own.write_text(OWN.format(marker=str(marker)))
    one = bench.trainer.start(run, "--recipe", f"{own}:mine")
    assert one.wait() == 0 and marker.exists(), f"the run that names it: {one.said[-600:]}"
    marker.unlink()
    codes = {}
    for name, words in reading(run, folder).items():
        codes[name], one = tried(bench, folder, *words)
        assert not marker.exists(), f"{name} executed a program that the run directory names"
        if name not in ("verify", "compare", "export"):  # they need no recipe
            refused(one, codes[name], "own.py")
    return f"nothing executed: {codes}"


@kind(times=1)
def compile_cache_of_a_run_directory(bench: Bench, folder: Path, random: Random) -> str:
    """Machine code lies in it, under the very keys that the rest of the run will ask for, and its config names it."""
    folder.mkdir()
    run, log = folder / "run", folder / "opened"
    newest = finished_copy(bench, run)
    shutil.rmtree(run / "checkpoints" / str(newest))
    cache = shutil.copytree(bench.trainer.cache, run / "cache")
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps({**config, "compile_cache": str(cache)}))
    seal_again(run, "config.json")
    codes = {}
    for name in ("train", "eval", "generate"):
        codes[name], one = tried(bench, folder, *reading(run, folder)[name], under=cache, log=log)
        opened = [line for line in log.read_text().splitlines() if "open" in line.split()[1]]
        assert not opened, f"{name} opened {len(opened)} compiled programs of the run directory: {opened[0]}"
        assert codes[name] in (0, 2), f"{name} ended with {codes[name]}: {one.said[-400:]}"
    return f"none of its programs was opened: {codes}"


# What leads out of it, and what reaches the terminal


@kind(times=1)
def links_in_a_run_directory(bench: Bench, folder: Path, random: Random) -> str:
    """Where a run would write, a link to somebody's file."""
    finished_copy(bench, folder)
    outside = folder.with_name(f"{folder.name}-outside")
    outside.mkdir()
    (outside / "precious").write_text("precious")
    before = contents(outside)
    train = reading(folder, outside)["train"]
    for name in ("metrics.jsonl", "run.json", ".lock", "config.json", "evaluations.jsonl"):
        path = folder / name
        kept = path.read_bytes() if path.exists() else None
        path.unlink(missing_ok=True)
        path.symlink_to(outside / "precious")
        code, one = tried(bench, folder, *train)
        refused(one, code, name)
        assert contents(outside) == before, f"{name}: what the link leads to was changed"
        path.unlink()
        if kept is not None:
            path.write_bytes(kept)
    return "exit 2 and named, what they lead to is untouched"


ESCAPE = "\x1b]0;owned\x07"


@kind(times=1)
def escape_sequences_in_names(bench: Bench, folder: Path, random: Random) -> str:
    """On a terminal a name is a name: it does not change the window's title."""
    folder.mkdir()
    run = folder / f"run{ESCAPE}"
    finished_copy(bench, run)
    for name, words in reading(run, folder).items():
        if name in ("inspect", "export"):
            continue
        shown = on_a_terminal(bench, folder, *words)
        assert ESCAPE.encode() not in shown, f"{name} sends it to the terminal: {shown[:400]!r}"
        assert b"Traceback" not in shown, f"{name}: {shown[-400:]!r}"
    written = [path for path in run.rglob("report*") if ESCAPE.encode() in path.read_bytes()]
    assert not written, f"it is in {written}"
    return "spelled out by every command, and in the report"


def on_a_terminal(bench: Bench, folder: Path, *words: str) -> bytes:
    """What a command shows on one."""
    ours, theirs = pty.openpty()
    shown: list[bytes] = []

    def read() -> None:
        try:
            while more := os.read(ours, 65536):
                shown.append(more)
        except OSError:  # the last writer has closed it
            return

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    one = bench.trainer.command(folder.name, *words, stdout=theirs)
    os.close(theirs)
    code = one.wait(LIMIT_S)
    reader.join(30)
    os.close(ours)
    assert code != HUNG, f"{words[0]} hung"
    return b"".join(shown)


# What would eat the machine


def folder_of_weights(bench: Bench, folder: Path) -> Path:
    """The undisturbed run's model as a Hugging Face folder."""
    code, one = bench.trainer.run(folder.name, "export", str(bench.whole), "--out", str(folder))
    assert code == 0, one.said[-600:]
    return folder


@kind(times=1)
def tokenizer_that_explodes(bench: Bench, folder: Path, random: Random) -> str:
    """Each of its replacements makes ten letters of one."""
    folder.mkdir()
    hf = folder_of_weights(bench, folder / "hf")
    bomb = json.loads((hf / "tokenizer.json").read_text())
    steps = [{"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10}] * 12
    bomb["normalizer"] = {"type": "Sequence", "normalizers": steps}
    (hf / "tokenizer.json").write_text(json.dumps(bomb))
    text = folder / "text.txt"
    text.write_text("aaaa\n" * 100)
    prepare = ("data", "prepare", str(text), "--tokenizer", str(hf / "tokenizer.json"), "--out", str(folder / "set"))
    run = folder / "run"
    finished_copy(bench, run)
    shutil.copy(hf / "tokenizer.json", run)
    seal_again(run, "tokenizer.json")
    for words in (("generate", str(hf), *GENERATE), prepare, ("generate", str(run), *GENERATE)):
        code, one = tried(bench, folder, *words)
        refused(one, code)
    return "exit 2 with a sentence, in bounded memory: as a folder, for a data set, in a run"


@kind(times=1)
def giant_headers(bench: Bench, folder: Path, random: Random) -> str:
    """Lengths that are lies, and a million tensors of nothing."""
    folder.mkdir()
    hf = folder_of_weights(bench, folder / "hf")
    weights = next(hf.glob("*.safetensors"))
    whole = weights.read_bytes()
    empty = json.dumps({f"t{n}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for n in range(1_500_000)})
    lies = {
        "a length of 2^62": struct.pack("<Q", 1 << 62) + whole[8:],
        "a length beyond the file": struct.pack("<Q", len(whole) * 2) + whole[8:],
        "1.5 million empty tensors": struct.pack("<Q", len(empty)) + empty.encode(),
    }
    for content in lies.values():
        weights.write_bytes(content)
        code, one = tried(bench, folder, "import", str(hf), "--out", str(folder / "imported"))
        refused(one, code)
        assert not (folder / "imported").exists(), "something was made of it"
    run = folder / "run"
    newest = finished_copy(bench, run)
    with open(run / "checkpoints" / str(newest) / "_CHECKPOINT_METADATA", "r+b") as file:
        file.truncate(8 << 30)  # a hole: it takes no disk
    code, one = tried(bench, folder, "verify", str(run))
    refused(one, code, expect=3)
    code, one = tried(bench, folder, "generate", str(run), *GENERATE)
    assert code in (0, 2), f"ended with {code}: {one.said[-400:]}"  # 0: with the checkpoint before it, and said
    return f"{', '.join(lies)}: exit 2; 8 GiB of metadata: verify exits with 3"
