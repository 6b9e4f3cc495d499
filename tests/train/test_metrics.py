"""Oracles: hand-counted rates, the published FLOPs of ANCHORS, a fake clock, and files read back."""

import io
import json
import threading
import time

import jax.numpy as jnp
import pytest
from rich.console import Console

from halfbyte.train import (
    BackgroundSink,
    CompileIndicator,
    DeferredMetrics,
    FaultTolerantSink,
    JsonlSink,
    TensorBoardSink,
    Throughput,
    make_display,
    metric_writers,
    read_rows,
    weighted_peak_flops,
)
from halfbyte.train.progress_display import bucket_means, format_duration, sparkline

ROW = {
    "step": 1, "loss": 5.4321987, "learning_rate": 3e-4, "grad_norm": 1.25, "step_time_s": 0.352, "input_wait_s": 0.001,
    "tokens_per_s_per_device": 5818.0, "tflops_per_device": 0.0512, "mfu": None,
}  # fmt: skip


def test_rates_are_those_of_a_published_row():
    """Llama 3 8B: 51.47 GFLOP a token; 2,017 TFLOP/s/GPU means 39.2k tokens/s/GPU."""
    meter = Throughput(tokens=8 * 4 * 8192, flops_per_token=51.47e9, devices=8, peak=2.5e15)
    rates = meter.rates(4 * 8192 / 39_188)
    assert rates["tflops_per_device"] == pytest.approx(2017, rel=1e-3)
    assert rates["mfu"] == pytest.approx(0.807, rel=1e-3)
    assert Throughput(tokens=10, flops_per_token=1.0, devices=1).rates(1.0)["mfu"] is None  # the peak is unknown
    assert weighted_peak_flops({"nvfp4": 0.5, "bf16": 0.5}, {"nvfp4": 4.0, "bf16": 1.0}) == pytest.approx(1.6)
    assert weighted_peak_flops({"bf16": 1.0}, {}) is None


def test_metrics_are_fetched_one_step_late():
    times = iter([0.0, 5.0, 6.5, 7.0])
    late = DeferredMetrics(clock=lambda: next(times))
    assert late.enqueue(1, {"loss": jnp.float32(2.5)}, input_wait_s=0.25) is None
    first = late.enqueue(2, {"loss": jnp.float32(2.0)})
    assert (first.step, first.values, first.step_time_s, first.host) == (1, {"loss": 2.5}, 5.0, {"input_wait_s": 0.25})
    second = late.flush()
    assert second.step == 2
    assert second.step_time_s == pytest.approx(1.5)
    assert late.flush() is None


def test_jsonl_drops_rows_that_a_resumed_run_rewrites(tmp_path):
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    for step in (1, 2, 3):
        sink.write({"step": step, "loss": float("nan") if step == 2 else 1.0})
    sink.close()
    with open(path, "a") as file:
        file.write('{"step": 4, "lo')  # killed here
    resumed = JsonlSink(path, resume_step=2)
    resumed.write({"step": 3, "loss": 0.5})
    resumed.close()
    assert read_rows(path) == [{"step": 1, "loss": 1.0}, {"step": 2, "loss": "nan"}, {"step": 3, "loss": 0.5}]
    assert all(json.loads(line) for line in path.read_text().splitlines())
    dropped = tmp_path / "metrics.dropped.jsonl"
    assert read_rows(dropped) == [{"step": 3, "loss": 1.0}]
    JsonlSink(path, resume_step=2).close()  # once more: nothing of the first time goes
    assert read_rows(dropped) == [{"step": 3, "loss": 1.0}, {"step": 3, "loss": 0.5}]
    assert [row["step"] for row in read_rows(path)] == [1, 2]


def test_jsonl_follows_no_link_for_dropped_rows(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n')
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "metrics.dropped.jsonl").symlink_to(tmp_path / "mine")
    with pytest.raises(ValueError, match="is a symbolic link"):
        JsonlSink(path, resume_step=1)
    assert (tmp_path / "mine").read_text() == "mine" and len(read_rows(path)) == 2


