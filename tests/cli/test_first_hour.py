"""What a new user sees in the first hour: estimates, errors that can be followed, tables that fit 80 columns."""

import contextlib
import dataclasses
import io
import os
import signal
import threading
from functools import partial
from types import SimpleNamespace

import pytest
from rich.console import Console
from rich.text import Text

import halfbyte as hb
from halfbyte.cli import console, recipes, run_estimate, run_summary, terminal_signals
from halfbyte.cli.flag_parsing import flags_in, known_flags, short_help
from halfbyte.cli.main import main, open_standard_streams
from halfbyte.cli.train import SHORT_HELP, Args, parse, with_flags
from halfbyte.data import preparation, prepare
from halfbyte.data.shard_files import system_errors
from halfbyte.data.text_files import find_files
from halfbyte.devices import DEVICES
from halfbyte.io.install_command import install_command
from halfbyte.plan.rate_calibration import calibration_note
from halfbyte.study.equivalence_test import parse_margin
from halfbyte.study.study_plan import seed_range
from halfbyte.train import progress_display
from halfbyte.train.run_presets import run_config

ROW = {"loss": 1.0, "learning_rate": 1e-3, "grad_norm": 1.0, "step_time_s": 122.0, "tflops_per_device": 0.1,
       "tokens_per_s_per_device": 9.0}  # fmt: skip


def test_panel_counts_from_the_first_step(monkeypatch):
    """A first step of 122 s shows as one; what runs after compilation is not called compiling."""
    now = [0.0]
    monkeypatch.setattr(progress_display.time, "monotonic", lambda: now[0])
    screen = Console(file=io.StringIO(), force_terminal=True, width=80)
    panel = progress_display.PanelDisplay(screen, title="t", steps=10_000)
    panel._live.stop()
    panel.begin("data")
    panel.begin("step")
    now[0] = 100.0
    shown = Console(width=80, file=io.StringIO())
    shown.print(panel._picture())
    assert "running step 1 ... 1:40" in shown.file.getvalue() and "compil" not in shown.file.getvalue()
    now[0] = 122.0
    panel.step({**ROW, "step": 1})
    assert panel._elapsed(now[0]) == "2:02, 338:51:18 left"
    panel.begin("save")
    now[0] = 130.0
    assert panel._status(now[0]).plain == "writing a checkpoint ... 0:08"


def test_ctrl_c_is_acknowledged_through_the_display():
    said, (reading, writing) = [], os.pipe()
    feedback = terminal_signals.TerminalFeedback(first=lambda: "after this step", say=said.append)
    os.write(writing, bytes([signal.SIGTERM, signal.SIGINT]))
    os.close(writing)
    with terminal_signals.terminal_feedback(feedback):
        terminal_signals._listen(reading, True)
    assert said == ["halfbyte: Ctrl-C: after this step"]


@pytest.mark.parametrize(
    "recipe, device, words",
    [("nvfp4", "h200", "is slower than bf16"), ("fp8", "h200", "no faster than bf16"), ("nvfp4", "cpu", None),
     ("bf16", "h200", None), ("nvfp4", "b200", None)],
)  # fmt: skip
def test_recipe_slower_than_bf16_is_announced(recipe, device, words):
    """llama-350m on an H200 runs fp8 at 0.941x and nvfp4 at 0.927x of bf16."""
    config = dataclasses.replace(run_config("llama-350m"), recipe=recipe)
    estimate, *notes = run_estimate.start_notes(config, 2048, DEVICES[device], 1, steps=100)
    assert estimate.startswith("estimate: about ")
    assert notes == [] if words is None else words in notes[0]


def test_estimate_of_a_run_that_accumulates_is_that_of_its_whole_batch(monkeypatch):
    monkeypatch.setattr(run_estimate, "cpu_flops", lambda: 1e11)
    demo = dataclasses.replace(run_config("demo"), batch=8)
    times = [
        run_estimate.step_seconds(dataclasses.replace(demo, accumulate=count), 128, DEVICES["cpu"]) for count in (1, 4)
    ]
    assert times[0] == times[1] > 0


