"""Kills at every call of the file system while a directory is made or replaced. Oracle: the files that are there."""

import errno
import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from halfbyte.hf.exporter import check_output_directory, write_hf_folder
from halfbyte.hf.import_model import import_hf_folder
from halfbyte.io import files
from halfbyte.io.files import HOST, StagingDirectory, remove_stale, rename_into_place

# A process a kill: it ends itself before the n-th call that its own audit hook sees, n from 1 until it gets through.
KILLS = """if True:
    import json, os, shutil, signal, sys
    from pathlib import Path
    from halfbyte.io import files

    root, can_exchange = Path(sys.argv[1]), sys.argv[2] == "True"
    if not can_exchange:
        files.exchange_directories = lambda one, other: False
    CALLS = ("os.rename", "os.mkdir", "os.rmdir", "os.remove", "os.chmod", "shutil.rmtree", "open", "ctypes.dlsym")

    def make(out, name):
        with files.StagingDirectory(out) as path:
            for file in ("a", "b"):
                (path / file).write_text(name)
            files.rename_into_place(path, out, replace=True)

    def killed_at(number, act):
        child = os.fork()
        if not child:
            left = [number]

            def hook(event, args):
                if event in CALLS:
                    left[0] -= 1
                    if not left[0]:
                        os.kill(os.getpid(), signal.SIGKILL)

            sys.addaudithook(hook)
            act()
            os._exit(0)
        return os.waitpid(child, 0)[1] != 0

    def content(out):
        return "+".join(sorted(f"{file.name}={file.read_text()}" for file in out.glob("*")))

    found = []
    for number in range(1, 1000):
        out = root / str(number) / "out"
        make(out, "old")
        if not killed_at(number, lambda: make(out, "new")):
            break
        at_once = content(out)
        hidden = len(list(out.parent.glob(".*")))
        files.remove_stale(out)
        found.append([at_once, hidden, content(out), sorted(os.listdir(out.parent))])
    print(json.dumps(found))
"""


@pytest.mark.parametrize("can_exchange", [True, False])
def test_kill_leaves_the_old_or_the_new_directory(tmp_path, can_exchange):
    command = [sys.executable, "-c", KILLS, str(tmp_path), str(can_exchange)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    found = json.loads(done.stdout)
    whole = ["a=new+b=new", "a=old+b=old"]
    assert {after for *_, after, _ in found} == set(whole), done.stderr
    assert all(names == ["out"] for *_, names in found)
    assert [at_once for at_once, *_ in found if at_once not in whole] == ([] if can_exchange else [""])
    said = done.stderr.splitlines()
    assert len([line for line in said if "removed" in line or "put back" in line]) == sum(left for _, left, *_ in found)


def test_locked_staging_directory_is_left_alone(tmp_path, capsys):
    out = tmp_path / "out"
    with StagingDirectory(out) as path:
        (path / "a").write_text("new")
        remove_stale(out)
        remove_stale(tmp_path / "other")
        assert rename_into_place(path, out, replace=False)
    assert (out / "a").read_text() == "new"
    assert capsys.readouterr().err == ""


def test_only_copy_is_restored_without_locks(tmp_path, capsys, monkeypatch):
    def no_locks(*_):
        raise OSError(errno.EBADF, "no locks on a directory")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    aside = tmp_path / ".out.replaced-abc"
    aside.mkdir()
    (aside / "a").write_text("old")
    remove_stale(tmp_path / "out")
    assert (tmp_path / "out" / "a").read_text() == "old"
    assert "put back" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["out", "wei[r]d *name"])
def test_commands_remove_staging_of_killed_processes(tmp_path, name, capsys):
    out = tmp_path / name

    def left() -> Path:
        path = tmp_path / f".{name}.partial-{HOST}-abc"
        path.mkdir()
        (path / "model.safetensors").write_text("half")
        return path

    path = left()
    check_output_directory(out, replace=False)
    assert not path.exists() and str(path) in capsys.readouterr().err
    path = left()
    with pytest.raises((ValueError, FileNotFoundError)):
        import_hf_folder(tmp_path / "nothing", out)
    assert not path.exists() and str(path) in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["partial", "replaced"])
def test_staging_of_another_host_is_left_alone(tmp_path, kind, capsys):
    """Its lock may not be seen here. The same name of this machine, without a lock, is removed."""
    (tmp_path / "out").mkdir()
    for host in (HOST, "0a0b0c0d"):
        (tmp_path / f".out.{kind}-{host}-abc").mkdir()
    remove_stale(tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == [f".out.{kind}-0a0b0c0d-abc", "out"]
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2 and any("0a0b0c0d-abc: left behind, or still being made" in line for line in said)


@pytest.mark.parametrize("can_exchange", [True, False])
@pytest.mark.parametrize("late", [False, True])
def test_directory_that_was_moved_to_out_during_the_work_stays(tmp_path, monkeypatch, can_exchange, late):
    """Before the check, or between the check and the exchange."""
    out, theirs = tmp_path / "out", tmp_path / "theirs"
    for folder in (out, theirs):
        folder.mkdir()
    (theirs / "thesis").write_text("mine")

    def arrives():
        if theirs.exists():
            out.rename(tmp_path / "away")
            theirs.rename(out)

    def check():
        if (out / "thesis").exists():
            raise ValueError("stays")
        if late:
            arrives()

    if not can_exchange:
        monkeypatch.setattr(files, "exchange_directories", lambda one, other: False)
    (out / "old").write_text("old")
    with StagingDirectory(out) as path:
        (path / "a").write_text("new")
        if not late:
            arrives()
        with pytest.raises(ValueError, match="stays"):
            rename_into_place(path, out, replace=True, check=check)
    assert (out / "thesis").read_text() == "mine" and os.listdir(out) == ["thesis"]
    assert (tmp_path / "away" / "old").read_text() == "old"


def test_file_that_appears_during_an_export_is_kept(tmp_path):
    out, config = tmp_path / "out", {"model_type": "llama"}
    write_hf_folder(out, [], config, {"model.safetensors": b"old"})

    class Late(dict):
        def items(self):
            (out / "notes.txt").write_text("mine")  # after the check, while weights are written
            return super().items()

    with pytest.raises(ValueError, match=r"holds notes\.txt, which no export writes"):
        write_hf_folder(out, [], config, Late({"model.safetensors": b"new"}), replace=True)
    assert (out / "notes.txt").read_text() == "mine" and (out / "model.safetensors").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["out"]