def test_plain_lines_show_every_number():
    out = io.StringIO()
    display = make_display(Console(file=out, width=80), title="demo", steps=20, every=10)
    for step in range(1, 21):
        display.step({**ROW, "step": step})
    lines = out.getvalue().splitlines()
    assert [line.split("/20")[0].split()[-1] for line in lines] == ["1", "10", "20"]
    pieces = ("loss 5.432199", "lr 3.00e-04", "grad 1.250", "time 352 ms", "tok/s/dev 5,818", "MFU n/a")
    assert [piece for piece in (*pieces, "input wait 0.3%") if piece not in lines[0]] == []


def test_panel_is_drawn_on_a_terminal():
    out = io.StringIO()
    display = make_display(Console(file=out, width=100, force_terminal=True), title="demo nvfp4", steps=3)
    for step in (1, 2, 3):
        display.step({**ROW, "step": step, "loss": 5.0 - step, "mfu": 0.5})
    display.note("checkpoint written")
    display.close()
    shown = ("demo nvfp4", "2.000000", "50.0%", "checkpoint written", "█", "tok/s/dev")
    assert [text for text in shown if text not in out.getvalue()] == []


def test_duration_and_sparkline_texts():
    assert format_duration(59) == "0:59"
    assert format_duration(3725) == "1:02:05"
    assert bucket_means([1.0, 3.0, 5.0, 7.0], 2) == [2.0, 6.0]
    assert sparkline([0.0, 1.0]) == "▁█"


def test_damaged_lines_do_not_block_a_resume(tmp_path):
    path = tmp_path / "metrics.jsonl"
    good = [b'{"step": %d, "loss": 1.0}' % step for step in (1, 2, 3, 4)]
    bad = [b'\xff\xfe{"step": 2}', b"[1]", b'{"step": "x"}', b"[" * 100_000]
    path.write_bytes(b"\n".join([good[0], bad[0], bad[1], good[1], bad[2], bad[3], *good[2:]]) + b'\n{"ste')
    said = []
    sink = JsonlSink(path, resume_step=3, say=said.append)
    sink.write({"step": 4, "loss": 0.5})
    sink.close()
    assert [row["step"] for row in read_rows(path)] == [1, 2, 3, 4]
    assert len(said) == 2 and "5 damaged line(s) left out (line 2, 3, 5, 6, 9)" in said[0]
    assert said[1] == "1 rows after step 3, which are computed again, are kept in metrics.dropped.jsonl"


