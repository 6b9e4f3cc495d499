"""Every command of docs/parity.md and of the grid's page is one that the command line takes."""

import re
import shlex
from pathlib import Path

import pytest

from halfbyte.cli import inspect, parity
from halfbyte.cli.main import parse_flags
from halfbyte.cli.train import parse as parse_train

DOCS = Path(__file__).parents[2] / "docs"


def commands(page):
    text = (DOCS / page).read_text(encoding="utf-8")
    return [line for block in re.findall(r"```\n(.*?)```", text, re.S) for line in block.splitlines() if line]


@pytest.mark.parametrize("line", commands("parity.md"))
def test_commands_are_understood(line):
    program, name, *flags = shlex.split(line)
    assert program == "halfbyte"
    if name == "train":
        assert parse_train(["demo" if word == "RUN" else word for word in flags]).run.radar == 400
    else:
        parse_flags(name, {"parity": parity, "inspect": inspect}[name], flags)


def test_the_grid_page_names_subcommands_that_exist():
    script = (DOCS.parent / "benchmarks" / "parity_grid.py").read_text(encoding="utf-8")
    for line in commands("evidence/parity/README.md"):
        _, file, name, *rest = shlex.split(line)
        assert file == "benchmarks/parity_grid.py" and f'add_parser("{name}")' in script
        for flag in (word for word in rest if word.startswith("--")):
            assert f'"{flag}"' in script, flag
