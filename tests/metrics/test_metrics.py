"""Oracles: hand-counted rates, the published FLOPs of ANCHORS, a fake clock, and files read back."""

import io
import json

import jax.numpy as jnp
import pytest
from rich.console import Console

from halfbyte.metrics import Jsonl, OneStepLate, TensorBoard, Throughput, make_display, mixed_peak, read_rows
from halfbyte.metrics.display import clock, resample, sparkline

ROW = {
    "step": 1, "loss": 5.4321987, "learning_rate": 3e-4, "grad_norm": 1.25, "step_time_s": 0.352, "input_wait_s": 0.001,
    "tokens_per_s_per_device": 5818.0, "tflops_per_device": 0.0512, "mfu": None,
}  # fmt: skip


def test_rates_of_a_published_row():
    """Llama 3 8B: 51.47 GFLOP a token; 2,017 TFLOP/s/GPU means 39.2k tokens/s/GPU."""
    meter = Throughput(tokens=8 * 4 * 8192, flops_per_token=51.47e9, devices=8, peak=2.5e15)
    rates = meter.rates(4 * 8192 / 39_188)
    assert rates["tflops_per_device"] == pytest.approx(2017, rel=1e-3)
    assert rates["mfu"] == pytest.approx(0.807, rel=1e-3)


def test_mfu_is_none_where_the_peak_is_unknown():
    assert Throughput(tokens=10, flops_per_token=1.0, devices=1).rates(1.0)["mfu"] is None


def test_mixed_peak():
    assert mixed_peak({"nvfp4": 0.5, "bf16": 0.5}, {"nvfp4": 4.0, "bf16": 1.0}) == pytest.approx(1.6)
    assert mixed_peak({"bf16": 1.0}, {}) is None


def test_metrics_are_one_step_late():
    times = iter([0.0, 5.0, 6.5, 7.0])
    late = OneStepLate(clock=lambda: next(times))
    assert late.push(1, {"loss": jnp.float32(2.5)}, input_wait_s=0.25) is None
    first = late.push(2, {"loss": jnp.float32(2.0)})
    assert (first.step, first.values, first.step_time_s, first.host) == (1, {"loss": 2.5}, 5.0, {"input_wait_s": 0.25})
    second = late.flush()
    assert second.step == 2
    assert second.step_time_s == pytest.approx(1.5)
    assert late.flush() is None


def test_jsonl_drops_what_a_resumed_run_writes_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    sink = Jsonl(path)
    for step in (1, 2, 3):
        sink.write({"step": step, "loss": float("nan") if step == 2 else 1.0})
    sink.close()
    with open(path, "a") as file:
        file.write('{"step": 4, "lo')  # killed here
    resumed = Jsonl(path, resume_step=2)
    resumed.write({"step": 3, "loss": 0.5})
    resumed.close()
    assert read_rows(path) == [{"step": 1, "loss": 1.0}, {"step": 2, "loss": "nan"}, {"step": 3, "loss": 0.5}]
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_tensorboard_writes_events(tmp_path):
    sink = TensorBoard(tmp_path)
    sink.write(ROW)
    sink.close()
    assert any(file.stat().st_size > 100 for file in tmp_path.iterdir())


def test_plain_lines_show_every_number():
    out = io.StringIO()
    display = make_display(Console(file=out, width=80), title="demo", steps=20, every=10)
    for step in range(1, 21):
        display.step({**ROW, "step": step})
    lines = out.getvalue().splitlines()
    assert [line.split("/20")[0].split()[-1] for line in lines] == ["1", "10", "20"]
    for piece in (
        "loss 5.432199",
        "lr 3.00e-04",
        "grad 1.250",
        "time 352 ms",
        "tok/s/dev 5,818",
        "MFU n/a",
        "input wait 0.3%",
    ):
        assert piece in lines[0]


def test_panel_draws_on_a_terminal():
    out = io.StringIO()
    display = make_display(Console(file=out, width=100, force_terminal=True), title="demo nvfp4", steps=3)
    for step in (1, 2, 3):
        display.step({**ROW, "step": step, "loss": 5.0 - step, "mfu": 0.5})
    display.note("checkpoint written")
    display.close()
    text = out.getvalue()
    assert "demo nvfp4" in text
    assert "2.000000" in text
    assert "50.0%" in text
    assert "checkpoint written" in text
    assert "█" in text
    assert "tok/s/dev" in text


def test_small_things():
    assert clock(59) == "0:59"
    assert clock(3725) == "1:02:05"
    assert resample([1.0, 3.0, 5.0, 7.0], 2) == [2.0, 6.0]
    assert sparkline([0.0, 1.0]) == "▁█"
