"""What the fault harness does to a trainer from outside: starts it, watches its files, sends signals, takes its disk
away, changes its files and its memory. Nothing here is known to the trainer, and no hook of it is used.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).resolve().parents[2] / "src"
ENTRY = [sys.executable, "-c", "from halfbyte.cli.main import entry; entry()"]
# Seconds that a fault may take on an idle machine; FAULTS_SLACK=4 gives four times as long to a machine under load.
LIMIT_S = 400.0 * float(os.environ.get("FAULTS_SLACK", "1"))
HUNG = 999
STACKS = re.compile(r"\*\*\* Check failure stack trace|^\s+@\s+0x[0-9a-f]+|terminate called after", re.M)


def keep_bytecode(folder: Path) -> None:
    """Where Python was told to keep no bytecode (an image's usual setting), every process would compile every module
    that it imports: half of what a start costs. It is kept in `folder` then, and nothing is written beside sources."""
    if os.environ.pop("PYTHONDONTWRITEBYTECODE", ""):
        os.environ.setdefault("PYTHONPYCACHEPREFIX", str(folder))


def free_port() -> int:
    """A port that nobody listens on, and that the system gives to nobody else while this process lives: it stays bound,
    as in `launch.supervise.held_port`."""
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    port = holder.getsockname()[1]
    holder.detach()
    return port


def environment() -> dict[str, str]:
    """Of every process: this source, this machine's CPU, and programs that are compiled quickly."""
    return {
        **os.environ,
        "PYTHONPATH": f"{SOURCE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "2",  # for commands that have no flag for it
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }


class Child:
    """A process that the warm one has forked, with the part of Popen's face that the harness uses."""

    def __init__(self, connection: socket.socket, pid: int, spent: Callable[[float], None]):
        self.pid, self.returncode = pid, None
        self._ended = threading.Event()
        threading.Thread(target=self._listen, args=(connection, spent), daemon=True).start()

    def _listen(self, connection: socket.socket, spent: Callable[[float], None]) -> None:
        with connection, connection.makefile() as lines:
            said = json.loads(lines.readline() or '{"code": -9, "seconds": 0}')
        spent(said["seconds"])
        self.returncode = said["code"]
        self._ended.set()

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired("halfbyte", timeout)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Warm:
    """The process that has loaded everything and forks a copy of itself for each command (warm.py)."""

    def __init__(self, folder: Path):
        self.address, self.seconds, self.lock = str(folder / "warm"), 0.0, threading.Lock()
        words = [sys.executable, str(Path(__file__).with_name("warm.py")), self.address]
        with open(folder / "warm.log", "wb") as log:
            self.process = subprocess.Popen(
                words, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log
            )
        assert self.process.stdout.readline() == b"ready\n", (folder / "warm.log").read_text()

    def start(self, request: dict[str, Any], output: int) -> Child:
        """A process that runs the command of `request`, its output into the file handle."""
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(self.address)
        socket.send_fds(connection, [json.dumps(request).encode()], [output])
        said = b""
        while not said.endswith(b"\n"):
            said += (heard := connection.recv(1))
            assert heard, "the warm process has ended; see warm.log"
        return Child(connection, json.loads(said)["pid"], self._spend)

    def _spend(self, seconds: float) -> None:
        with self.lock:
            self.seconds += seconds

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


@dataclass
class Started:
    """One process of a run, its output in a file."""

    process: Any
    log: Path

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def said(self) -> str:
        """Its output as running text, whatever width it was wrapped to."""
        return " ".join(self.output.split())

    def wait(self, limit_s: float = LIMIT_S) -> int:
        """Its exit code; 999 when it had to be killed because it hung."""
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            return HUNG


@dataclass
class Trainer:
    """Starts `halfbyte train` on one config, as one rank or as several, and any other command."""

    config: Path
    cache: Path
    logs: Path
    warm: Warm
    flags: tuple[str, ...] = ()
    count: int = field(default=0)

    def start(self, folder: Path, *flags: str, rank: int = 0, ranks: int = 1, port: int = 0, **options) -> Started:
        """One process of a run."""
        words = [*self.words(folder), "--no-sample", "--distributed.cpu-devices", str(2 // ranks), *self.flags]
        if ranks > 1:
            words += ["--distributed.coordinator", f"127.0.0.1:{port}", "--distributed.processes", str(ranks)]
            words += ["--distributed.process", str(rank), "--distributed.initialization-timeout-s", "300"]
        return self.command(folder.name, *words, *flags, **options)

    def words(self, folder: Path) -> list[str]:
        """The command that trains into `folder`."""
        return ["train", "--config", str(self.config), "--run-dir", str(folder), "--compile-cache", str(self.cache)]

    def command(self, name: str, *words: str, cold: bool = False, stdout: int | None = None, **request) -> Started:
        """Any command of halfbyte, its output in a log under `name`. `cold`: as a shell starts it, modules unloaded.
        `request`: cwd, and what warm.py takes to watch it (`under`, `log`, `die_at`)."""
        self.count += 1
        log = self.logs / f"{name}-{self.count}.log"
        with open(log, "wb") as file:
            output = file.fileno() if stdout is None else stdout
            if cold:
                process: Any = subprocess.Popen(
                    [*ENTRY, *words], env=environment(), stdin=subprocess.DEVNULL, stdout=output,
                    stderr=subprocess.STDOUT, **request,
                )  # fmt: skip
            else:
                watched = {key: value if key == "environ" else str(value) for key, value in request.items()}
                process = self.warm.start({"words": words, **watched}, output)
        return Started(process, log)

    def run(self, name: str, *words: str, limit_s: float = LIMIT_S, **options) -> tuple[int, Started]:
        """A command to its end: (exit code, the process)."""
        one = self.command(name, *words, **options)
        return one.wait(limit_s), one

    def start_all(
        self, folder: Path, *flags: str, ranks: int, others: tuple[str, ...] = (), homes: tuple[Path, ...] = ()
    ) -> list[Started]:
        """Every rank; `others` are flags of the last one alone, `homes` the working directory of each."""
        port = free_port()
        return [
            self.start(
                folder, *flags, *(others if rank == ranks - 1 else ()), rank=rank, ranks=ranks, port=port,
                **({"cwd": homes[rank]} if homes else {}),
            )
            for rank in range(ranks)
        ]  # fmt: skip

    def finish(self, folder: Path, *flags: str, ranks: int = 1) -> tuple[int, str]:
        """Run to the end; (exit code, output) of rank 0."""
        started = self.start_all(folder, *flags, ranks=ranks)
        codes = [one.wait() for one in started]
        return codes[0], started[0].output


def last_step(folder: Path) -> int:
    """The last whole row of a run's metrics."""
    try:
        lines = (folder / "metrics.jsonl").read_bytes().split(b"\n")[:-1]
        return json.loads(lines[-1])["step"] if lines else 0
    except (OSError, ValueError):
        return 0


def wait_until(condition: Callable[[], bool], started: list[Started], limit_s: float = LIMIT_S) -> bool:
    """True once `condition` holds; False when a process ended first or the time is up."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if condition():
            return True
        if any(one.process.poll() is not None for one in started):
            return condition()
        time.sleep(0.005)
    return False


class Gate:
    """Where a run in `folder` waits, before it commits the checkpoint of `step`, until the gate is opened: by then it
    has written all of that checkpoint, and it trains on to the next save at most, however long one looks at it."""

    def __init__(self, folder: Path, step: int, place: Path):
        self.log, self.way = Path(f"{place}.log"), Path(f"{place}.open")
        self.line = rf"os\.rename \S+ /checkpoints/{step}\n"
        self.request = {"under": str(folder), "log": str(self.log), "hold": self.line, "gate": str(self.way)}

    def wait(self, started: list[Started], limit_s: float = LIMIT_S) -> None:
        """Until the first of these processes is there."""
        reached = wait_until(
            lambda: self.log.exists() and bool(re.search(self.line, self.log.read_text())), started, limit_s
        )
        assert reached, f"it ended before {self.line}: {started[0].output[-800:]}"

    def open(self) -> None:
        self.way.touch()


def flip(path: Path, at: float, bit: int) -> None:
    """Flip one bit of a file, `at` as a part of its length."""
    content = bytearray(path.read_bytes())
    content[min(len(content) - 1, int(at * len(content)))] ^= 1 << bit
    path.write_bytes(content)


@contextlib.contextmanager
def small_disk(folder: Path, *, megabytes: int, inodes: int = 0) -> Iterator[Path]:
    """A real file system of that size. Needs the right to mount."""
    folder.mkdir(parents=True)
    options = f"size={megabytes}m" + (f",nr_inodes={inodes}" if inodes else "")
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False)


def can_mount() -> bool:
    """Whether a file system can be mounted here, by trying it."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        return False
    with tempfile.TemporaryDirectory() as root:
        try:
            with small_disk(Path(root) / "disk", megabytes=1):
                return True
        except subprocess.CalledProcessError:
            return False


def fill(folder: Path) -> Path:
    """Write until the disk is full; the file that does it."""
    filler = folder / "filler"
    with contextlib.suppress(OSError), open(filler, "wb", buffering=0) as file:
        while True:
            file.write(b"\0" * 65536)
    return filler


def take_inodes(folder: Path) -> list[Path]:
    """Make empty files until no more can be made."""
    made: list[Path] = []
    with contextlib.suppress(OSError):
        while True:
            path = folder / f"inode-{len(made)}"
            path.touch()
            made.append(path)
    return made


def change_memory(pid: int, pattern: bytes, offset: int, value: bytes) -> int:
    """Write `value` at `offset` inside every copy of `pattern` in a stopped process's memory; how many there were."""
    os.kill(pid, signal.SIGSTOP)
    found = 0
    try:
        regions = [line.split() for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
        with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
            for parts in regions:
                if not parts[1].startswith("rw") or (len(parts) > 5 and parts[5].startswith("/")):
                    continue
                first, last = (int(number, 16) for number in parts[0].split("-"))
                with contextlib.suppress(OSError, ValueError, OverflowError):
                    memory.seek(first)
                    content = memory.read(last - first)
                    place = content.find(pattern)
                    while place >= 0:
                        memory.seek(first + place + offset)
                        memory.write(value)
                        found += 1
                        place = content.find(pattern, place + 1)
    finally:
        os.kill(pid, signal.SIGCONT)
    return found


def stop(process: Any) -> None:
    """Stop a process, and wait until all of its threads stand still."""
    process.send_signal(signal.SIGSTOP)
    while not stands_still(process.pid):
        time.sleep(0.001)


def stands_still(pid: int) -> bool:
    """Whether no thread of a process runs, or there is no such process."""
    with contextlib.suppress(OSError):
        for thread in list(Path(f"/proc/{pid}/task").iterdir()):
            with contextlib.suppress(OSError):  # it has ended meanwhile
                if (thread / "stat").read_text().rpartition(")")[2].split()[0] not in "TtZX":
                    return False
    return True


def peak_memory(process: Any) -> int:
    """The most bytes that a living process has had in memory; 0 once it is gone."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        return next((int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM")), 0)
    return 0
