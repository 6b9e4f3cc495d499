"""The fit of the plan's free numbers. Oracle: the published rows."""

import dataclasses
import sys
from pathlib import Path

import pytest

from halfbyte.devices import device
from halfbyte.plan import BAND, FITTED, residual

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from plan_fit import ROWS, fit, predicted


def test_fitted_numbers_are_those_of_the_fit():
    assert dataclasses.astuple(fit(ROWS)) == pytest.approx(dataclasses.astuple(FITTED), abs=0.005)


def test_band_covers_the_row_left_out_of_the_fit():
    worst = next(row for row in ROWS if (row.model, row.device, row.recipe) == ("llama3.1-405b", "gb200", "fp8"))
    without = fit([row for row in ROWS if row != worst])
    error = abs(predicted(worst, without) / worst.tflops - 1)
    assert error == pytest.approx(residual(device("gb200")), abs=0.005)
    assert error <= BAND <= 0.25