WIDER = {"embed": 256, "mlp": 1280, "heads": 8, "kv_heads": 4}


@pytest.mark.parametrize(
    "change, model, processor_s",
    [({}, {}, 0.485), ({"recipe": "bf16"}, {}, 0.305), ({"batch": 16}, {}, 0.86), ({}, WIDER, 1.22)],
)
def test_estimate_against_measured_steps(monkeypatch, change, model, processor_s):
    """Processor seconds of a step of the demo where the probe gave 92 GFLOP/s per core (JAX 0.10.2)."""
    monkeypatch.setattr(run_estimate, "cpu_flops", lambda: 92e9)
    config = run_config("demo")
    config = dataclasses.replace(config, model=config.model.replace(**model), **change)
    seconds = run_estimate.step_seconds(config, config.seq, DEVICES["cpu"])
    assert processor_s / 1.15 < seconds < processor_s * 1.15


def test_estimate_of_a_large_step(monkeypatch):
    """122 s on two cores that the probe gives 92 GFLOP/s each."""
    monkeypatch.setattr(run_estimate, "cpu_flops", lambda: 2 * 92e9)
    assert 122 / 1.15 < run_estimate.step_seconds(run_config("llama-60m"), 1024, DEVICES["cpu"]) < 122 * 1.15


def test_probe_does_not_count_waiting(monkeypatch):
    """Beside threads that spin, the speed of one core is still that of one core: GEMMs with threads of their own gave
    half of it, and llama-60m 319 s for a step of 122 s."""
    monkeypatch.setattr(run_estimate.os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    four = run_estimate.cpu_flops.__wrapped__()
    monkeypatch.setattr(run_estimate.os, "sched_getaffinity", lambda pid: {0})
    ended = threading.Event()
    spinning = [threading.Thread(target=lambda: [None for _ in iter(ended.is_set, True)]) for _ in range(4)]
    for thread in spinning:
        thread.start()
    try:
        one = run_estimate.cpu_flops.__wrapped__()
    finally:
        ended.set()
    assert 2 < four / one < 8
    notes = run_estimate.start_notes(run_config("demo"), 128, DEVICES["cpu"], 1, steps=10)
    assert "idle, within a factor of 2, and compiling first" in notes[0]


def test_suggested_run_ends_within_an_hour(monkeypatch):
    """Of 47k tokens on a CPU that computes 0.1 TFLOP/s."""
    monkeypatch.setattr(run_estimate, "visible_device", lambda: DEVICES["cpu"])
    monkeypatch.setattr(run_estimate, "cpu_flops", lambda: 1e11)
    rows = SimpleNamespace(tokens=47_000, rows=23)
    manifest = SimpleNamespace(vocab_size=8192, seq_len=2048, splits={"train": {"default": rows}})
    run, seconds = run_estimate.suggested_run(manifest)
    assert run.name == "demo" and seconds <= 3600 and run.steps * run.batch * 2048 <= 21 * 47_000
    assert run.model.vocab_size == 8192 and run.model.max_seq == 2048


@pytest.mark.parametrize("seconds, text", [(0.04, "about 40 ms"), (122, "about 2 min"), (1.2e6, "about 14 days")])
def test_rough_duration_has_one_unit(seconds, text):
    assert run_estimate.rough_duration(seconds) == text


def test_data_that_does_not_fit_is_one_error_with_a_command(tmp_path, capfd):
    (tmp_path / "a.py").write_text("x = 1\n" * 3000)
    prepare([tmp_path], tokenizer="bytes", out=tmp_path / "own", seq_len=1024, workers=1, text=(".py",), val_fraction=0)
    words = ["train", "--data", str(tmp_path / "own"), "--model.vocab-size", "64", "--batch=64"]
    assert main([*words, "--run-dir", str(tmp_path / "run")]) == 2
    said = capfd.readouterr().err
    text = " ".join(said.split())
    assert all(words in text for words in ("reads 128", "at most 512", "vocabulary of 64", "batch of 64"))
    command = next(line for line in said.splitlines() if line.startswith("  ") and " train " in line)
    fitted = parse(command.split(" train ")[1].split()).run
    assert (fitted.seq, fitted.model.max_seq, fitted.model.vocab_size) == (1024, 1024, 272)
    assert fitted.batch <= 18 and not (tmp_path / "run").exists()


def test_with_flags_replaces_values():
    words = ("demo", "--seq=128", "--model.max_seq", "512", "--steps", "3")
    assert with_flags(words, ("--seq", "9", "--model.max-seq", "9")) == [
        "demo", "--steps", "3", "--seq", "9", "--model.max-seq", "9",
    ]  # fmt: skip


def test_other_endings_are_text_on_request(tmp_path):
    (tmp_path / "a.py").write_text("pass")
    assert [file.kind for file in find_files([tmp_path], text=("py",))] == ["text"]
    with pytest.raises(ValueError, match="not the ending of a file name"):
        find_files([tmp_path], text=("*",))
    with pytest.raises(ValueError, match="empty name"):
        find_files([""])


def test_hashing_of_no_files_shows_no_bar(monkeypatch, tmp_path):
    """Without --validation a second bar stood at 0/1 bytes for good."""
    shown = []

    def meter(label, total, *, shown: bool, seen=shown):
        seen.append((total, shown))
        return contextlib.nullcontext(SimpleNamespace(advance=lambda amount: None))

    monkeypatch.setattr(preparation, "ProgressMeter", meter)
    (tmp_path / "a.txt").write_text("text")
    for files in (find_files([tmp_path]), []):
        preparation._fingerprints(files, progress=True)
    assert shown == [(4, True), (0, False)]


def test_text_in_pieces_is_wrapped_at_words(capsys):
    """A terminal of 10 columns cut `states` in two."""
    screen = console.WordWrap(10)
    for piece in ("of the U", "nited st", "ates\nwe the", " incomprehensibilities", " x"):
        screen.write(piece)
    screen.close()
    assert capsys.readouterr().out == "of the \nUnited \nstates\nwe the incomprehensibilities x"
    plain = console.WordWrap(None)
    plain.write("of the United states and more\n")
    assert capsys.readouterr().out == "of the United states and more\n"


def test_summary_of_a_run_cuts_no_word(monkeypatch):
    monkeypatch.setattr(run_summary, "ngram_baselines", lambda dataset: {"unigram": 5.9529, "bigram": 4.1632})
    screen = console.PlainConsole(width=80, force_terminal=True, file=io.StringIO())
    result = SimpleNamespace(step=12, validation={"all": 5.6705})
    run_summary.show_baselines(None, result, screen.say)
    run_summary.show_sample(("The", "word " * 40), screen)
    lines = Text.from_ansi(screen.file.getvalue()).plain.splitlines()
    assert max(map(len, lines)) <= 80 and set(" ".join(lines[5:]).split()[3:]) == {"word"}
    assert "  bigram model, back-off   4.1632   this model is 1.507 worse" in lines


def test_progress_has_a_clock_before_the_first_is_done(monkeypatch):
    """While programs were compiled the screen stood still for as long."""
    now, shown = [0.0], io.StringIO()
    screen = partial(Console, file=shown, force_terminal=True, width=80, get_time=lambda: now[0])
    monkeypatch.setattr(console, "Console", lambda **_: screen())
    with console.progress("linears"):
        now[0] = 75.0
    assert "0:01:15" in shown.getvalue()


def test_recipes_fit_80_columns(monkeypatch, capsys):
    monkeypatch.setattr(recipes, "console", lambda: console.PlainConsole(width=80, force_terminal=True))
    recipes.show_all()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) < 80 and max(map(len, lines)) <= 80 and not any("…" in line for line in lines)
    assert {line.split(" ")[0] for line in lines} >= set(hb.recipe_names())


