"""Whose a run directory is, and when it may be written. Oracle: its files, byte for byte. Nothing is compiled."""

import dataclasses
import json
import shutil
import zlib

import jax.numpy as jnp
import pytest

from halfbyte.checkpoint import CheckpointManager
from halfbyte.io.dataclass_json import to_dict
from halfbyte.train.resume import guarded_changes
from halfbyte.train.run_directory import (
    archive_metrics,
    check_data_unchanged,
    examine_directory,
    open_run,
    open_run_directory,
    write_run_files,
)
from halfbyte.train.run_identity import ChangedRun, RunDirectoryClaim, load_identity
from tiny import tiny


def look(directory, config, *, allow=False):
    return examine_directory(directory, config, allow_change=allow, say=lambda text: None)


@pytest.fixture
def begun(tmp_path):
    """(directory, config) of a run that has begun."""
    config, directory = tiny(), tmp_path / "run"
    take_it(directory, config)
    return directory, config


def take_it(directory, config, *, allow=False):
    """What a start does before it restores; its store is closed."""
    with RunDirectoryClaim(directory):
        found = look(directory, config, allow=allow)
        taken = open_run(found, config, "content-1", is_main=True, say=lambda text: None)
        taken.store.close()
    return taken


def test_same_config_resumes(begun):
    directory, config = begun
    assert look(directory, config).identity.run == load_identity(directory).run


@pytest.mark.slow
def test_flipped_bit_of_the_config_is_refused(begun):
    """The config that a person resumes with is read from the damaged file, as `train --run-dir DIR` does."""
    directory, config = begun
    whole = (directory / "config.json").read_bytes()
    for at in range(0, len(whole), 7):
        (directory / "config.json").write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(ValueError, match=r"config|run directory"):
            look(directory, config)


def test_damaged_identity_is_refused(begun):
    directory, config = begun
    text = (directory / "run.json").read_text()
    (directory / "run.json").write_text(text.replace("content-1", "content-2"))
    with pytest.raises(ValueError, match=r"run\.json is damaged"):
        look(directory, config)


@pytest.mark.parametrize("saved", [True, False])
def test_run_without_identity_keeps_the_name_of_checkpoints(begun, saved):
    """Its checkpoints carry the name; one that has none yet gets the same name in every process."""
    directory, config = begun
    if saved:
        store = CheckpointManager(directory / "checkpoints", run=load_identity(directory).run)
        store.save(2, {"params": {"w": jnp.zeros(4)}}, extra={})
        store.close()
    before = load_identity(directory).run
    (directory / "run.json").unlink()
    names = []
    for _ in range(2):
        taken = take_it(directory, config)
        names.append(taken.identity.run)
        assert [taken.store.record(step).step for step in taken.store.steps()] == [2] * saved
    assert names[0] == names[1] and (names[0] == before) is saved


def test_kill_between_identity_and_config_does_no_harm(begun, monkeypatch):
    """run.json knows both configs while config.json is replaced, and both tokenizers."""
    directory, config = begun
    longer = dataclasses.replace(config, steps=12)
    identity = load_identity(directory)
    facts = {"content": "content-1", "facts": {"tokenizer.json": "{}"}, "say": lambda text: None}
    monkeypatch.setattr("halfbyte.train.run_directory.atomic_write", lambda path, text: exec("raise KeyboardInterrupt"))
    with pytest.raises(KeyboardInterrupt):
        write_run_files(directory, longer, identity, **facts)
    assert look(directory, config).values
    monkeypatch.undo()
    write_run_files(directory, longer, identity, **facts)
    assert look(directory, longer).values
    (directory / "tokenizer.json").write_text("{ }")
    with pytest.raises(ChangedRun, match=r"tokenizer\.json is not what this run wrote"):
        look(directory, longer)


def test_changed_versions_are_reported(begun):
    directory, config = begun
    older = dataclasses.replace(load_identity(directory), made_with={"jax": "0.9.0", "code": "0123"})
    said = []
    for identity in (older, load_identity(directory)):
        write_run_files(directory, config, identity, content="content-1", facts={}, say=said.append)
    assert len(said) == 1 and "jax 0.9.0, now" in said[0] and "code 0123, now" in said[0]
    assert load_identity(directory).made_with.keys() == {"halfbyte", "jax", "jaxlib", "code"}


def test_identity_of_a_later_version_is_refused(begun):
    """Without it the run would go on, and nothing would say that its files are its own."""
    directory, config = begun
    text = json.dumps({"run": "a", "data": "b", "files": {}, "made_with": {}, "later": 1})
    write_identity(directory, text)
    with pytest.raises(ValueError, match="with the version that wrote it") as refusal:
        look(directory, config)
    assert "delete" not in str(refusal.value)


def write_identity(directory, text):
    (directory / "run.json").write_text(json.dumps({"run": text, "crc32": zlib.crc32(text.encode())}))


