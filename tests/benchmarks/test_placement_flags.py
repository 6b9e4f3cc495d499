"""The commands of docs/programs.md are ones that benchmarks/placement.py takes."""

import importlib.util
import shlex
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_documented_commands_parse(monkeypatch):
    spec = importlib.util.spec_from_file_location("placement", ROOT / "benchmarks" / "placement.py")
    placement = importlib.util.module_from_spec(spec)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    spec.loader.exec_module(placement)
    text = (ROOT / "docs" / "programs.md").read_text(encoding="utf-8")
    commands = [line for line in text.splitlines() if line.startswith("python benchmarks/placement.py")]
    assert len(commands) == 2
    for command in commands:
        monkeypatch.setattr(sys, "argv", shlex.split(command)[1:])
        assert placement.arguments().mesh