def test_table_wider_than_the_terminal_is_transposed(monkeypatch, capsys):
    monkeypatch.setattr(console, "console", lambda: console.PlainConsole(width=60))
    console.print_table([f"column {n}" for n in range(9)], [[f"value {n}" for n in range(9)]])
    shown = capsys.readouterr().out
    assert "…" not in shown and [line.split() for line in shown.splitlines() if "8" in line] == [
        ["column", "8", "value", "8"]
    ]


def test_help_of_train_lists_ten_flags(capsys):
    with pytest.raises(SystemExit):
        parse(["--help"])
    shown = capsys.readouterr().out
    assert len(SHORT_HELP) == 10 and len(shown.splitlines()) < 40 and max(map(len, shown.splitlines())) <= 80
    known = known_flags(Args, [], {"default": Args(run=run_config("demo"))})
    assert flags_in(short_help("x", "", SHORT_HELP)) and {flag.split()[0] for flag in SHORT_HELP} <= set(known)


def test_plan_of_hopper_does_not_mention_blackwell():
    notes = {name: calibration_note(DEVICES[name], 0.2) for name in ("h200", "gb300")}
    assert "speedups of nvfp4" not in notes["h200"] and "speedups of nvfp4" in notes["gb300"]


def test_plan_silences_xla_warnings(monkeypatch, capfd):
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "x")
    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL")
    assert main(["plan", "--nope"]) == 2 and os.environ["TF_CPP_MIN_LOG_LEVEL"] == "2"


