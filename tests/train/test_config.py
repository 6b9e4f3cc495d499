"""Oracle: what was written. Every named run survives JSON; every bad value names its field."""

import dataclasses

import pytest

from halfbyte.cli.flag_parsing import config_from_file
from halfbyte.cli.train import parse
from halfbyte.io import dataclass_json
from halfbyte.train import CheckpointConfig, LossScaleConfig
from halfbyte.train.run_directory import examine_directory
from halfbyte.train.run_identity import ChangedRun, check_run_directory
from halfbyte.train.run_presets import run_config, run_names


@pytest.mark.slow
def test_named_runs_survive_json(tmp_path):
    for name in run_names():
        config = run_config(name)
        dataclass_json.save_config(config, tmp_path / "config.json")
        assert config_from_file("", tmp_path / "config.json") == config
        assert config.model.name == name


def test_unknown_run_names_its_neighbour():
    with pytest.raises(ValueError, match=r"did you mean llama3-8b"):
        run_config("llama3-8")


@pytest.mark.parametrize("text, words", [
    ("", "is not JSON"),
    ("[1]", "one JSON object"),
    ("[" * 100_000, "levels deep"),
    (b"\xff\xfe{}", "not UTF-8"),
    ('{"name": "a", "name": "b"}', "stands twice"),
    ('{"steps": NaN}', "not JSON"),
    (" " * (1 << 21), "more than 1,048,576 bytes"),
    ('{"name": "x\\u0000y"}', "name must be 1 to 100"),
    ('{"name": "x", "stepz": 3}', "config.json: config has no field stepz; did you mean steps"),
    ('{"name": "x", "optimizer": {"learning_rte": 3}}', "no field optimizer.learning_rte"),
    ('{"name": "x", "steps": "many"}', "steps must be int, got 'many'"),
    ('{"name": "x", "model": {}}', "config lacks model.name and model.vocab_size"),
])  # fmt: skip
def test_bad_config_file_is_refused(tmp_path, text, words):
    """By name too where it is that of a run directory."""
    (tmp_path / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=words):
        config_from_file("", tmp_path / "config.json")
    with pytest.raises(ValueError, match="restore it from a copy") as refused:
        parse(["--run-dir", str(tmp_path)])
    assert f"{tmp_path}/config.json" in str(refused.value)


@pytest.mark.parametrize("changes, words", [
    ({"recipe": "nvfp5"}, "nvfp4"),
    ({"policy": "everything"}, "all_linear"),
    ({"mesh": "fdsp=2"}, "fsdp"),
    ({"steps": 0}, "steps must be 1 or more"),
    ({"batch": 16, "accumulate": 3}, "batch 16 does not split into 3"),
    ({"seq": 100_000}, "max_seq 512"),
    ({"seed": -1}, "seed must be 0 or more, got -1"),
    ({"z_loss": -1.0}, "z_loss"),
    ({"z_loss": float("nan")}, "z_loss must be 0 or more, got nan"),
    ({"remat": "half"}, "remat must be one of none, dots, full, quantized, got 'half'"),
    ({"on_divergence": "fp9"}, "on_divergence must be one of stop, fp8, bf16, got 'fp9'"),
    ({"name": "a\0b"}, "name must be"),
])  # fmt: skip
def test_bad_value_is_refused_by_field(changes, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(run_config("demo"), **changes)


def test_bad_loss_scale_and_keep_last_are_refused():
    assert LossScaleConfig(initial=0.5).initial == 0.5
    for value in (1000, 2.0**127):  # the inverse of the second is no normal number: every gradient would be zero
        with pytest.raises(ValueError, match=r"power of two, at most 2\*\*24, got"):
            LossScaleConfig(initial=value)
    with pytest.raises(ValueError, match=r"checkpoint\.keep_last must be 1 or more"):  # a run keeps its last
        CheckpointConfig(keep_last=0)


def test_differences_are_dotted():
    a = run_config("demo")
    b = dataclasses.replace(a, recipe="bf16", model=dataclasses.replace(a.model, layers=5))
    found = dataclass_json.field_differences(dataclass_json.to_dict(a), dataclass_json.to_dict(b))
    assert found == [("model.layers", 4, 5), ("recipe", "nvfp4", "bf16")]


@pytest.fixture
def started(tmp_path):
    """look(config, allow) at the directory of a run of the demo -> (config, the lines that it says)."""
    config = run_config("demo")
    dataclass_json.save_config(config, tmp_path / "config.json")

    def look(changed, *, allow=False):
        said = []
        examine_directory(tmp_path, changed, allow_change=allow, say=said.append)
        return [line for line in said if "no seal covers config.json" not in line]

    return config, look


def test_changed_run_is_refused_by_field(started):
    config, look = started
    assert look(config) == []
    changed = dataclasses.replace(
        config, recipe="bf16", optimizer=dataclasses.replace(config.optimizer, mu_dtype="bfloat16")
    )
    with pytest.raises(ChangedRun) as error:
        look(changed)
    assert "optimizer.mu_dtype: float32 -> bfloat16" in str(error.value)
    assert "recipe: nvfp4 -> bf16" in str(error.value)
    assert "--allow-change" in str(error.value)
    assert len(look(changed, allow=True)) == 2


def test_free_fields_may_change_and_steps_are_reported(started):
    config, look = started
    longer = dataclasses.replace(config, steps=999, mesh="fsdp=2", remat="full")
    assert look(longer) == [f"steps {config.steps} -> 999: the learning-rate schedule now ends at step 999"]


def test_directory_with_other_files_is_refused(tmp_path):
    check_run_directory(tmp_path / "new")
    check_run_directory(tmp_path)
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ValueError, match=r"holds no run \(found thesis.tex\)"):
        check_run_directory(tmp_path)
