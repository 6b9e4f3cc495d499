"""The commands of the grid's page are those of its script."""

import re
import shlex
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def commands(page):
    text = (DOCS / page).read_text(encoding="utf-8")
    return [line for block in re.findall(r"```\n(.*?)```", text, re.S) for line in block.splitlines() if line]


def test_the_grid_page_names_subcommands_that_exist():
    script = (DOCS.parent / "benchmarks" / "parity_grid.py").read_text(encoding="utf-8")
    for line in commands("evidence/parity/README.md"):
        _, file, name, *rest = shlex.split(line)
        assert file == "benchmarks/parity_grid.py" and f'add_parser("{name}")' in script
        for flag in (word for word in rest if word.startswith("--")):
            assert f'"{flag}"' in script, flag
