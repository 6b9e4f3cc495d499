"""The benchmarks import what exists, and not each other in a circle."""

import ast
import pathlib
import sys

import pytest

BENCHMARKS = pathlib.Path(__file__).parents[2] / "benchmarks"


def imported(file, known):
    """Files of the folder that `file` imports, also inside functions."""
    nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return (names | {node.module for node in nodes if isinstance(node, ast.ImportFrom)}) & known


@pytest.mark.slow
def test_no_circle():
    known = {file.stem for file in BENCHMARKS.glob("*.py")}
    left = {name: imported(BENCHMARKS / f"{name}.py", known) for name in known}
    while free := [name for name, targets in left.items() if not targets & left.keys()]:
        for name in free:
            del left[name]
    assert left == {}


def test_the_kernels_cases_import():
    """A GPU is needed to run them; a kernel that was renamed is found here."""
    sys.path.insert(0, str(BENCHMARKS))
    import gpu_kernels

    assert gpu_kernels.SHAPES
