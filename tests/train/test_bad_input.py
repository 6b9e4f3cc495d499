"""Bad input through the command itself: one paragraph, exit 2, before any step, nothing overwritten."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys

import pytest
from tiny import MODEL, tiny

from halfbyte.cli.main import main
from halfbyte.data import prepare
from halfbyte.io import dataclass_json

BYTES = dataclasses.replace(MODEL, vocab_size=272)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A small data set of bytes in rows of 32."""
    folder = tmp_path_factory.mktemp("data")
    text = folder / "text.jsonl"
    lines = [json.dumps({"text": f"document {number}: " + "abc def " * 40}) for number in range(60)]
    text.write_text("\n".join(lines))
    prepare([text], tokenizer="bytes", out=folder / "out", seq_len=32, val_fraction=0.2)
    return folder / "out"


@pytest.fixture
def attempt(tmp_path, capfd):
    """attempt(config, *flags) -> stderr of a refused run; checks exit code 2 and that no step was run."""

    def refused(config, *flags, run_dir=None):
        file = tmp_path / "in.json"
        dataclass_json.save_config(config, file)
        directory = run_dir or tmp_path / "run"
        before = snapshot(directory)
        code = main(["train", "--config", str(file), "--run-dir", str(directory), *flags])
        error = capfd.readouterr().err
        assert code == 2, error
        assert snapshot(directory) == before
        assert "Traceback" not in error
        assert error.count("halfbyte:") == 1
        return " ".join(error.split())

    return refused


def snapshot(directory):
    """Every file under a directory and its content, the lock's aside."""
    if not directory.exists():
        return None
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file() and path.name != ".lock"}


def with_data(directory, **changes):
    return tiny(data=str(directory), model=BYTES, **changes)


@pytest.mark.slow
def test_mesh_that_does_not_divide(attempt):
    assert "devices" in attempt(tiny(mesh="fsdp=3"))
    assert "kv_heads" in attempt(tiny(mesh="tensor=4,fsdp=2"))
    assert "the global batch is 4" in attempt(tiny(mesh="data=8", batch=4))


@pytest.mark.slow
def test_shards_that_cut_a_block(attempt):
    assert "not a multiple of 16" in attempt(tiny(mesh="fsdp=8"))


@pytest.mark.slow
def test_backend_that_cannot_serve(attempt):
    error = attempt(tiny(), "--precision.backend", "native", "--mesh", "data=8")
    assert "layers/mlp/gate" in error
    assert "native" in error


@pytest.mark.slow
def test_model_that_cannot_fit(attempt):
    huge = dataclasses.replace(MODEL, embed=65536, mlp=262144, layers=64)
    error = attempt(tiny(model=huge, mesh="data=8"))
    assert "GiB a device" in error
    assert "larger mesh" in error


@pytest.mark.slow
def test_missing_and_tiny_data(attempt, prepared, tmp_path):
    assert "nowhere" in attempt(tiny(data=str(tmp_path / "nowhere")))
    (tmp_path / "empty").mkdir()
    assert "empty" in attempt(tiny(data=str(tmp_path / "empty")))
    assert "fewer than one global batch" in attempt(with_data(prepared, batch=4096, mesh="data=8"))


@pytest.mark.slow
def test_token_outside_the_vocabulary(attempt, prepared):
    error = attempt(tiny(data=str(prepared), mesh="data=8"))
    assert "the model a vocabulary of 64" in error
    assert "--model.vocab-size 272" in error  # 257, rounded up; the flag makes the run work


@pytest.mark.slow
def test_rows_of_another_length(attempt, prepared):
    assert "rows have 32 tokens" in attempt(with_data(prepared, seq=64, mesh="data=8"))


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["missing", "truncated", "duplicated", "changed"])
def test_damaged_shards_are_named_at_start(attempt, prepared, tmp_path, damage):
    copy = tmp_path / "copy"
    shutil.copytree(prepared, copy)
    shard = sorted(copy.glob("*.array_record"))[0]
    content = shard.read_bytes()
    if damage == "missing":
        shard.unlink()
    elif damage == "truncated":
        shard.write_bytes(content[:-100])
    elif damage == "duplicated":
        shard = shard.with_name("again-" + shard.name)
        shard.write_bytes(content)
    else:
        shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert shard.name in attempt(with_data(copy, mesh="data=8"))


