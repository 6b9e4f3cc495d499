"""The largest batch that fits a stated memory.

Oracle: the compiled programs themselves. The batch found needs at most the limit, the next one needs more.
"""

import dataclasses
import functools
import itertools
import json

import pytest

from halfbyte.cli.main import main
from halfbyte.plan import step_placement, step_timing
from halfbyte.plan.step_placement import MAX_BATCH, MAX_EXTRAPOLATION_FACTOR, peak_bytes, search_largest
from halfbyte.train import preflight, run_mesh
from tiny import tiny

SEQ = 32
TINY_RUN = tiny(recipe="bf16", remat="full")


@pytest.fixture(autouse=True, scope="module")
def _compiled_once():
    """A batch that two tests or two searches ask about is compiled for the first."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_placement, "compile_step", functools.cache(step_placement.compile_step))
        yield


@pytest.mark.parametrize("limit", [99, 100, 101, 5_000, 123_456])
@pytest.mark.parametrize("unit", [1, 8])
def test_the_search_ends_between_a_batch_that_fits_and_one_that_does_not(limit, unit) -> None:
    """A need like a step's: flat at first, where gradients hide the activations, then a line."""

    def needed(batch: int) -> int:
        return 90 + max(10 + batch, 3 * batch - 40)

    found, asked = search_largest(needed, limit=limit, unit=unit)
    assert found % unit == 0 and (found == 0 or needed(found) <= limit) and needed(found + unit) > limit
    assert len(asked) <= 6


@pytest.mark.parametrize("unit", [1, 3, 24])
def test_a_need_that_does_not_grow_is_followed_in_steps_and_in_whole_units(unit) -> None:
    found, asked = search_largest(lambda batch: 100, limit=10**9, unit=unit)
    assert found + unit == MAX_BATCH // unit * unit and not any(batch % unit for batch in asked)
    tried = sorted(asked)
    assert all(b <= MAX_EXTRAPOLATION_FACTOR * a for a, b in itertools.pairwise(tried))


def test_the_batch_found_runs_and_the_next_needs_more() -> None:
    mesh = run_mesh(TINY_RUN)
    limit = peak_bytes(step_placement.compile_step(dataclasses.replace(TINY_RUN, batch=2 * mesh.size), mesh, seq=SEQ))
    said: list[str] = []
    row = step_timing.measure_largest(TINY_RUN, seq=SEQ, limit=limit, say=said.append)
    assert row.batch >= 2 * mesh.size and row.milliseconds is not None
    assert row.needed_gib <= row.limit_gib == limit / 2**30
    assert row.activations_gib < row.temporaries_gib
    assert any(f"batch {row.batch + mesh.size} needs" in line for line in said)


def test_nothing_fits_and_the_row_says_what_was_missing() -> None:
    row = step_timing.measure_largest(TINY_RUN, seq=SEQ, limit=1000)
    assert row.batch == 0 and row.milliseconds is None and "needs" in row.note


def test_the_command_reports_it(tmp_path, monkeypatch, capsys) -> None:
    def found(config, *, seq, limit, say) -> step_timing.StepMeasurement:
        return step_timing.StepMeasurement(
            config.recipe, "mlp", config.remat, "", 24, milliseconds=9.0, needed_gib=0.4, limit_gib=limit / 2**30
        )

    monkeypatch.setattr(step_timing, "measure_largest", found)
    monkeypatch.setattr(preflight, "device_memory_bytes", lambda device: 2**29)
    out = tmp_path / "fits.json"
    flags = ["--recipes", "bf16", "--remat", "none,full", "--largest-batch", "--out", str(out)]
    assert main(["bench", "demo", *flags]) == 0
    assert "the largest batch" in capsys.readouterr().out
    rows = json.loads(out.read_text())["rows"]
    assert [(row["remat"], row["batch"], row["limit_gib"]) for row in rows] == [("none", 24, 0.5), ("full", 24, 0.5)]
