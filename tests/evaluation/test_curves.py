"""Oracles: closed forms and simulated noise of known correlation."""

import json
import math

import numpy as np
import pytest

from halfbyte.evaluation import loss_curves


def curve(name, losses, *, tokens_per_step=100, **columns):
    rows = [
        {"step": step, "tokens": step * tokens_per_step, "loss": loss, "step_time_s": 0.5, "input_wait_s": 0.05,
         "tokens_per_s_per_device": 200.0, "tflops_per_device": 1.0, "mfu": None,
         **{field: values[step - 1] for field, values in columns.items()}}
        for step, loss in enumerate(losses, 1)
    ]  # fmt: skip
    return loss_curves.MetricCurve(name, tuple(rows))


def test_smoothing_keeps_constants_and_passes_over_nan():
    flat = np.full(20, 3.0)
    np.testing.assert_allclose(loss_curves.smooth(flat, 5), flat)
    broken = flat.copy()
    broken[7] = np.nan
    np.testing.assert_allclose(loss_curves.smooth(broken, 5), flat)
    np.testing.assert_array_equal(loss_curves.smooth(np.arange(4.0), 1), np.arange(4.0))
    np.testing.assert_allclose(loss_curves.smooth(np.array([4.0, 2.0, 1.0, 3.0, 5.0]), 3), [3, 7 / 3, 2, 3, 4])
    np.testing.assert_allclose(loss_curves.smooth(np.array([4.0, 2.0, 1.0]), 2), [3, 1.5, 1])
    assert np.isnan(loss_curves.smooth(np.array([np.nan, np.nan, 1.0]), 1)).tolist() == [True, True, False]
    line = np.linspace(5, 3, 50)
    np.testing.assert_allclose(loss_curves.smooth(line, 9)[4:-4], line[4:-4])  # no lag


def test_gap_of_paired_runs():
    noise = np.random.default_rng(0).normal(0, 0.3, 200)
    base, other = curve("a", 3 + noise), curve("b", 3.01 + noise)
    found = loss_curves.final_gap(other, base)
    assert found.value == pytest.approx(0.01) and found.error == pytest.approx(0.0, abs=1e-12)
    assert found.points == 20 and (found.first_tokens, found.last_tokens) == (18_100.0, 20_000.0)
    assert found.relative == pytest.approx(0.01 / (3 + noise[-20:].mean()))
    assert loss_curves.final_gap(other, base, last=50).points == 50
    assert not found.interpolated


def test_longer_run_is_compared_where_both_are():
    base, longer = curve("a", np.full(50, 3.0)), curve("b", np.linspace(4, 2, 100))
    found = loss_curves.final_gap(longer, base)
    assert found.last_tokens == 5_000.0
    assert found.value == pytest.approx(np.linspace(4, 2, 100)[30:50].mean() - 3.0)


def test_other_batch_sizes_are_interpolated():
    line = lambda tokens: 5 - tokens / 10_000  # noqa: E731
    base = curve("a", [line(100 * s) for s in range(1, 101)])
    other = curve("b", [line(333 * s) + 0.2 for s in range(1, 31)], tokens_per_step=333)
    found = loss_curves.final_gap(other, base)
    assert found.interpolated and found.value == pytest.approx(0.2)


def test_no_common_point():
    base = curve("a", [3.0, 3.0])
    late = loss_curves.MetricCurve("b", ({"step": 9, "tokens": 10**9, "loss": 2.0},))
    assert loss_curves.final_gap(late, base) is None
    diverged = curve("c", [math.nan, math.nan])
    assert loss_curves.final_gap(diverged, base) is None
    assert math.isnan(loss_curves.final_loss(diverged)[0])


def test_standard_error_allows_for_autocorrelation():
    """Means of 300 simulated series with neighbours correlated by `memory` spread as the estimate says, within a
    quarter: Bartlett weights over a few lags see about 85% of the deviation at 0.6."""
    for memory in (0.0, 0.6):
        values = np.random.default_rng(1).normal(size=(300, 100))
        for at in range(1, 100):
            values[:, at] += memory * values[:, at - 1]
        errors = [loss_curves.correlated_error(each) for each in values]
        assert np.mean(errors) == pytest.approx(np.std(values.mean(1)), rel=0.25), memory
    assert loss_curves.correlated_error(np.array([1.0, 2.0])) is None
    # variance 2/3 and no product with the neighbour, over 3 - 1 points
    assert loss_curves.correlated_error(np.array([1.0, 2.0, 3.0])) == pytest.approx(math.sqrt(1 / 3))


def test_speed_is_a_median_without_the_start():
    times = [9.0] * 10 + [0.5] * 89 + [60.0]
    found = loss_curves.curve_speed(curve("a", np.ones(100), step_time_s=times))
    assert found.step_time_s == 0.5 and found.input_wait == pytest.approx(0.1)
    assert math.isnan(found.mfu)


def test_reading_a_run(tmp_path):
    with pytest.raises(ValueError, match="holds no metrics.jsonl"):
        loss_curves.read_curve(tmp_path, "x")
    lines = [{"step": 2, "loss": "nan", "tokens": 2}, {"step": 1, "loss": 3.0, "tokens": 1, "validation_loss": 2.5}]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + '\n{"step": 3, "lo')
    read = loss_curves.read_curve(tmp_path, "x")
    np.testing.assert_array_equal(read.steps, [1, 2])
    np.testing.assert_array_equal(read.loss, [3.0, np.nan])
    assert [part.tolist() for part in read.validation()] == [[1.0], [2.5]]
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match="holds no step yet"):
        loss_curves.read_curve(tmp_path, "x")


def test_terminal_plot_shows_a_falling_line():
    x = np.linspace(0, 1e6, 50)
    text = loss_curves.braille_plot(
        [loss_curves.PlotLine("run", x, 5 - x / 1e6)], title="loss", width=20, height=5
    ).plain
    rows = text.splitlines()
    assert rows[0] == "loss" and "1M tokens" in text and "── run" in text
    canvas = [row.split("┤" if "┤" in row else "│")[1] for row in rows[1:6]]
    assert all(len(row) == 20 for row in canvas)
    first = [next((at for at, char in enumerate(row) if char != "\u2800"), 99) for row in canvas]
    assert first == sorted(first) and first[0] == 0 and first[-1] > 10


def test_plot_of_nothing_and_of_one_point():
    nothing = loss_curves.PlotLine("x", np.zeros(0), np.zeros(0))
    assert "nothing to draw" in loss_curves.braille_plot([nothing], title="loss").plain
    one = loss_curves.PlotLine("y", np.array([5.0]), np.array([2.0]))
    assert "── y" in loss_curves.braille_plot([one, nothing], title="loss").plain
