"""The ablation's arms are parity's, and its table says no more than its seeds allow."""

import sys
from pathlib import Path

import pytest

from halfbyte.parity.arms import ablation
from halfbyte.recipe import recipe

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import league_grid
import league_shown


def test_every_arm_of_paritys_ablation_is_one_of_the_leagues():
    assert set(league_shown.ABLATION) <= set(league_grid.ARMS)
    shown = {league_grid.ARMS[name].changes["recipe"] for name in league_shown.ABLATION}
    assert {arm.changes["recipe"] for arm in ablation()} <= shown
    bare = recipe(league_grid.ARMS["nvfp4_bare"].changes["recipe"])
    assert {(p.block, p.rounding, bool(p.hadamard)) for p in bare.operands().values()} == {("1d", "rne", False)}


def planted(**differences):
    """A cell with bf16 at 2.0 and nvfp4 one point above it; arm -> its points above nvfp4, one a seed."""
    losses = {"bf16": [0.0] * 3, "nvfp4": [1.0] * 3} | {arm: [1 + d for d in ds] for arm, ds in differences.items()}
    return {
        f"{arm}-{seed}": {"validation_loss": 2 * (1 + value / 100)}
        for arm, values in losses.items()
        for seed, value in enumerate(values)
    }


@pytest.mark.parametrize(
    ("differences", "said"),
    [
        ([0.1, 0.12, 0.08], "within 0.5%"),
        ([0.9, 1.0, 1.1], "worse by more than 0.5%"),
        ([-0.9, -1.0, -1.1], "better by more than 0.5%"),
        ([0.4, 0.5, 0.6], "worse"),
        ([0.0, 1.0, 2.0], "cannot tell"),
        ([1.0], "cannot tell"),  # other arms' seeds spread by a point
        ([9.0], "worse by more than 0.5%"),
    ],
)
def test_what_is_said_of_an_arm(differences, said):
    cell = planted(mxfp4=[0.0, 1.0, 2.0], nvfp4_no_sr=differences)
    arms = league_shown.arms_of(cell)
    assert league_shown.beside(cell, "nvfp4_no_sr", arms["nvfp4_no_sr"])[-1] == said
