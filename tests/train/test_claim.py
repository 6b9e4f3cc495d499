"""Several starts into one directory, and a directory that goes away under a run. Oracle: files and exit codes."""

import contextlib
import io
import json
import os
import random
import shutil
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import jax.numpy as jnp
import pytest
from rich.console import Console

from halfbyte.checkpoint import LOCK_FILE, NAME, RunDirectoryLockedError, RunLock, bucket_copy, object_store, store
from halfbyte.cli.main import main
from halfbyte.io import dataclass_json
from halfbyte.train import CheckpointConfig, run_identity, train
from halfbyte.train.loop import Loop
from halfbyte.train.run_identity import RUN_MARKER_FILES, RunDirectoryClaim, RunIdentity, file_hash, save_identity
from tiny import ONE_LAYER, tiny

pytestmark = pytest.mark.usefixtures("one_device")


def test_losing_start_leaves_the_winner_alone(tmp_path, monkeypatch, capfd):
    """The other process makes the directory when this one has begun and has not looked at it yet."""
    directory, winner = tmp_path / "run", []

    def appears(*args, **kwargs):
        winner.append(RunLock(directory))
        (directory / "config.json").write_text("{}")
        return {}

    monkeypatch.setattr("halfbyte.train.run.facts_equal_on_all_ranks", appears)
    dataclass_json.save_config(tiny(), tmp_path / "in.json")
    assert main(["train", "--config", str(tmp_path / "in.json"), "--run-dir", str(directory)]) == 2
    assert str(directory) in capfd.readouterr().err
    assert (directory / "config.json").read_text() == "{}"
    assert winner[0].is_held()
    winner[0].close()


