"""Bad input through the command itself: one paragraph, exit 2, before any step, nothing overwritten."""

import dataclasses
import functools
import json
import os
import shutil

import pytest

from halfbyte.cli.main import main
from halfbyte.data import prepare
from halfbyte.io import dataclass_json
from tiny import MODEL, tiny

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


@pytest.mark.slow
def test_run_that_cannot_be_computed_is_refused(attempt, prepared, tmp_path):
    (tmp_path / "empty").mkdir()
    damaged = shutil.copytree(prepared, tmp_path / "damaged")
    shard = sorted(damaged.glob("*.array_record"))[0]
    shard.write_bytes(shard.read_bytes()[:-100])
    huge = dataclasses.replace(MODEL, embed=65536, mlp=262144, layers=64)
    on_data = functools.partial(tiny, model=BYTES, mesh="data=8")
    native = ("--precision.backend", "native")
    for config, flags, words in (
        (tiny(mesh="fsdp=3"), (), "devices"),
        (tiny(mesh="tensor=4,fsdp=2"), (), "kv_heads"),
        (tiny(mesh="data=8", batch=4), (), "the global batch is 4"),
        (tiny(mesh="fsdp=8"), (), "not a multiple of 16"),
        (tiny(mesh="data=8"), native, "layers/mlp/gate"),
        (tiny(recipe="bf16", mesh="data=8"), ("--precision.backend", "nope"), "unknown backend 'nope'"),
        (tiny(model=huge, mesh="data=8"), (), "larger mesh"),
        (tiny(data=str(tmp_path / "nowhere")), (), "nowhere"),
        (tiny(data=str(tmp_path / "empty")), (), "empty"),
        (on_data(data=str(damaged)), (), shard.name),
        (on_data(data=str(prepared), batch=4096), (), "fewer than one global batch"),
        (on_data(data=str(prepared), seq=64), (), "rows have 32 tokens"),
        # 257, rounded up; the flag makes the run work
        (tiny(data=str(prepared), mesh="data=8"), (), "--model.vocab-size 272"),
    ):
        assert words in attempt(config, *flags)


@pytest.mark.parametrize("flags, words", [
    (["lama3-8b"], "llama3-8b"),
    (["demo", "--recipe", "nvfp"], "nvfp4"),
    (["demo", "--optimizer.learning-rte", "1"], "--optimizer.learning-rate"),
    (["demo", "--config", "x.json"], "x.json"),
    (["--config", "no-such.json"], "no-such.json"),
    (["demo", "--optimizer.warmup", "5000"], "warmup of 5000 steps"),
    (["demo", "--optimizer.learning-rate", "nan"], "optimizer.learning_rate must be above 0, got nan"),
    (["demo", "--precision.switch-at", "inf"], "precision.switch_at must be 0 (never)"),
    (["demo", "--seed", "99999999999999999999"], "seed must be at most"),
    (["demo", "--watchdog-s", "-5"], "watchdog_s must be 0 (off) or more seconds, got -5"),
    (["demo", "--model.rope-theta", "nan"], "rope_theta must be above 0"),
    (["demo", "--model.layers", "100000000"], "layers must be at most 10,000, got 100000000"),
    (["demo", "--model.vocab-size", "2000000000", "--model.embed", "2000000000"], "parameters, more than"),
    (["demo", "--checkpoint.every", "-1"], "checkpoint.every must be 0 (only the last) or more"),
    (["demo", "--name", "../../escape"], "name must be 1 to 100"),
    (["demo", "--run-dir", "x" * 300], "the path is too long"),
    (["demo", "--run-dir", "a\nb"], "control character"),
    (["demo", "--compile-cache", "y" * 300], "--compile-cache"),
])  # fmt: skip
def test_bad_flag_is_one_paragraph_and_exit_2(flags, words, capfd, tmp_path, monkeypatch):
    """Before anything is compiled or written."""
    monkeypatch.chdir(tmp_path)
    assert main(["train", *flags]) == 2
    error = capfd.readouterr().err
    assert words in " ".join(error.split())
    assert "Traceback" not in error and error.count("halfbyte:") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_directory_that_is_no_run_of_ours_is_refused(attempt, tmp_path):
    """A Hugging Face model has config.json and tokenizer.json; with --allow-change both would be overwritten."""
    config, outside = tiny(mesh="data=8", recipe="bf16"), tmp_path / "outside"
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "hidden_size": 64}')
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    assert "is not that of a run" in attempt(config, "--allow-change", run_dir=tmp_path / "model")
    for name in (".lock", "config.json", "metrics.jsonl", "checkpoints", "run.json"):
        for kind in ("link", "pipe"):
            run = tmp_path / f"{kind}-{name}"
            run.mkdir()
            dataclass_json.save_config(config, run / "config.json")
            (run / name).unlink(missing_ok=True)
            (run / name).symlink_to(outside) if kind == "link" else os.mkfifo(run / name)
            error = attempt(config, run_dir=run)
            # With a link in place of its config a directory is not known to be that of a run.
            assert ("holds no run" if (kind, name) == ("link", "config.json") else name) in error
            assert not outside.exists()


@pytest.mark.slow
def test_error_before_the_first_step_leaves_no_directory(tmp_path, monkeypatch, capfd):
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
