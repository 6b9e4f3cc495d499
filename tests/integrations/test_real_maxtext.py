"""The real MaxText's trainer, two steps per configuration. Oracle: `hb.qdot` of the operands that maxtext_matrix.py
records.
"""

import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from maxtext_matrix import CASES

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("maxtext") is None, reason="MaxText needs Python 3.12 or later"),
]
SCRIPT = Path(__file__).parent / "maxtext_matrix.py"
MLP, ATTENTION = {"wi_0", "wi_1", "wo"}, {"query", "key", "value", "out"}


def expected_weights(name):
    """Names of the weights whose dots run in the recipe."""
    if name.startswith("Mixtral"):
        return ATTENTION
    return MLP | ATTENTION if name.startswith("paper") else MLP


@pytest.mark.parametrize("name", CASES)
def test_trainer_runs_the_right_dots_in_the_recipe(name):
    done = subprocess.run([sys.executable, str(SCRIPT), name], capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("MATRIX ")]
    assert lines, done.stderr[-3000:]
    print(lines[-1])  # `-rP` shows it: input of `maxtext_matrix.py --markdown`
    found = json.loads(lines[-1].removeprefix("MATRIX "))
    assert "error" not in found, found
    assert {path.split("/")[-2] for path in found["replaced"]} == expected_weights(name)
    assert found["keys"] == found["expected_keys"] > 0
    assert found["equal_to_qdot"] == [found["keys"]] * 3  # y, dx, dw
    assert all(map(math.isfinite, found["gradient_norm"] + found["loss"]))