def test_concurrent_starts_each_have_the_directory_alone(tmp_path):
    """Threads, which flock keeps apart as it does processes: some fail before their first step and leave nothing, some
    train, at any offset. Nobody sees another's files change under its hands."""
    wrong: list[str] = []

    def start(directory: Path, name: str, chance: random.Random) -> None:
        try:
            with RunDirectoryClaim(directory):
                (directory / "config.json").write_text(name)
                threading.Event().wait(chance.random() / 500)
                if (directory / "config.json").read_text() != name:
                    wrong.append(name)
                if chance.random() < 0.5:
                    raise KeyError(name)
                (directory / "metrics.jsonl").write_text(name)
        except (RunDirectoryLockedError, KeyError, ValueError):  # ValueError: a run of somebody else is there by now
            pass
        except OSError as error:
            wrong.append(f"{name}: {error}")

    for round_ in range(20):
        directory = tmp_path / str(round_) / "run"
        threads = [
            threading.Thread(target=start, args=(directory, f"{round_}-{n}", random.Random(4 * round_ + n)))
            for n in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


def test_files_that_disappear_during_a_claim_are_absent(tmp_path, monkeypatch):
    """A start that fails removes its files; another looks at the directory just then, without its lock."""
    (tmp_path / "config.json").write_text("{}")

    def goes(path):
        path.unlink()
        return read(path)

    read = run_identity.read_json
    monkeypatch.setattr(run_identity, "read_json", goes)
    with RunDirectoryClaim(tmp_path):
        assert os.listdir(tmp_path) == [LOCK_FILE]


@pytest.mark.parametrize("existed", [True, False])
def test_failed_start_leaves_the_directory_as_it_was(tmp_path, existed):
    directory = tmp_path / "a" / "run"
    if existed:
        directory.mkdir(parents=True)
    with contextlib.suppress(KeyError), RunDirectoryClaim(directory):
        (directory / "config.json").write_text("{}")
        raise KeyError
    assert (os.listdir(directory) if existed else os.listdir(tmp_path)) == []


def test_error_removes_own_files_and_no_others(tmp_path):
    """Compiling takes minutes, in which somebody puts files where the run would write some of the same names."""
    directory, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    own = ["tensorboard/events.out.tfevents.1.2.ab.halfbyte", "manifest.json", "autotuned-0.txt"]
    own += ["wandb/run-20261119_101010-ab12/files/x", "huggingface/config.json", "metrics.jsonl", "copy-name"]
    others = ["report.html", "evaluations.jsonl", "profile/trace", "wandb/run-1-cd34/x", "tensorboard/notes"]
    others += ["huggingface/model.safetensors", "huggingface/tokenizer.json", "damaged/2/d/0", "checkpoints/notes"]
    with contextlib.suppress(KeyError), RunDirectoryClaim(directory):
        for name in own + others:
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_text("" if name == "metrics.jsonl" else "theirs")
        (directory / "wandb_id").write_text("ab12")
        sealed = {f"huggingface/{name}": file_hash(directory / "huggingface" / name) for name in ("config.json",)}
        sealed["huggingface/tokenizer.json"] = "0" * 64  # replaced since
        save_identity(directory, RunIdentity("0123456789abcdef", "content", sealed))
        elsewhere.mkdir()
        (elsewhere / "events.out.tfevents.1.2.ab.halfbyte").write_text("theirs")
        raise KeyError
    assert sorted(p.relative_to(directory).as_posix() for p in directory.rglob("*") if p.is_file()) == sorted(others)
    shutil.rmtree(directory)
    with contextlib.suppress(KeyError), RunDirectoryClaim(directory):
        (directory / "tensorboard").symlink_to(elsewhere)
        raise KeyError
    assert os.listdir(elsewhere) and os.listdir(directory) == ["tensorboard"]


def replace(directory: Path) -> None:
    directory.rename(directory.with_name("moved"))
    shutil.copytree(directory.with_name("moved"), directory)


def empty(directory: Path) -> None:
    for path in directory.glob("[!.]*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.mark.parametrize("act", [replace, empty, shutil.rmtree])
def test_replaced_directory_is_no_longer_held(tmp_path, act):
    directory = tmp_path / "run"
    with RunDirectoryClaim(directory) as held:
        for name in RUN_MARKER_FILES:
            (directory / name).write_text("{}")
        held.assert_still_held()
        act(directory)
        with pytest.raises(OSError, match=r"run was removed, moved or replaced"):
            held.assert_still_held()


def test_failed_start_leaves_its_prefix_to_the_next_run(tmp_path, monkeypatch, capfd):
    """It fails while the step compiles, after the prefix was claimed. The store is a directory."""
    spec = {"driver": "file", "path": f"{tmp_path}/bucket/"}
    monkeypatch.setattr(object_store, "spec_of", lambda url: spec)
    dataclass_json.save_config(tiny(model=ONE_LAYER, recipe="bf16", steps=2), tmp_path / "in.json")
    words = ["train", "--config", str(tmp_path / "in.json"), "--copy-to", "s3://bucket/run", "--no-sample", "--run-dir"]

    def fails(self):
        assert (self.session.directory / NAME).exists()
        raise ValueError("no memory")

    with monkeypatch.context() as broken:
        broken.setattr(Loop, "run", fails)
        assert main([*words, str(tmp_path / "first")]) != 0
    assert "s3://bucket/run is free again" in " ".join(capfd.readouterr().out.split())
    assert not (tmp_path / "first").exists()
    assert main([*words, str(tmp_path / "second"), "--json"]) == 0
    copied = json.loads(capfd.readouterr().out.splitlines()[-1])["copy"]
    assert copied == {"url": "s3://bucket/run", "missing": [], "removed": []}
    assert bucket_copy.fetch("s3://bucket/run", tmp_path / "to", step=None, say=print)["step"] == 2


@dataclass
class Vandal:
    """Moves the run directory away before the third step, and keeps count."""

    directory: Path
    every: int = 2
    steps: int = 0

    def observe(self, moment):
        if moment.step == 3:
            self.directory.rename(self.directory.with_name("moved"))
        self.steps = moment.step
        return ()


def test_run_without_its_directory_ends_and_leaves_nothing(tmp_path, monkeypatch):
    """The save of step 2 is under way when the directory goes: Orbax and TensorStore make every folder anew."""
    vandal, console = Vandal(tmp_path / "run"), Console(file=io.StringIO())
    written = []

    def late(*args):
        while vandal.directory.exists():
            time.sleep(0.01)
        save(*args)
        written.extend(vandal.directory.rglob("*"))

    save = store._write_and_wait
    monkeypatch.setattr(store, "_write_and_wait", late)
    config = tiny(model=ONE_LAYER, recipe="bf16", checkpoint=CheckpointConfig(every=2))
    with pytest.raises(OSError, match=r"run was removed, moved or replaced"):
        train(config, vandal.directory, console=console, observers=[vandal])
    assert vandal.steps == 3
    assert written
    assert not list(vandal.directory.rglob("*"))


@pytest.fixture
def saves(tmp_path):
    """The checkpoints of a run that has saved steps 2 and 4."""
    made = store.CheckpointManager(tmp_path / "run" / "checkpoints")
    for step in (2, 4):
        assert made.save(step, {"params": {"w": jnp.ones(2)}}, extra={})
    made.wait()
    return made


def test_discard_touches_nothing_of_the_next_run_there(tmp_path, saves):
    """Which has its lock there before it has anything else."""
    (tmp_path / "run").rename(tmp_path / "moved")
    theirs = tmp_path / "run" / "checkpoints" / "2"
    theirs.mkdir(parents=True)
    with RunLock(tmp_path / "run"):
        saves.discard_directory()
    assert theirs.is_dir()


def test_discard_without_a_lock_file_keeps_the_checkpoints(tmp_path, saves):
    """Somebody has removed `.lock` alone: the directory is still the one that was opened."""
    saves.discard_directory()
    assert {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()} == {"2", "4"}


def test_discard_removes_unfinished_saves_and_no_backup(tmp_path, saves):
    """Same steps, committed, without a lock. The newest save, and the one that it waited for, are unfinished there."""
    (tmp_path / "run").rename(tmp_path / "moved")
    shutil.copytree(tmp_path / "moved" / "checkpoints", tmp_path / "run" / "checkpoints")
    before = set((tmp_path / "run").rglob("*"))
    for step in (2, 4):
        (tmp_path / "run" / "checkpoints" / f"{step}.orbax-checkpoint-tmp-1").mkdir()
    saves.discard_directory()
    assert set((tmp_path / "run").rglob("*")) == before
