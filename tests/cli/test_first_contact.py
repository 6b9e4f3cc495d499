"""The first minutes with the command: configs in three languages, another framework's arguments, completion. Oracles:
the presets themselves, the table of docs/from-maxtext.md, and bash."""

import dataclasses
import re
import subprocess
from pathlib import Path

import pytest

from halfbyte.cli import main as cli
from halfbyte.cli.flag_parsing import config_for_name
from halfbyte.cli.maxtext_flags import KEYS, join_command, maxtext_arguments, translated
from halfbyte.cli.train import parse
from halfbyte.distributed import parse_mesh
from halfbyte.io import dataclass_json
from halfbyte.train.run_presets import run_config

ROOT = Path(__file__).resolve().parents[2]
TOML = 'run = "llama-60m"\nsteps = 7\n\n[optimizer]\nlearning_rate = 0.5\n'
YAML = "run: llama-60m\nsteps: 7\noptimizer:\n  learning_rate: 0.5\n"
JSON = '{"run": "llama-60m", "steps": 7, "optimizer": {"learning_rate": 0.5}}'


@pytest.mark.slow
@pytest.mark.parametrize("name, text", [("a.toml", TOML), ("a.yaml", YAML), ("a.yml", YAML), ("a.json", JSON)])
def test_a_partial_config_in_any_language(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    base = run_config("llama-60m")
    wanted = dataclasses.replace(base, steps=7, optimizer=dataclasses.replace(base.optimizer, learning_rate=0.5))
    assert parse(["--config", str(tmp_path / name)]).run == wanted
    assert parse(["--config", str(tmp_path / name), "--steps", "9"]).run == dataclasses.replace(wanted, steps=9)


def test_a_partial_config_is_a_run_for_every_command(tmp_path):
    """`parity`, `league`, `playbook`, `bench` and `plan` take what `train --config` takes."""
    (tmp_path / "small.json").write_text('{"run": "llama-60m", "batch": 4}')
    found = config_for_name(str(tmp_path / "small.json"))
    assert found == dataclasses.replace(run_config("llama-60m"), batch=4)


@pytest.mark.slow
def test_a_partial_config_over_a_named_run_with_another_model(tmp_path):
    (tmp_path / "a.toml").write_text('model = "llama-125m"\nbatch = 2\n')
    made = parse(["llama-60m", "--config", str(tmp_path / "a.toml")]).run
    assert (made.name, made.model.name, made.batch) == ("llama-60m", "llama-125m", 2)
    assert made.optimizer == run_config("llama-60m").optimizer


def test_a_whole_config_still_is_one(tmp_path):
    dataclass_json.save_config(run_config("llama-350m"), tmp_path / "config.json")
    assert parse(["--config", str(tmp_path / "config.json")]).run == run_config("llama-350m")
    with pytest.raises(ValueError, match="not both"):
        parse(["demo", "--config", str(tmp_path / "config.json")])


@pytest.mark.parametrize(
    "name, text, words",
    [
        ("a.toml", "steps = ", "is not TOML"),
        ("a.toml", "a = " + "[" * 5000, "is not TOML"),
        ("a.yaml", "steps: [", "is not YAML"),
        ("a.yaml", "a: &x [1]\nb: *x", "aliases"),
        ("a.yaml", "steps: !!python/object/apply:os.system ['true']", "is not YAML"),
        ("a.yaml", "[" * 1000, "is not YAML"),
        ("a.yaml", "- 1", "one JSON object or table"),
        ("a.yaml", "3: 4", "one JSON object or table"),
        ("a.toml", "stepz = 3", "a.toml: config has no field stepz; did you mean steps?"),
        ("a.toml", 'model = "llama-61m"', "llama-60m"),
        ("a.toml", "run = 3", "over the run"),
        ("a.toml", 'steps = "many"', "steps must be int"),
        ("a.toml", "when = 1979-05-27", "no field when"),
    ],
)
def test_configs_that_are_none(tmp_path, name, text, words, capfd):
    (tmp_path / name).write_text(text)
    assert cli.main(["train", "--config", str(tmp_path / name)]) == 2
    error = capfd.readouterr().err
    assert words in " ".join(error.split()) and "Traceback" not in error


def table_keys():
    """Every MaxText key in the tables of the page, with a value that it shows or that fits."""
    text = (ROOT / "docs" / "from-maxtext.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`[^|]+) \|", text.split("## Flags")[1].split("## What")[0], re.M)
    words = [word for row in rows for word in re.findall(r"`([a-z][a-z0-9_]*(?:=[^`]+)?)`", row)]
    return [word for word in words if "_" in word.partition("=")[0] or word.partition("=")[0] in KEYS]


VALUES = {"dtype": "bfloat16", "mu_dtype": "bfloat16", "lr_schedule_type": "cosine", "model_name": "llama3-8b"}
VALUES |= {"remat_policy": "full", "scan_layers": "true", "enable_tensorboard": "false", "profiler": "xplane"}
VALUES |= {"warmup_steps_fraction": "0.1", "learning_rate_final_fraction": "0.1", "wsd_decay_steps_fraction": "0.1"}
VALUES |= {"opt_type": "muon", "adam_b1": "0.9", "adam_b2": "0.95", "max_target_length": "128", "steps": "500"}


@pytest.mark.slow(
    fast_cases=[
        "run_name",
        "base_output_directory",
        "per_device_batch_size",
        "remat_policy",
        "scan_layers",
        "attention=cudnn_flash_te",
        "dataset_type=grain",
        "grain_train_files",
        "eval_interval",
        "checkpoint_period",
        "enable_tensorboard",
        "skip_first_n_steps_for_profiler",
        "profiler_steps",
    ]
)
@pytest.mark.parametrize("word", table_keys())
def test_every_key_of_the_page_has_a_translation_that_parses(word):
    key, equals, _ = word.partition("=")
    answer = translated(word if equals else f"{key}={VALUES.get(key, '2')}")
    assert "not known" not in answer and "no counterpart" not in answer
    if answer.startswith("#"):
        return
    flags = answer.partition("  #")[0].replace("*DEVICES", "").replace("START+2-1", "20").replace("+1", "")
    parse(flags.split())  # SystemExit where a flag does not exist


def test_the_page_and_the_table_know_the_same_keys():
    named = {word.partition("=")[0] for word in table_keys()}
    assert len(named) > 35
    assert named | {"quantization"} == set(KEYS)


def test_a_command_of_maxtext_is_answered_line_by_line(capfd):
    words = "base.yml model_name=llama3-8b quantization=te_nvfp4 ici_fsdp_parallelism=4 ici_tensor_parallelism=2 what=3"
    assert cli.main(["train", *words.split()]) == 2
    error = capfd.readouterr().err
    for word in words.split():
        assert len(re.findall(rf"^  {re.escape(word)} +\S", error, re.M)) == 1
    assert "together: halfbyte train llama3-8b --recipe te_nvfp4 --mesh fsdp=4,tensor=2" in " ".join(error.split())
    assert parse(join_command(words.split()).split()[2:]).run.mesh == "fsdp=4,tensor=2"


def test_axes_between_slices_are_not_those_within():
    words = ["ici_fsdp_parallelism=8", "dcn_fsdp_parallelism=2", "dcn_data_parallelism=4"]
    mesh = join_command(words).partition("--mesh ")[2]
    assert parse_mesh(mesh) == {"dcn.data": 4, "dcn.fsdp": 2, "fsdp": 8}


def test_values_of_flags_are_no_arguments_of_maxtext():
    assert maxtext_arguments(["demo", "--mesh", "fsdp=2", "--run-dir=x", "--policy", "mlp/*=nvfp4"]) == []


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    from halfbyte.cli.completion import Args, run

    path = tmp_path_factory.mktemp("completion") / "halfbyte.bash"
    path.write_text(run(Args()).data["script"])
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    "typed, wanted",
    [
        ("halfbyte tr", {"train"}),
        ("halfbyte data", {"data"}),
        ("halfbyte data ", {"prepare", "verify", "show", "sample", "-h", "--help"}),
        ("halfbyte data prepare --tok", {"--tokenizer"}),
        ("halfbyte train demo --optimizer.learning", {"--optimizer.learning-rate"}),
        ("halfbyte plan --dev", {"--device"}),
    ],
)
def test_completion_in_bash(script, typed, wanted):
    """The script is sourced by bash itself and asked as the shell asks it."""
    words = typed.split(" ")
    array = " ".join(f"'{word}'" for word in words)
    ask = (
        f'source {script}; COMP_WORDS=({array}); COMP_CWORD={len(words) - 1}; _tyro_halfbyte; echo "${{COMPREPLY[@]}}"'
    )
    done = subprocess.run(["bash", "--norc", "-c", ask], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == wanted
