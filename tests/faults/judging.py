"""`parity`, killed while it runs its arms, and its data exchanged between two of them."""

import json
import shutil
import signal
from pathlib import Path
from random import Random

from outside import Started, wait_until
from reference import Bench, kind, refused
from replacing import text_file
from states import differing, saved_state

ARMS = ("--baseline", "bf16", "--candidates", "fp8", "--no-controls", "--radar", "-1", "--seeds", "1")
SHORT = ("--steps", "4")


def parity(bench: Bench, out: Path, data: Path, **watched) -> Started:
    base = json.loads(bench.trainer.config.read_text())
    base["validation"]["at_end"] = True
    config = out.with_name("judged.json")
    config.write_text(json.dumps(base))
    words = ("parity", str(config), *ARMS, *SHORT, "--data", str(data), "--out", str(out))
    return bench.trainer.command(out.name, *words, **watched)


def rows(out: Path) -> dict[str, list[tuple]]:
    """Loss and validation loss of every step of every run of a parity: what it judges by."""
    found = {}
    for cell in sorted((out / "arms").glob("*/seed-*")):
        lines = map(json.loads, (cell / "metrics.jsonl").read_text().splitlines())
        found[str(cell.relative_to(out))] = [(row["step"], row["loss"], row.get("validation_loss")) for row in lines]
    return found


def same_cells(bench: Bench, out: Path, whole: Path) -> int:
    """Every run has the rows of the undisturbed parity's and is whole; where the kill cut off the very last save, its
    rows are all there and its checkpoint is the one before. How many have the last one, array by array."""
    assert rows(out) == rows(whole), "the rows differ from those of the undisturbed parity"
    saved = 0
    for name in rows(whole):
        code, one = bench.verify(out / name)
        assert code == 0, f"verify {name}: {one.said[-400:]}"
        step, found = saved_state(out / name)
        last, wanted = saved_state(whole / name)
        assert step < last or found == wanted, f"{name}: {differing(found, wanted)}"
        saved += step == last
    return saved


@kind(times=1)
def killed_parity(bench: Bench, folder: Path, random: Random) -> str:
    folder.mkdir()
    one = parity(bench, folder / "whole", bench.data, under=folder / "whole", log=folder / "log")
    code = one.wait()
    assert code in (0, 3), f"undisturbed: {code}: {one.said[-600:]}"
    operations = sum(line.startswith("change") for line in (folder / "log").read_text().splitlines())
    out = folder / "killed"
    at = random.randint(1, operations)
    one = parity(bench, out, bench.data, under=out, log=folder / "log-killed", die_at=at)
    assert one.wait() == -signal.SIGKILL, f"it was not killed: {one.said[-600:]}"
    one = parity(bench, out, bench.data)
    assert one.wait() == code, f"the undisturbed one ended with {code}: {one.said[-600:]}"
    saved = same_cells(bench, out, folder / "whole")
    return (
        f"killed before operation {at} of {operations}; again: exit {code}, rows and {saved} end states bit-identical"
    )


@kind(times=1)
def data_changed_between_arms(bench: Bench, folder: Path, random: Random) -> str:
    """The set at the path is prepared again, from other text with the same tokenizer, when the first arm is done."""
    folder.mkdir()
    data, out = folder / "data", folder / "out"
    shutil.copytree(bench.data, data)
    one = parity(bench, out, data)
    assert wait_until(lambda: len(list((out / "arms").glob("*/seed-*"))) > 1, [one]), one.said[-600:]
    one.process.kill()
    assert one.wait() == -signal.SIGKILL, "it had ended before"
    text = text_file(folder / "text.jsonl", random)
    tokenizer = ("--tokenizer", str(data / "tokenizer.json"), "--seq-len", "32")
    words = ("data", "prepare", str(text), *tokenizer, "--out", str(data), "--overwrite")
    code, prepared = bench.trainer.run(folder.name, *words)
    assert code == 0, prepared.said[-600:]
    again = parity(bench, out, data)
    refused(again, again.wait(), "data")
    return "exit 2, the data named; no gap between runs on different data is printed"
