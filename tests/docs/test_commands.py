"""Every `halfbyte ...` in the README and the documents is one that the command line takes: lines of code, and what
stands in backticks. Oracle: the commands' own parsers. Those of the first minutes are also run."""

import importlib
import json
import re
import shlex
from pathlib import Path

import pytest

from halfbyte.cli import main as cli
from halfbyte.cli.launch import parse as parse_launch
from halfbyte.cli.train import parse as parse_train
from halfbyte.runs import names

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "docs").glob("*.ipynb")])
COMMANDS = cli.find_commands()


def text_of(page):
    text = page.read_text(encoding="utf-8")
    if page.suffix != ".ipynb":
        return text
    cells = json.loads(text)["cells"]
    return "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


def lines_of(page):
    """Commands as typed: lines of code blocks without their comments, continued lines joined, parts of && and |."""
    text = text_of(page).replace("\\\n", " ")
    blocks = re.findall(r"^```(?:sh|bash|console)?\n(.*?)^```", text, re.S | re.M)
    typed = [line for block in blocks for line in block.splitlines()]
    typed += re.findall(r"^ {4}(halfbyte .*)$", text, re.M) + re.findall(r"`(halfbyte [^`\n]+)`", text)
    parts = [part.strip() for line in typed for part in re.split(r"\s#\s|&&|\s\||\s>\s|<\(|\)$", line)]
    return [part for part in parts if part.startswith("halfbyte ") and "..." not in part.replace('"..."', "")]


ALL = sorted({(page.relative_to(ROOT).as_posix(), line) for page in PAGES for line in lines_of(page)})


def meant(words):
    """Placeholders in capitals as something that fits: a run of ours, a number, one of several."""
    values = {"MODEL": "demo", "RUN": "demo", "K": "1", "N": "1", "RECIPE": "nvfp4"}
    return [values.get(word, word.partition("|")[0] if re.fullmatch(r"[a-z-]+(\|[a-z-]+)+", word) else word)
            for word in words]  # fmt: skip


@pytest.fixture
def a_folder_of_the_reader(tmp_path, monkeypatch):
    """Where the files are that the pages name."""
    page = (ROOT / "docs" / "your-model.md").read_text(encoding="utf-8")
    (tmp_path / "mine.py").write_text(re.search(r"```python\n(# mine.py\n.*?)```", page, re.S)[1])
    (tmp_path / "small.toml").write_text('run = "llama-60m"\n')
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("page, line", ALL, ids=[f"{page}: {line}" for page, line in ALL])
def test_a_command_is_understood(page, line, a_folder_of_the_reader):
    _, name, *words = meant(shlex.split(line))
    if name.startswith("-") or name in ("COMMAND", "help"):
        return
    assert name in COMMANDS, f"{page}: there is no command {name}"
    if "--help" in words or not words:
        return
    understood(name, words)


def understood(name, words):
    if name == "launch":
        name, words = "train", list(parse_launch(words).command[1:])
    if name == "train":
        if "--init-from" in words:  # reads the folder that is named; its flags are those of train
            at = words.index("--init-from")
            words = [*words[:at], *words[at + 2 :]]
        assert parse_train(words).run.name in names()
    else:
        cli.parse_flags(name, importlib.import_module(f"halfbyte.cli.{COMMANDS[name].stem}"), words)


def test_the_pages_hold_enough_of_them_to_mean_something():
    assert len(ALL) > 80
    assert {line.split()[1] for _, line in ALL} >= set(COMMANDS) - {"plan"}


FIRST = ["halfbyte --help", "halfbyte recipes nvfp4 mxfp4", "halfbyte train --help", "halfbyte --version",
         "halfbyte completion bash"]  # fmt: skip


@pytest.mark.parametrize("line", FIRST)
def test_a_command_of_the_first_minutes_runs(line, capfd):
    assert cli.main(shlex.split(line)[1:]) == 0
    assert len(capfd.readouterr().out) > 10
