"""The fit of the plan's free numbers. Oracle: the published rows of docs/evidence/plan_rows.tsv."""

import dataclasses
import sys
from pathlib import Path

import pytest

from halfbyte.devices import device_by_name
from halfbyte.plan.rate_calibration import (
    FITTED_RATES,
    WORST_SPEEDUP_ERROR,
    error_band,
    is_blackwell,
    worst_fit_error,
)

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from plan_fit import ROWS, fit, left_out_errors, predicted, speedup_errors


def test_fitted_numbers_are_those_of_the_fit():
    assert dataclasses.astuple(fit(ROWS)) == pytest.approx(dataclasses.astuple(FITTED_RATES), abs=0.005)


def test_printed_band_covers_every_row_left_out():
    """Each row against a fit without it: 20% where its layout is public, 25% where a part of it was assumed."""
    outside = {
        str(row): error
        for row, error in left_out_errors().items()
        if abs(error) > error_band(device_by_name(row.device), known=row.layout == "public")
    }
    assert len(ROWS) == 23 and not outside
    assert error_band(device_by_name("gb300"), known=True) == 0.20
    assert error_band(device_by_name("b300"), known=True) == error_band(device_by_name("gb300"), known=False) == 0.25


def test_left_out_rows_have_no_bias():
    """Over all rows, and over those that no fit had seen before these."""
    errors = left_out_errors()
    later = [error for row, error in errors.items() if row.release == "2026"]
    assert abs(sum(errors.values()) / len(errors)) < 0.05 and abs(sum(later) / len(later)) < 0.05


@pytest.mark.parametrize("device", ["gb200", "h100"])
def test_worst_errors_are_those_that_are_printed(device):
    chip = device_by_name(device)
    errors = [
        abs(e) for row, e in left_out_errors().items() if is_blackwell(device_by_name(row.device)) == is_blackwell(chip)
    ]
    assert max(errors) == pytest.approx(worst_fit_error(chip), abs=0.002)
    assert max(map(abs, speedup_errors().values())) == pytest.approx(WORST_SPEEDUP_ERROR, abs=0.002)


def test_pipeline_stage_counts_bubble_and_head():
    """4 stages of 5 virtual ones, 16 microbatches: 3/80 of the step is empty. GEMMs by hand: 20 of 80 layers on 16
    GPUs, and a head in bf16.
    """
    (row,) = (row for row in ROWS if (row.model, row.device, row.recipe) == ("llama3.1-70b", "gb300", "nvfp4"))
    assert (row.stage_devices, row.data_parallel, row.bubble) == (16, 16, pytest.approx(1 + 3 / 80))
    tokens = 256 * 8192 / 16  # of a GPU and step
    mlp, attention = 3 * 8192 * 28672, 2 * 8192 * 8192 + 2 * 8192 * 1024
    reached = FITTED_RATES.rates(device_by_name("gb300")).gemm
    gemms = 6 * tokens * (20 * (mlp + attention) / reached["fp4"] + 8192 * 128256 / reached["bf16"])
    core = 20 * tokens * 2 * 8192 * 8192 * (1 / 1750e12 + 2.5 / 1250e12)  # causal, of 64 heads of 128
    least = (gemms + core) * row.bubble
    seconds = 256 * 8192 / 64 * 449.5e9 / predicted(row, FITTED_RATES) / 1e12
    assert least < seconds < 1.35 * least  # the rest is passes over memory
