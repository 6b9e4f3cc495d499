"""The largest batch that fits a stated memory.

Oracle: the compiled programs themselves. The batch found needs at most the limit, the next one needs more.
"""

import dataclasses
import functools
import itertools
import json

import pytest
from tiny import tiny

from halfbyte import bench
from halfbyte.bench import fitting
from halfbyte.bench.fitting import FARTHEST, MOST, bytes_needed, search
from halfbyte.cli.main import main
from halfbyte.train import preflight, run_mesh

SEQ = 32
TINY_RUN = tiny(recipe="bf16", remat="full")


@pytest.fixture(autouse=True, scope="module")
def _compiled_once():
    """A batch that two tests or two searches ask about is compiled for the first."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fitting, "compile_step", functools.cache(fitting.compile_step))
        yield


@pytest.mark.parametrize("limit", [99, 100, 101, 5_000, 123_456])
@pytest.mark.parametrize("unit", [1, 8])
def test_the_search_ends_between_a_batch_that_fits_and_one_that_does_not(limit, unit) -> None:
    """A need like a step's: flat at first, where gradients hide the activations, then a line."""

    def needed(batch: int) -> int:
        return 90 + max(10 + batch, 3 * batch - 40)

    found, asked = search(needed, limit=limit, unit=unit)
    assert found % unit == 0 and (found == 0 or needed(found) <= limit) and needed(found + unit) > limit
    assert len(asked) <= 6


@pytest.mark.parametrize("unit", [1, 3, 24])
def test_a_need_that_does_not_grow_is_followed_in_steps_and_in_whole_units(unit) -> None:
    found, asked = search(lambda batch: 100, limit=10**9, unit=unit)
    assert found + unit == MOST // unit * unit and not any(batch % unit for batch in asked)
    tried = sorted(asked)
    assert all(b <= FARTHEST * a for a, b in itertools.pairwise(tried))


def test_the_batch_found_runs_and_the_next_needs_more() -> None:
    mesh = run_mesh(TINY_RUN)
    limit = bytes_needed(fitting.compile_step(dataclasses.replace(TINY_RUN, batch=2 * mesh.size), mesh, seq=SEQ))
    said: list[str] = []
    row = bench.measure_largest(TINY_RUN, seq=SEQ, limit=limit, say=said.append)
    assert row.batch >= 2 * mesh.size and row.milliseconds is not None
    assert row.needed_gib <= row.limit_gib == limit / 2**30
    assert row.activations_gib < row.temporaries_gib
    assert any(f"batch {row.batch + mesh.size} needs" in line for line in said)


def test_nothing_fits_and_the_row_says_what_was_missing() -> None:
    row = bench.measure_largest(TINY_RUN, seq=SEQ, limit=1000)
    assert row.batch == 0 and row.milliseconds is None and "needs" in row.note


def test_the_command_reports_it(tmp_path, monkeypatch, capsys) -> None:
    def found(config, *, seq, limit, say) -> bench.Measured:
        return bench.Measured(
            config.recipe, "mlp", config.remat, "", 24, milliseconds=9.0, needed_gib=0.4, limit_gib=limit / 2**30
        )

    monkeypatch.setattr(bench, "measure_largest", found)
    monkeypatch.setattr(preflight, "memory_of", lambda device: 2**29)
    out = tmp_path / "fits.json"
    flags = ["--recipes", "bf16", "--remat", "none,full", "--largest-batch", "--out", str(out)]
    assert main(["bench", "demo", *flags]) == 0
    assert "the largest batch" in capsys.readouterr().out
    rows = json.loads(out.read_text())["rows"]
    assert [(row["remat"], row["batch"], row["limit_gib"]) for row in rows] == [("none", 24, 0.5), ("full", 24, 0.5)]