@pytest.mark.slow
def test_unknown_flag_names_the_nearest(capfd):
    assert main(["train", "--optimizer.learning-rte", "1"]) == 2
    assert "--optimizer.learning-rate" in capfd.readouterr().err


@pytest.mark.parametrize(
    "flags, words",
    [
        (["lama3-8b"], "llama3-8b"),
        (["demo", "--recipe", "nvfp"], "nvfp4"),
        (["demo", "--config", "x.json"], "x.json"),
        (["--config", "no-such.json"], "no-such.json"),
        (["demo", "--steps", "0"], "steps must be 1 or more"),
        (["demo", "--optimizer.warmup", "5000"], "warmup of 5000 steps"),
        (["demo", "--log.every", "0"], "log.every must be 1 or more, got 0"),
        (["demo", "--optimizer.warmup", "inf"], "optimizer.warmup must be 0 or more, got inf"),
        (["demo", "--optimizer.learning-rate", "nan"], "optimizer.learning_rate must be above 0, got nan"),
        (["demo", "--precision.switch-at", "inf"], "precision.switch_at must be 0 (never)"),
        (["demo", "--seed", "-1"], "seed must be 0 or more, got -1"),
        (["demo", "--seed", "99999999999999999999"], "seed must be at most"),
        (["demo", "--z-loss", "nan"], "z_loss must be 0 or more, got nan"),
        (["demo", "--watchdog-s", "-5"], "watchdog_s must be 0 (off) or more seconds, got -5"),
        (["demo", "--model.norm-eps", "-1"], "norm_eps must be above 0"),
        (["demo", "--model.rope-theta", "nan"], "rope_theta must be above 0"),
        (["demo", "--model.layers", "100000000"], "layers must be at most 10,000, got 100000000"),
        (["demo", "--model.vocab-size", "2000000000", "--model.embed", "2000000000"], "parameters, more than"),
        (["demo", "--steps", "1" + "0" * 60], "steps must be at most"),
        (["demo", "--checkpoint.keep-last", "0"], "checkpoint.keep_last must be 1 or more"),
        (["demo", "--checkpoint.every", "-1"], "checkpoint.every must be 0 (only the last) or more"),
        (["demo", "--validation.batches", "-1"], "validation.batches must be 0"),
        (["demo", "--mesh", "fsdp=²"], "is not AXIS=SIZE"),
        (["demo", "--name", "../../escape"], "name must be 1 to 100"),
        (["demo", "--run-dir", "x" * 300], "the path is too long"),
        (["demo", "--run-dir", "a/" * 2000], "the path is too long"),
        (["demo", "--run-dir", "a\nb"], "control character"),
        (["demo", "--compile-cache", "y" * 300], "--compile-cache"),
    ],
)
def test_bad_flags(flags, words, capfd, tmp_path, monkeypatch):
    """One paragraph, exit 2, before anything is compiled or written."""
    monkeypatch.chdir(tmp_path)
    assert main(["train", *flags]) == 2
    error = capfd.readouterr().err
    assert words in " ".join(error.split())
    assert "Traceback" not in error and error.count("halfbyte:") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "content, words",
    [
        (b"[" * 100_000, "levels deep"),
        (b'{"name":' * 5000, "levels deep"),
        (b"\xff\xfe{}", "not UTF-8"),
        (b'{"name": "a", "name": "b"}', "stands twice"),
        (b'{"steps": NaN}', "not JSON"),
        (b" " * (1 << 21), "more than 1,048,576 bytes"),
        (b'{"name": "x\\u0000y"}', "name must be 1 to 100"),
    ],
)
def test_bad_config_files(content, words, capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.json").write_bytes(content)
    assert main(["train", "--config", "in.json"]) == 2
    error = capfd.readouterr().err
    assert words in " ".join(error.split()) and "Traceback" not in error
    assert [path.name for path in tmp_path.iterdir()] == ["in.json"]


def test_a_name_with_nul_in_a_config(attempt):
    with pytest.raises(ValueError, match="name must be"):
        tiny(name="a\0b")


@pytest.mark.slow
@pytest.mark.parametrize("name", [".lock", "config.json", "metrics.jsonl", "checkpoints"])
def test_links_out_of_the_run_directory_are_not_followed(attempt, tmp_path, name):
    run, outside = tmp_path / "linked", tmp_path / "outside"
    run.mkdir()
    dataclass_json.save_config(tiny(mesh="data=8"), run / "config.json")
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(outside)
    error = attempt(tiny(mesh="data=8"), run_dir=run)
    # Of a link in place of its config a directory is not known to be that of a run.
    assert ("holds no run" if name == "config.json" else f"{name} is a symbolic link") in error
    assert not outside.exists()


@pytest.mark.slow
def test_the_directory_of_a_model_is_no_run(attempt, tmp_path):
    """A Hugging Face model has config.json and tokenizer.json; with --allow-change both would be overwritten."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "hidden_size": 64}')
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    assert "is not that of a run" in attempt(tiny(mesh="data=8"), "--allow-change", run_dir=tmp_path / "model")


@pytest.mark.slow
def test_an_error_after_the_directory_was_made_leaves_none(tmp_path, monkeypatch, capfd):
    """Whatever fails before the first step: no half-made run is left to resume."""
    from halfbyte.train import loop

    def fail(*args, **kwargs):
        assert (tmp_path / "a" / "run" / "config.json").exists()
        raise PermissionError("the compiler gave up")

    monkeypatch.setattr(loop.Loop, "run", fail)
    dataclass_json.save_config(tiny(mesh="data=8"), tmp_path / "in.json")
    assert main(["train", "--config", str(tmp_path / "in.json"), "--run-dir", str(tmp_path / "a" / "run")]) == 2
    assert "gave up" in capfd.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["in.json"]


def test_a_directory_that_another_process_holds(attempt, tmp_path):
    lock = f"l = RunLock({str(tmp_path / 'held')!r}); print(1, flush=True); input()"
    code = f"from halfbyte.checkpoint.locks import RunLock; {lock}"
    holder = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    holder.stdout.readline()
    dataclass_json.save_config(tiny(mesh="data=8"), tmp_path / "held" / "config.json")
    error = attempt(tiny(mesh="data=8"), run_dir=tmp_path / "held")
    assert f"pid {holder.pid}" in error
    holder.communicate("")


@pytest.mark.slow
def test_a_backend_that_nobody_asks_for_has_a_name_all_the_same(attempt):
    assert "unknown backend 'nope'" in attempt(tiny(recipe="bf16", mesh="data=8"), "--precision.backend", "nope")


@pytest.mark.slow
@pytest.mark.parametrize("name", [".lock", "metrics.jsonl", "config.json", "run.json"])
def test_a_pipe_in_a_run_directory_is_named_and_not_waited_for(attempt, tmp_path, name):
    (tmp_path / "run").mkdir()
    config = tiny(mesh="data=8", recipe="bf16")
    dataclass_json.save_config(config, tmp_path / "run" / "config.json")
    (tmp_path / "run" / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / "run" / name)
    assert name in attempt(config, run_dir=tmp_path / "run")


@pytest.mark.slow
def test_resume_with_another_model_recipe_or_dtype(attempt, tmp_path):
    config = tiny(mesh="data=8")
    (tmp_path / "old").mkdir()
    dataclass_json.save_config(config, tmp_path / "old" / "config.json")
    wider = dataclasses.replace(config, model=dataclasses.replace(MODEL, mlp=128), recipe="bf16")
    error = attempt(wider, "--optimizer.mu-dtype", "bfloat16", run_dir=tmp_path / "old")
    assert "model.mlp: 64 -> 128" in error
    assert "recipe: nvfp4 -> bf16" in error
    assert "optimizer.mu_dtype: float32 -> bfloat16" in error
    assert "--allow-change" in error


@pytest.mark.slow
def test_a_directory_with_other_files(attempt, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("precious")
    assert "thesis.tex" in attempt(tiny(), run_dir=tmp_path / "mine")
