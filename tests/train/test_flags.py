"""Flags of `halfbyte train`. Oracle: the config they should make."""

import contextlib
import dataclasses
import io
import re

import pytest
from tiny import tiny

from halfbyte.cli.train import BOOLEAN_FLAGS, parse, split_run_name
from halfbyte.io import dataclass_json
from halfbyte.train.run_presets import run_config


@pytest.mark.parametrize(
    "argv, name",
    [
        ([], ""),
        (["demo"], "demo"),
        (["--steps", "5", "demo"], "demo"),
        (["--data", "demo"], ""),
        (["--allow-change", "llama-60m"], "llama-60m"),
        (["--steps=5", "llama-60m"], "llama-60m"),
        (["--allow_change", "llama-60m"], "llama-60m"),
    ],
)
def test_the_name_of_the_run(argv, name):
    assert split_run_name(argv)[0] == name


def test_every_flag_without_a_value_is_known():
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), pytest.raises(SystemExit):
        parse(["--help-all"])
    switches = {flag for pair in re.findall(r"(--[a-z.-]+), (--[a-z.]*no-[a-z.-]+)", shown.getvalue()) for flag in pair}
    assert switches and switches <= set(BOOLEAN_FLAGS)


def test_no_arguments_is_the_demo():
    assert parse([]).run == run_config("demo")


def test_flags_change_fields_and_groups():
    args = parse(
        [
            "llama3-8b",
            "--recipe",
            "te_nvfp4",
            "--mesh",
            "fsdp=8",
            "--optimizer.learning-rate",
            "1e-3",
            "--model.layers",
            "2",
        ]
    )
    expected = run_config("llama3-8b")
    expected = dataclasses.replace(
        expected,
        recipe="te_nvfp4",
        mesh="fsdp=8",
        optimizer=dataclasses.replace(expected.optimizer, learning_rate=1e-3),
        model=dataclasses.replace(expected.model, layers=2),
    )
    assert args.run == expected


@pytest.mark.slow
def test_a_config_file_and_a_run_directory_give_their_config_back(tmp_path):
    config = tiny(seed=7)
    dataclass_json.save_config(config, tmp_path / "config.json")
    assert parse(["--config", str(tmp_path / "config.json"), "--steps", "9"]).run == dataclasses.replace(
        config, steps=9
    )
    resumed = parse(["--run-dir", str(tmp_path)])
    assert resumed.run == config
    assert resumed.run_dir == str(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"stepz": 3}', '{"steps": "x"}', '{"model": {"layers": 0}}'])
def test_a_damaged_config_of_a_run_directory_is_named(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match="config.json") as refused:
        parse(["--run-dir", str(tmp_path)])
    assert f"{tmp_path}/config.json" in str(refused.value) and "restore it from a copy" in str(refused.value)


@pytest.mark.slow
def test_scaled_rope_survives_flags():
    assert parse(["llama3.1-405b"]).run.model.rope_scaling == run_config("llama3.1-405b").model.rope_scaling


@pytest.mark.slow
def test_groups_beside_the_run():
    args = parse(
        ["--profile", "xprof", "--profile-start", "3", "--profile-stop", "4", "--distributed.cpu-devices", "2"]
    )
    assert (args.profiling.profile, args.profiling.profile_start, args.distributed.cpu_devices) == ("xprof", 3, 2)
