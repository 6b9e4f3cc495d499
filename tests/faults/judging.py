"""`parity`, killed while it runs its arms, and its data exchanged between two of them."""

import shutil
import signal
from pathlib import Path
from random import Random

from outside import Started, wait_until
from reference import Bench, kind, refused
from replacing import text_file
from states import losses, saved_state

ARMS = ("--baseline", "bf16", "--candidates", "fp8", "--no-controls", "--radar", "-1", "--seeds", "1")
SHORT = ("--steps", "4")


def parity(bench: Bench, out: Path, data: Path, **watched) -> Started:
    words = ("parity", str(bench.trainer.config), *ARMS, *SHORT, "--data", str(data), "--out", str(out))
    return bench.trainer.command(out.name, *words, **watched)


def cells(out: Path) -> dict[str, tuple]:
    """Losses and arrays of every finished run of a parity."""
    found = sorted((out / "arms").glob("*/seed-*"))
    return {str(cell.relative_to(out)): (losses(cell), saved_state(cell)) for cell in found}


@kind(times=1)
def killed_parity(bench: Bench, folder: Path, random: Random) -> str:
    folder.mkdir()
    one = parity(bench, folder / "whole", bench.data, under=folder / "whole", log=folder / "log")
    code = one.wait()
    assert code in (0, 3), f"undisturbed: {code}: {one.said[-600:]}"
    operations = sum(line.startswith("change") for line in (folder / "log").read_text().splitlines())
    whole, out = cells(folder / "whole"), folder / "killed"
    at = random.randint(1, operations)
    one = parity(bench, out, bench.data, under=out, log=folder / "log-killed", die_at=at)
    assert one.wait() == -signal.SIGKILL, f"it was not killed: {one.said[-600:]}"
    one = parity(bench, out, bench.data)
    assert one.wait() == code, f"the undisturbed one ended with {code}: {one.said[-600:]}"
    assert cells(out) == whole, "the runs differ from those of the undisturbed parity"
    return f"killed before operation {at} of {operations}; again: exit {code}, {len(whole)} runs bit-identical"


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