def test_forged_identity_is_refused(begun):
    directory, _ = begun
    forged = [{"files": []}, {"made_with": "jax"}]
    forged += [{"files": {name: "0"}} for name in ("../x", "/x", "wandb/x", "huggingface/..")]
    for text in ("[" * 100_000, *(json.dumps({"run": "a", "data": "b", **fields}) for fields in forged)):
        write_identity(directory, text)
        with pytest.raises(ValueError, match=r"not as this version writes it|no file that a run seals"):
            open_run_directory(directory, check=False)


def test_too_large_sealed_file_is_not_hashed(begun):
    directory, _ = begun
    with open(directory / "tokenizer.json", "wb") as file:
        file.truncate(1 << 42)  # nothing on the disk, an hour of zeros
    text = json.dumps({"run": "a", "data": "b", "files": {"tokenizer.json": "0"}})
    write_identity(directory, text)
    assert open_run_directory(directory, check=False).modified_files() == ["tokenizer.json"]


def test_only_wandb_of_the_run_may_hold_links(begun):
    directory, _ = begun
    (directory / "wandb").mkdir()
    (directory / "wandb" / "latest").symlink_to("x")
    open_run_directory(directory)
    (directory / "checkpoints" / "wandb").mkdir(parents=True)
    (directory / "checkpoints" / "wandb" / "latest").symlink_to("x")
    with pytest.raises(ValueError, match="symbolic link"):
        open_run_directory(directory)


def test_start_killed_before_its_config_starts_again(begun, tmp_path):
    directory, config = begun
    again = tmp_path / "again"
    again.mkdir()
    shutil.copy(directory / "run.json", again)
    assert take_it(again, config).identity.run == load_identity(again).run
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "run.json").write_text('{"command": "mine"}')
    with pytest.raises(ValueError, match="holds no run"):
        take_it(foreign, config)


def test_data_is_compared_by_content(begun):
    directory, config = begun
    moved = look(directory, dataclasses.replace(config, data="demo"))
    check_data_unchanged(moved, "content-1", allow=False, say=lambda text: None)
    with pytest.raises(ChangedRun, match="content-1 -> content-2"):
        check_data_unchanged(moved, "content-2", allow=False, say=lambda text: None)
    said = []
    check_data_unchanged(moved, "content-2", allow=True, say=said.append)
    assert "changed, as allowed" in said[0]


def test_refused_resume_leaves_the_config_alone(begun):
    directory, config = begun
    before = (directory / "config.json").read_bytes()
    for changes, words in (({"unroll": 0}, "unroll: 1 -> 0"), ({"seed": 3}, "seed: 0 -> 3")):  # other sums, other bits
        with pytest.raises(ChangedRun, match=words):
            look(directory, dataclasses.replace(config, **changes))
    take_it(directory, dataclasses.replace(config, seed=3), allow=True)  # it does not fit, say: nothing is settled
    assert (directory / "config.json").read_bytes() == before


def test_new_field_at_its_default_is_no_change():
    config = tiny()
    stored = to_dict(config)
    del stored["precision"]["switch_part"], stored["z_loss"]
    assert guarded_changes(stored, config) == []
    assert guarded_changes(stored, dataclasses.replace(config, z_loss=1e-4)) == ["z_loss: 0.0 -> 0.0001"]


def save(directory):
    store = take_it(directory, tiny()).store
    store = CheckpointManager(store.directory, run=store._run, committed=store._committed)
    store.save(2, {"params": {"w": jnp.zeros(4)}}, extra={})
    store.close()


def test_emptied_checkpoints_are_no_fresh_start(begun):
    """A run knows that it has had one, also where its metrics are gone too."""
    directory, config = begun
    take_it(directory, config)  # none was written yet: the first save was killed, say
    save(directory)
    take_it(directory, config)
    shutil.rmtree(directory / "checkpoints" / "2")
    for _ in range(2):
        with pytest.raises(ValueError, match="has had checkpoints"):
            take_it(directory, dataclasses.replace(config, steps=12))
    shutil.rmtree(directory / "checkpoints")
    with pytest.raises(ValueError, match="has had checkpoints"):
        take_it(directory, config)


def test_run_without_seal_is_judged_by_its_metrics(begun):
    directory, config = begun

    def with_rows(*steps):
        (directory / "metrics.jsonl").write_text("".join(json.dumps({"step": step}) + "\n" for step in steps))

    with_rows(1, 2, 3)
    take_it(directory, config)  # its first checkpoint was due: the save may have been killed
    shutil.rmtree(directory / "checkpoints")
    with pytest.raises(ValueError, match="metrics of 3 steps"):
        take_it(directory, config)
    (directory / "checkpoints").mkdir()
    with_rows(*range(1, 7))
    with pytest.raises(ValueError, match="metrics of 6 steps"):
        take_it(directory, dataclasses.replace(config, steps=12))
    first, second = archive_metrics(directory), archive_metrics(directory)
    assert first.name == "metrics.before-restart-1.jsonl"
    assert second is None
    assert len(first.read_text().splitlines()) == 6
