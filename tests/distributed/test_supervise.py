"""A supervisor over small scripts in place of ranks. Oracle: what each start leaves on the disk."""

import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from halfbyte.cli.launch import parse, with_run_directory
from halfbyte.distributed import supervisor
from halfbyte.distributed.initialize import _check_port_is_free
from halfbyte.distributed.supervisor import RestartPolicy, Supervisor, newest_checkpoint, reserved_port

RANK = """
import os, pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
rank = int(sys.argv[sys.argv.index("--distributed.process") + 1]) if "--distributed.process" in sys.argv else 0
start = len(list(folder.glob(f"start-{rank}-*")))
(folder / f"start-{rank}-{start}").touch()
exec((folder / "behave.py").read_text())
"""


def make_supervisor(tmp_path, monkeypatch, behave, **options):
    (tmp_path / "rank.py").write_text(RANK)
    (tmp_path / "behave.py").write_text(behave)
    monkeypatch.setattr(supervisor, "RANK_COMMAND", (sys.executable, str(tmp_path / "rank.py"), str(tmp_path)))
    said = []
    policy = RestartPolicy(restarts=2, pause_s=0.01, grace_s=0.5)
    progress = lambda: newest_checkpoint(tmp_path)  # noqa: E731
    return Supervisor(["train"], options.get("ranks", 1), policy, progress, said.append), said


def starts(tmp_path, rank=0):
    return len(list(tmp_path.glob(f"start-{rank}-*")))


def test_fault_restarts_all_ranks_and_kills_a_stuck_one(tmp_path, monkeypatch):
    behave = """
while not start and rank == 0:
    time.sleep(0.1)
while not start and not (folder / "start-0-0").exists():
    time.sleep(0.01)
os._exit(0) if start else os.kill(os.getpid(), 9)
"""
    found, said = make_supervisor(tmp_path, monkeypatch, behave, ranks=2)
    assert found.run() == 0
    assert starts(tmp_path, 0) == starts(tmp_path, 1) == 2
    assert "rank 1 ended with signal SIGKILL; RESTART 1" in said[0]


@pytest.mark.skipif(sys.platform != "linux", reason="held on Linux alone")
def test_reserved_port_is_only_for_the_coordinator():
    with reserved_port() as port:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        _check_port_is_free(f"127.0.0.1:{port}")
        with socket.socket() as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as gRPC does
            server.bind(("127.0.0.1", port))
            server.listen()
            socket.create_connection(("127.0.0.1", port)).close()
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # that connection lingers
        other.bind(("127.0.0.1", port))


@pytest.mark.slow
@pytest.mark.parametrize("code", [2, 3])
def test_bad_input_is_not_restarted(tmp_path, monkeypatch, code):
    found, _ = make_supervisor(tmp_path, monkeypatch, f"sys.exit({code})")
    assert found.run() == code
    assert starts(tmp_path) == 1


def test_restarts_without_a_new_checkpoint_are_bounded(tmp_path, monkeypatch):
    found, said = make_supervisor(tmp_path, monkeypatch, "sys.exit(1)")
    assert found.run() == 1
    assert starts(tmp_path) == 3
    assert [text.split(" in ")[-1] for text in said[:2]] == ["0.01 s", "0.02 s"] and "giving up" in said[-1]


@pytest.mark.slow
def test_progress_renews_the_bound(tmp_path, monkeypatch):
    behave = "(folder / 'checkpoints' / str(start + 1)).mkdir(parents=True); sys.exit(0 if start == 6 else 75)"
    found, _ = make_supervisor(tmp_path, monkeypatch, behave)
    assert found.run() == 0
    assert starts(tmp_path) == 7
    assert found.restarts == 6


def test_signal_goes_to_the_ranks_and_ends_restarts(tmp_path, monkeypatch):
    behave = "import signal; os.kill(os.getppid(), signal.SIGTERM); time.sleep(600)"
    behave = "import signal; signal.signal(signal.SIGTERM, lambda *_: os._exit(75)); " + behave.split("; ", 1)[1]
    found, _ = make_supervisor(tmp_path, monkeypatch, behave)
    assert found.run() == 75
    assert starts(tmp_path) == 1


@pytest.mark.slow
def test_signal_during_start_goes_to_all_ranks(tmp_path, monkeypatch, until):
    behave = "import signal; signal.signal(signal.SIGTERM, lambda *_: os._exit(75)); "
    behave += "(folder / f'up-{rank}').touch(); time.sleep(600)"
    found, _ = make_supervisor(tmp_path, monkeypatch, behave, ranks=2)
    begin, begun = subprocess.Popen, []

    def one_by_one(*words, **options):
        begun.append(begin(*words, **options))
        until(lambda: len(list(tmp_path.glob("up-*"))) == len(begun))
        if len(begun) == 1:
            signal.raise_signal(signal.SIGTERM)
        return begun[-1]

    monkeypatch.setattr(subprocess, "Popen", one_by_one)
    assert found.run() == 75
    assert starts(tmp_path, 0) == starts(tmp_path, 1) == 1


def test_launch_command_gets_a_run_directory():
    args = parse(["--ranks", "2", "--", "train", "demo", "--steps", "5"])
    assert (args.ranks, args.command) == (2, ("train", "demo", "--steps", "5"))
    words, directory = with_run_directory(args.command)
    assert words[-2:] == ["--run-dir", str(directory)]
    assert with_run_directory(("train", "--run-dir=x"))[1].name == "x"
    with pytest.raises(ValueError, match="halfbyte launch -- train"):
        parse(["--ranks", "2"])
    with pytest.raises(ValueError, match="after --"):
        parse(["--ranks", "2", "train", "demo"])
    with pytest.raises(SystemExit, match="2"):
        parse(["--ranks", "0", "--", "train"])


ORPHAN = """
import os
from halfbyte.distributed.supervisor import exit_with_supervisor
exit_with_supervisor(os.environ)
assert os.getpgid(0) == os.getpid()
(folder / f"up-{rank}").write_text(str(os.getpid()))
time.sleep(3600)
"""
SUPERVISE = """if True:
    import sys
    from halfbyte.distributed import supervisor
    supervisor.RANK_COMMAND = (sys.executable, sys.argv[1] + "/rank.py", sys.argv[1])
    supervisor.Supervisor(["train"], 2, supervisor.RestartPolicy(), lambda: 0, print).run()
"""


@pytest.mark.slow
def test_ranks_end_with_a_supervisor_that_is_killed(tmp_path, until):
    (tmp_path / "rank.py").write_text(RANK)
    (tmp_path / "behave.py").write_text(ORPHAN)
    outer = subprocess.Popen([sys.executable, "-c", SUPERVISE, str(tmp_path)])
    files = [tmp_path / f"up-{rank}" for rank in range(2)]
    until(lambda: all(file.exists() and file.read_text() for file in files))
    outer.kill()
    outer.wait()
    until(lambda: not any(is_running(int(file.read_text())) for file in files))


def is_running(pid):
    """Whether a process is there and no mere remnant that nobody has waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_modules_of_the_current_directory_are_not_imported(tmp_path):
    """As when somebody goes into a run directory that came from elsewhere, and launches from there."""
    (tmp_path / "difflib.py").write_text("raise SystemExit(99)")
    assert subprocess.run([*supervisor.RANK_COMMAND, "--help"], cwd=tmp_path, capture_output=True).returncode == 0
