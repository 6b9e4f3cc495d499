"""`data prepare`, `import` and `export`, killed before any one of the operations with which they make what they make.

Whatever the moment: at the place there is what was there before, whole, or the new one, whole. What was half made is
hidden beside it, and the next command of the same name says so and removes it.
"""

import json
import shutil
import signal
import zlib
from collections.abc import Callable
from pathlib import Path
from random import Random

from outside import Started
from reference import Bench, is_sentence, kind
from states import contents

KILLS = 3  # of one fault: each costs two short commands
Make = Callable[..., Started]
"""A command that makes the directory; what it is given watches or kills it."""


def hidden(place: Path) -> list[str]:
    """What lies hidden beside `place` under its name."""
    return sorted(path.name for path in place.parent.glob(f".{place.name}.*"))


def made(place: Path) -> dict[str, str]:
    """What a directory holds, but for the name in run.json that each import draws anew; the CRC beside it must fit."""
    found = contents(place)
    if "run.json" in found:
        stored = json.loads((place / "run.json").read_text())
        assert zlib.crc32(stored["run"].encode()) == stored["crc32"], f"{place}/run.json does not match its own CRC"
        found["run.json"] = json.dumps({**json.loads(stored["run"]), "run": "drawn"}, sort_keys=True)
    return found


def killed_anywhere(place: Path, make: Make, again: Make, random: Random, *, old: Path | None) -> str:
    """Kill `make` at random places, and look each time at what is there; then `again`, which must make it. `old` is a
    copy of what lay there before, None if nothing did."""

    def restore() -> None:
        shutil.rmtree(place, ignore_errors=True)
        if old is not None:
            shutil.copytree(old, place)

    log = place.with_suffix(".operations")
    restore()
    one = make(under=place.parent, log=log)
    assert one.wait() == 0, f"undisturbed: {one.said[-600:]}"
    new, before = made(place), made(old) if old is not None else {}
    lines = [line for line in log.read_text().splitlines() if line.startswith("change")]
    said = []
    for at in random.sample(range(1, len(lines) + 1), min(KILLS, len(lines))):
        restore()
        one = make(under=place.parent, log=log, die_at=at)
        assert one.wait() == -signal.SIGKILL, f"it was not killed before {lines[at - 1]}: {one.said[-400:]}"
        found = made(place)
        assert found in (before, new), f"killed before {lines[at - 1]}: neither the old nor the new is there"
        left = hidden(place)
        one = again() if found == before else make()
        code = one.wait()
        is_sentence(one.output)
        assert code in (0, 2), f"killed before {lines[at - 1]}, then: {code}: {one.said[-400:]}"
        assert made(place) == new, f"killed before {lines[at - 1]}: not made afterwards: {one.said[-400:]}"
        assert not hidden(place), f"killed before {lines[at - 1]}: {hidden(place)} stays for ever: {one.said[-400:]}"
        assert not left or any(name in one.said.replace(" ", "") for name in left), f"{left} was removed without a word"
        said.append(f"{lines[at - 1].split()[1]} ({'old' if found == before else 'new'})")
    return f"killed before {', '.join(said)} of {len(lines)} operations; whole each time, leftovers named and removed"


def text_file(path: Path, random: Random) -> Path:
    """A few documents."""
    lines = [json.dumps({"text": f"{n} " + "".join(random.choices("etaoin ", k=200))}) for n in range(40)]
    path.write_text("\n".join(lines))
    return path


def prepared(bench: Bench, folder: Path, text: Path, *flags: str) -> Make:
    words = ("data", "prepare", str(text), "--tokenizer", "bytes", "--seq-len", "64", "--out", str(folder / "set"))
    return lambda **watched: bench.trainer.command(folder.name, *words, *flags, **watched)


@kind(times=1)
def killed_prepare(bench: Bench, folder: Path, random: Random) -> str:
    folder.mkdir()
    make = prepared(bench, folder, text_file(folder / "text.jsonl", random))
    return killed_anywhere(folder / "set", make, make, random, old=None)


@kind(times=1)
def killed_prepare_that_overwrites(bench: Bench, folder: Path, random: Random) -> str:
    folder.mkdir()
    assert prepared(bench, folder, text_file(folder / "old.jsonl", random))().wait() == 0
    old = (folder / "set").rename(folder / "old")
    make = prepared(bench, folder, text_file(folder / "text.jsonl", random), "--overwrite")
    return killed_anywhere(folder / "set", make, make, random, old=old)


def exported(bench: Bench, folder: Path, *flags: str) -> Make:
    words = ("export", str(bench.whole), "--out", str(folder / "hf"))
    return lambda **watched: bench.trainer.command(folder.name, *words, *flags, **watched)


@kind(times=1)
def killed_export(bench: Bench, folder: Path, random: Random) -> str:
    folder.mkdir()
    make = exported(bench, folder)
    return killed_anywhere(folder / "hf", make, make, random, old=None)


@kind(times=1)
def killed_export_that_overwrites(bench: Bench, folder: Path, random: Random) -> str:
    folder.mkdir()
    assert exported(bench, folder, "--dtype", "float32")().wait() == 0
    old = (folder / "hf").rename(folder / "old")
    make = exported(bench, folder, "--overwrite")
    return killed_anywhere(folder / "hf", make, make, random, old=old)


@kind(times=1)
def killed_import(bench: Bench, folder: Path, random: Random) -> str:
    folder.mkdir()
    assert exported(bench, folder)().wait() == 0
    words = ("import", str(folder / "hf"), "--out", str(folder / "run"))
    make: Make = lambda **watched: bench.trainer.command(folder.name, *words, **watched)  # noqa: E731
    said = killed_anywhere(folder / "run", make, make, random, old=None)
    code, one = bench.verify(folder / "run")
    assert code == 0, f"verify ended with {code}: {one.said[-400:]}"
    return said
