"""Local ranks under a supervisor: started together, ended together, started again from the last good checkpoint.

The supervisor knows nothing of training. A group ends with one exit code: 0 is done; 2 and 3 are answers that would not
change; anything else is a fault, and the group is started again after a pause that doubles, up to a bound of restarts
that brought no new checkpoint.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from .cluster import LOOPBACK

DONE, FAILED, BAD_INPUT, NOT_PASSED, PREEMPTED = 0, 1, 2, 3, 75
# The words that start a process of this program, whatever is in PATH and in the present directory.
ENTRY = (sys.executable, "-P", "-c", "from halfbyte.cli.main import entry; entry()")
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
SUPERVISOR = "HALFBYTE_SUPERVISOR"
LOOK_S = 0.2


@dataclass(frozen=True)
class Policy:
    """`restarts`: in a row without a new checkpoint. `pause_s`: before the first of them, doubling up to
    `longest_pause_s`. `grace_s`: for the other ranks, once one has ended, before they are killed."""

    restarts: int = 5
    pause_s: float = 1.0
    longest_pause_s: float = 60.0
    grace_s: float = 30.0


@dataclass
class Supervisor:
    """Runs `command` (the words after `halfbyte`) as `ranks` processes; `progress` says the newest checkpoint."""

    command: Sequence[str]
    ranks: int
    policy: Policy
    progress: Callable[[], int]
    say: Callable[[str], None]
    restarts: int = 0
    _running: list[subprocess.Popen[bytes]] = field(default_factory=list)
    _told: list[signal.Signals] = field(default_factory=list)

    def run(self) -> int:
        """Supervise to the end; the group's exit code."""
        old = {number: signal.signal(number, self._hear) for number in SIGNALS}
        try:
            return self._run()
        finally:
            self._kill()
            for number, handler in old.items():
                signal.signal(number, handler)

    def _run(self) -> int:
        fruitless, before = 0, self.progress()
        while True:
            code, rank = self._once()
            if code in (DONE, BAD_INPUT, NOT_PASSED) or self._told:
                return code
            reached = self.progress()
            fruitless, before = (0 if reached > before else fruitless + 1), max(before, reached)
            if fruitless > self.policy.restarts:
                self.say(
                    f"rank {rank} ended with {_name(code)}; {fruitless} starts in a row brought no new checkpoint: "
                    f"giving up at step {before}"
                )
                return code
            pause = min(self.policy.pause_s * 2 ** max(0, fruitless - 1), self.policy.longest_pause_s)
            pause = 0.0 if code == PREEMPTED else pause
            self.restarts += 1
            self.say(
                f"rank {rank} ended with {_name(code)}; RESTART {self.restarts} from the checkpoint of step {before}"
                + (f" in {pause:g} s" if pause else "")
            )
            if not self._sleep(pause):
                return PREEMPTED

    def _sleep(self, seconds: float) -> bool:
        """False if a signal came."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self._told:
            time.sleep(0.1)
        return not self._told

    def _once(self) -> tuple[int, int]:
        """Start the ranks and wait for all; (exit code of the group, the rank that ended it)."""
        with held_port() as port:
            return self._started_on(port)

    def _started_on(self, port: int) -> tuple[int, int]:
        environment = {**os.environ, SUPERVISOR: str(os.getpid())}
        self._running = [
            # A group of its own: a terminal's Ctrl-C comes to a rank once, from here.
            subprocess.Popen([*ENTRY, *self.command, *self._place(rank, port)], env=environment, process_group=0)
            for rank in range(self.ranks)
        ]
        first: tuple[int, int] | None = None
        deadline, forwarded = float("inf"), 0
        while any(process.poll() is None for process in self._running):
            for number in self._told[forwarded:]:
                self._forward(number)
                forwarded += 1
            ended = [(process.returncode, rank) for rank, process in enumerate(self._running) if process.poll()]
            if ended and first is None:
                first, deadline = ended[0], time.monotonic() + self.policy.grace_s
            if time.monotonic() > deadline:
                self._kill()
            time.sleep(0.05)
        codes = [(process.returncode, rank) for rank, process in enumerate(self._running)]
        return first or next((pair for pair in codes if pair[0]), (DONE, 0))

    def _place(self, rank: int, port: int) -> list[str]:
        if self.ranks == 1:
            return []
        place = {"coordinator": f"{LOOPBACK}:{port}", "processes": str(self.ranks), "process": str(rank)}
        return [word for name, value in place.items() for word in (f"--distributed.{name}", value)]

    def _hear(self, number: int, frame: FrameType | None) -> None:
        """Only noted: a signal may come while the ranks are being started, and those that are up are not known yet."""
        self._told.append(signal.Signals(number))

    def _forward(self, number: signal.Signals) -> None:
        for process in self._running:
            if process.poll() is None:
                process.send_signal(number)

    def _kill(self) -> None:
        for process in self._running:
            if process.poll() is None:
                process.kill()
                process.wait()


def end_with_supervisor(environ: MutableMapping[str, str]) -> None:
    """In a rank: when the process that started it is gone, however it went, this one ends at once, so that the next
    supervisor finds the run directory free. Nothing for a process that no supervisor started."""
    if (parent := environ.pop(SUPERVISOR, "")).isdigit():
        threading.Thread(target=_end_without, args=(int(parent),), name="halfbyte-supervisor", daemon=True).start()


def _end_without(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(LOOK_S)
    said = "the supervisor has gone; this rank ends, the last checkpoint is intact"
    print(f"halfbyte: {said}", file=sys.stderr, flush=True)
    os._exit(FAILED)


def newest_checkpoint(directory: Path) -> int:
    """Step of the newest committed checkpoint of a run, by its name; 0 if there is none."""
    try:
        return max((int(name) for name in os.listdir(directory / "checkpoints") if name.isdigit()), default=0)
    except OSError:
        return 0


@contextlib.contextmanager
def held_port() -> Iterator[int]:
    """A port of this machine on which, while this holds it, only a process that was told of it listens. It is bound
    here and nobody listens, so Linux gives it to nobody else; a server that reuses addresses, as the coordinator does,
    may have it. Other systems may refuse that server too: there it is let go."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((LOOPBACK, 0))
        port = int(holder.getsockname()[1])
        if sys.platform != "linux":
            holder.close()
        yield port


def _name(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
