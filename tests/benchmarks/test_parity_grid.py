"""The committed grid is the script's, and each of its runs is one that `halfbyte parity` would take."""

import importlib.util
import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("parity_grid", ROOT / "benchmarks" / "parity_grid.py")
grid = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(grid)


def test_the_committed_grid_is_the_one_that_will_run():
    assert json.loads(grid.GRID.read_text()) == json.loads(json.dumps(grid.grid()))


def test_tokens_a_parameter_span_what_is_asked():
    ratios = [grid.TOKENS / grid.without_embeddings(size) for size in grid.SIZES]
    assert min(ratios) < 2.2 and max(ratios) > 15


def test_every_plan_is_one_and_the_heaviest_runs_come_first():
    plans = {size: grid.plan_of(size, steps=100, data="synthetic") for size in grid.SIZES}
    jobs = grid.jobs_of(plans)
    seeded = sum(len(grid.SEEDED) * len(seeds) for seeds in grid.SEEDS.values())
    assert len(jobs) == len(set(map(str, jobs))) == seeded + 7 * len(plans)
    assert {arm.name for _, arm, _ in jobs[:seeded]} == set(grid.SEEDED)
    assert [size for size, _, _ in jobs[:9]] == ["s"] * 9


def test_a_run_is_held_by_one_process_and_let_go_with_it(tmp_path):
    with grid.held(tmp_path / "held" / "a") as mine, grid.held(tmp_path / "held" / "a") as again:
        assert mine and not again
    with grid.held(tmp_path / "held" / "a") as mine:
        assert mine


def test_the_gap_against_tokens_a_parameter_is_fitted_over_sizes():
    points = [
        {"size": s, "arm": "a", "tokens_a_parameter": t, "gaps": [0.1 * k for k in (n, n + 0.1)], "interval": None}
        for n, (s, t) in enumerate((("l", 2.0), ("m", 4.0), ("s", 8.0)), 1)
    ]
    line = grid.fitted(points)["lines"]["a"]
    assert line["b"] > 0 and line["b_90"][0] < line["b"] < line["b_90"][1]