def test_last_line_cut_by_a_kill_is_not_reported(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n{"st')
    JsonlSink(path, resume_step=2, say=pytest.fail).close()
    assert path.read_bytes() == b'{"step": 1}\n{"step": 2}\n'


class Failing:
    """A sink that fails from its second row on."""

    def __init__(self):
        self.rows = 0

    def write(self, row):
        self.rows += 1
        if self.rows > 1:
            raise OSError(28, "No space left on device")

    def close(self):
        raise OSError(28, "No space left on device")


def test_sink_that_fails_is_dropped_with_one_line(tmp_path):
    """On its second row, in a thread of its own, or before its first row."""
    (tmp_path / "file").touch()
    for make, rows, words in (
        (lambda inner: inner, 2, "the log CANNOT BE WRITTEN: OSError"),
        (BackgroundSink, 2, "No space left"),
        (lambda inner: TensorBoardSink(tmp_path / "file" / "below"), 0, "goes on without it"),
    ):
        said, inner = [], Failing()
        sink = FaultTolerantSink("the log", lambda make=make, inner=inner: make(inner), said.append)
        for step in range(5):
            sink.write({**ROW, "step": step})
            time.sleep(0.02 * (make is BackgroundSink))
        sink.close()
        assert inner.rows == rows and len(said) == 1 and words in said[0]


class Refusing:
    """A file that takes nothing while `full`."""

    def __init__(self, file):
        self.file, self.full = file, True

    def write(self, data):
        if self.full:
            raise OSError(28, "No space left on device")
        return self.file.write(data)

    def __getattr__(self, name):
        return getattr(self.file, name)


def test_waiting_rows_are_written_at_close_or_reported(tmp_path):
    lost = "metrics.jsonl WAS NOT CLOSED: OSError: [Errno 28] No space left on device"
    for full, end in ((False, []), (True, [lost])):
        path, said = tmp_path / f"metrics-{full}.jsonl", []
        inner = JsonlSink(path)
        disk = inner._file = Refusing(inner._file)
        sink = FaultTolerantSink("metrics.jsonl", lambda inner=inner: inner, said.append)
        sink.write({"step": 1})
        disk.full = full
        sink.close()
        assert [row["step"] for row in read_rows(path)] == ([] if full else [1])
        assert [line.partition(";")[0] for line in said[1:]] == end


def test_rows_beyond_the_bound_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(JsonlSink, "MAX_RETAINED", 2)
    inner, said = JsonlSink(tmp_path / "metrics.jsonl"), []
    disk = inner._file = Refusing(inner._file)
    sink = FaultTolerantSink("metrics.jsonl", lambda: inner, said.append)
    for step in range(1, 5):
        disk.full = step < 4
        sink.write({"step": step})
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [3, 4]
    sink.close()
    assert said[1:] == ["metrics.jsonl is written again; 2 rows of it are lost"]


def test_sink_that_hangs_never_blocks_the_run():
    """A sink of a network that answers no more: rows pile up to a bound, then it is dropped; closing has a limit."""
    forever, said = threading.Event(), []

    class Hanging:
        def write(self, row):
            forever.wait()

        def close(self):
            pass

    sink = FaultTolerantSink("Weights & Biases", lambda: BackgroundSink(Hanging()), said.append)
    for step in range(BackgroundSink.MAX_QUEUED + 5):
        sink.write({"step": step})
    sink.close()
    forever.set()
    assert len(said) == 1 and "takes no rows any more" in said[0]


@pytest.mark.slow
def test_tensorboard_events_follow_the_protocol(tmp_path):
    """Oracle: tensorboardX's protocol buffers and its record writer, byte for byte."""
    from tensorboardX.proto.event_pb2 import Event, SessionLog
    from tensorboardX.proto.summary_pb2 import Summary
    from tensorboardX.record_writer import RecordWriter

    numbers = {"loss": 2.5, "validation_loss/[x] 数": 1e-9, "skipped": 0.0, "big": 1e300, "nan": float("inf")}
    values = [Summary.Value(tag=tag, simple_value=min(value, 3.5e38)) for tag, value in numbers.items()]
    wanted = [
        Event(wall_time=12.5, file_version="brain.Event:2"),
        Event(wall_time=1e9, step=300, session_log=SessionLog(status=SessionLog.START)),
        Event(wall_time=0.25, step=2**40, summary=Summary(value=values)),
    ]
    made = [
        metric_writers.file_version(12.5),
        metric_writers.session_start_event(300, 1e9),
        metric_writers.scalar_event(2**40, 0.25, numbers),
    ]
    assert [Event.FromString(data) for data in made] == wanted
    theirs = RecordWriter(str(tmp_path / "theirs"))
    for data in made:
        theirs.write(data)
    theirs.close()
    assert b"".join(map(metric_writers.frame_record, made)) == (tmp_path / "theirs").read_bytes()


def test_resumed_tensorboard_hides_rewritten_steps(tmp_path):
    sink = TensorBoardSink(tmp_path, resume_step=4)
    sink.write({"step": 5, "loss": 2.5, "flops_formula": "text", "mfu": None})
    sink.close()
    (file,) = tmp_path.iterdir()
    assert file.name.startswith("events.out.tfevents.")
    head = len(metric_writers.frame_record(metric_writers.file_version(0.0)))
    assert file.read_bytes()[head + 12 + 9 :].startswith(metric_writers.session_start_event(5, 0.0)[9:])


def test_compile_indicator_shows_a_clock(monkeypatch, until):
    """On a terminal it is drawn and taken away again; elsewhere there is a line, and one more every half minute."""
    monkeypatch.setattr(CompileIndicator, "LINE_S", 0.02)
    out = io.StringIO()
    with CompileIndicator(Console(file=out, force_terminal=False), shown=True):
        until(lambda: "still compiling, 0:" in out.getvalue())
    assert out.getvalue().startswith("compiling ...\n")
    until(lambda: "halfbyte-clock" not in {thread.name for thread in threading.enumerate()})  # silent once it is done
    screen = io.StringIO()
    with CompileIndicator(Console(file=screen, force_terminal=True), shown=True):
        until(lambda: "compiling ... 0:" in screen.getvalue())
    with CompileIndicator(Console(file=(quiet := io.StringIO())), shown=False):
        pass
    assert quiet.getvalue() == ""
