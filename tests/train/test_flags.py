"""Flags of `halfbyte train`. Oracle: the config they should make."""

import contextlib
import dataclasses
import io
import re

import pytest

from halfbyte.cli.train import BOOLEAN_FLAGS, parse, split_run_name
from halfbyte.io import dataclass_json
from halfbyte.train.run_presets import run_config
from tiny import tiny


def test_run_name_is_split_from_flags():
    for words, name in (
        ("", ""), ("demo", "demo"), ("--steps 5 demo", "demo"), ("--data demo", ""),
        ("--steps=5 llama-60m", "llama-60m"), ("--allow-change llama-60m", "llama-60m"),
        ("--allow_change llama-60m", "llama-60m"),
    ):  # fmt: skip
        assert split_run_name(words.split())[0] == name, words


def test_flags_without_a_value_are_boolean():
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), pytest.raises(SystemExit):
        parse(["--help-all"])
    switches = {flag for pair in re.findall(r"(--[a-z.-]+), (--[a-z.]*no-[a-z.-]+)", shown.getvalue()) for flag in pair}
    assert switches and switches <= set(BOOLEAN_FLAGS)


def test_flags_change_fields_and_groups():
    words = "llama3-8b --recipe te_nvfp4 --mesh fsdp=8 --optimizer.learning-rate 1e-3 --model.layers 2"
    words += " --profile xprof --profile-start 3 --profile-stop 4 --distributed.cpu-devices 2"
    args, base = parse(words.split()), run_config("llama3-8b")
    optimizer = dataclasses.replace(base.optimizer, learning_rate=1e-3)
    model = dataclasses.replace(base.model, layers=2)
    expected = dataclasses.replace(base, recipe="te_nvfp4", mesh="fsdp=8", optimizer=optimizer, model=model)
    assert args.run == expected and parse([]).run == run_config("demo")
    assert (args.profiling.profile, args.profiling.profile_start, args.distributed.cpu_devices) == ("xprof", 3, 2)


@pytest.mark.slow
def test_config_file_and_run_directory_give_their_config(tmp_path):
    config = tiny(seed=7)
    dataclass_json.save_config(config, tmp_path / "config.json")
    assert parse(["--config", str(tmp_path / "config.json"), "--steps", "9"]).run == dataclasses.replace(
        config, steps=9
    )
    resumed = parse(["--run-dir", str(tmp_path)])
    assert resumed.run == config
    assert resumed.run_dir == str(tmp_path)
