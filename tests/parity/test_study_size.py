"""Size of the study that fits a time. Oracle: the definition of its costs, and a study that was run on two cores."""

import pytest

from halfbyte.parity.study_size import costs_of, size_of, study_seconds

COSTS = {"step_s": 1.0, "first_s": 60.0, "again_s": 10.0}


@pytest.mark.parametrize("left, seeds, steps", [
    (60 + 3 * (10 + 100), 3, 100), (60 + 3 * (10 + 400), 7, 160), (60 + 3 * 30, 1, 80), (90, 0, 0), (-5, 0, 0),
])  # fmt: skip
def test_seeds_come_first_then_steps_then_more_seeds(left, seeds, steps):
    size = size_of(left, COSTS, steps=160, seeds=0, fixed=False)
    assert size == (seeds, steps)
    assert study_seconds(*size, COSTS) <= max(left, 0)


@pytest.mark.parametrize("seeds, expected", [(2, (2, 500)), (0, (3, 500))])
def test_fixed_steps_are_kept_whatever_they_take(seeds, expected):
    assert size_of(1.0, COSTS, steps=500, seeds=seeds, fixed=True) == expected


def test_fixed_steps_get_the_seeds_that_fit():
    assert size_of(60 + 5 * 510, COSTS, steps=500, seeds=0, fixed=True) == (5, 500)


def test_given_seeds_are_kept():
    assert size_of(60 + 2 * (10 + 44), COSTS, steps=160, seeds=2, fixed=False) == (2, 40)


def test_estimate_matches_a_measured_study():
    """The demo's records on two cores; its 15 runs of 35 steps would have taken 740 s, and 452 s were left."""
    row = {"fp8": (369, 14.4), "nvfp4": (689, 33.6), "nvfp4_no_rht": (372, 21.4)}
    rows = [{"arm": arm, "milliseconds": step, "compile_s": compiling} for arm, (step, compiling) in row.items()]
    trace = {"arm": "nvfp4", "seconds": 60.8, "stepping_s": 12.3, "step_time_s": 0.418}
    costs = costs_of({"baseline": "fp8", "rows": rows}, trace, [*row, "fp8-twin", "control"])
    assert 660 < study_seconds(3, 35, costs) < 900
    size = size_of(452, costs, steps=160, seeds=0, fixed=False)
    assert size[0] == 1 and study_seconds(*size, costs) <= 452
    assert size_of(700, costs, steps=160, seeds=0, fixed=False)[0] == 3
