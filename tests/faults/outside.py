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
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "src"
ENTRY = [sys.executable, "-c", "from halfbyte.cli.main import entry; entry()"]
LIMIT_S = 400.0
STACKS = re.compile(r"\*\*\* Check failure stack trace|^\s+@\s+0x[0-9a-f]+|terminate called after", re.M)


def keep_bytecode(folder: Path) -> None:
    """Where Python was told to keep no bytecode (an image's usual setting), every process would compile every module
    that it imports: half of what a start costs. It is kept in `folder` then, and nothing is written beside sources."""
    if os.environ.pop("PYTHONDONTWRITEBYTECODE", ""):
        os.environ.setdefault("PYTHONPYCACHEPREFIX", str(folder))


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@dataclass
class Started:
    """One process of a run, its output in a file."""

    process: subprocess.Popen
    log: Path

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def wait(self, limit_s: float = LIMIT_S) -> int:
        """Its exit code; 999 when it had to be killed because it hung."""
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            return 999


@dataclass
class Trainer:
    """Starts `halfbyte train` on one config, as one rank or as several."""

    config: Path
    cache: Path
    logs: Path
    flags: tuple[str, ...] = ()
    count: int = field(default=0)

    def start(self, folder: Path, *flags: str, rank: int = 0, ranks: int = 1, port: int = 0, **options) -> Started:
        """One process of a run. `options`: stdout and cwd of the process."""
        words = ["train", "--config", str(self.config), "--run-dir", str(folder), "--compile-cache", str(self.cache)]
        words += ["--distributed.cpu-devices", str(2 // ranks), *self.flags]
        if ranks > 1:
            words += ["--distributed.coordinator", f"127.0.0.1:{port}", "--distributed.processes", str(ranks)]
            words += ["--distributed.process", str(rank), "--distributed.initialization-timeout-s", "60"]
        return self.command(folder.name, *words, *flags, **options)

    def command(self, name: str, *words: str, **options) -> Started:
        """Any command of halfbyte, its output in a log under `name`."""
        self.count += 1
        log = self.logs / f"{name}-{self.count}.log"
        environ = {
            **os.environ,
            "PYTHONPATH": f"{SOURCE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
            "JAX_PLATFORMS": "cpu",
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        }
        with open(log, "wb") as output:
            how = {"stdout": output, **options}
            process = subprocess.Popen([*ENTRY, *words], env=environ, stderr=subprocess.STDOUT, **how)
        return Started(process, log)

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


def losses(folder: Path) -> list[float]:
    """The loss of every step."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    if [row["step"] for row in rows] != list(range(1, len(rows) + 1)):
        raise AssertionError(f"{folder}: the rows are not one a step")
    return [row["loss"] for row in rows]


def saved_state(folder: Path) -> tuple[int, dict]:
    """(step, checksums by array) of the newest checkpoint, as it says itself; `halfbyte verify` reads the arrays."""
    steps = [int(path.name) for path in (folder / "checkpoints").iterdir() if path.name.isdigit()]
    stored = json.loads((folder / "checkpoints" / str(max(steps)) / "_CHECKPOINT_METADATA").read_text())
    body = json.loads(stored["custom_metadata"]["record"])
    return max(steps), body["leaves"]


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