def test_extra_is_installed_from_the_checkout():
    from pathlib import Path

    root = Path(hb.__file__).resolve().parents[2]
    assert install_command("plan") == f"pip install -e '{root}[plan]'"


def test_export_names_the_recipe_that_shares_scales():
    from halfbyte.cli.export import warnings

    mismatch = SimpleNamespace(group="qkv", layer=0, ratio=1.5)
    *_, last = warnings(SimpleNamespace(mismatches=[mismatch]))
    assert "nvfp4_shared_scales" in last and hb.recipe("nvfp4_shared_scales").shared_scales


def test_recipe_and_policy_print_as_tables():
    made = str(hb.recipe("nvfp4")).splitlines()
    assert made[0].startswith("recipe nvfp4: ") and len(made) == 7 and "  dgrad_dy  nvfp4 1d stochastic" in made
    made = str(hb.policy("all_linear; layers[-4:]=bf16", hb.recipe("nvfp4"))).splitlines()
    assert len(made) >= 3 and max(map(len, made)) < 100 and any("layers[-4:]: bf16" in line for line in made)


def test_requested_report_is_not_printed_again(capfd):
    import jax.numpy as jnp

    fn = hb.apply_recipe(lambda params, x: x @ params["reported"], "bf16")
    args = {"reported": jnp.ones((32, 32))}, jnp.ones((32, 32))
    assert "1 dots replaced" in str(fn.report(*args))
    fn(*args)
    assert "apply_recipe" not in capfd.readouterr().err


def test_full_disk_is_an_error_of_the_system(tmp_path):
    with pytest.raises(OSError, match="No space left"), system_errors(tmp_path):
        raise RuntimeError("write() failed: No space left on device; writing x")


def test_ascii_output_does_not_end_a_command(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr("sys.stdout", stream)
    open_standard_streams()
    stream.write("±")
    stream.flush()
    assert stream.buffer.getvalue() == b"\\xb1"


@pytest.mark.parametrize(
    "words, said",
    [
        (["playbook", "demo", "--snr", "nan"], "--snr must be a number of decibels, got nan"),
        (["parity", "demo", "--radar", "-7"], "--radar must be -1 or more, got -7"),
        (["generate", "x", "--prompt", "\udcff"], "not valid UTF-8"),
        (["data", "prepare", "", "--tokenizer", "bytes", "--out", "x"], "empty name"),
    ],
)
def test_input_out_of_range_is_one_paragraph(capfd, words, said):
    assert main(words) == 2
    shown = capfd.readouterr().err
    assert said in " ".join(shown.split()) and "Traceback" not in shown


def test_margins_and_seeds_have_limits():
    with pytest.raises(ValueError, match="at most 50%"):
        parse_margin("1e9%")
    with pytest.raises(ValueError, match="seeds must be at most 1,000"):
        seed_range(100_000_000)


@pytest.mark.parametrize("name", ["olmoe-1b-7b", "mixtral-8x7b"])
def test_every_published_preset_is_a_run(name):
    config = run_config(name)
    assert config.model.experts and config.policy == "experts"
