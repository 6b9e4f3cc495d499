"""Supervisor of local ranks: starts them together, ends them together, restarts them from the last good checkpoint.

The supervisor does not depend on training. A group ends with one exit code: 0 is success; 2 and 3 would not change in a
retry; anything else is a fault, and the group is restarted after a pause that doubles, up to a number of restarts
without a new checkpoint.
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

from halfbyte.distributed.cluster_env import LOOPBACK

DONE, FAILED, BAD_INPUT, NOT_PASSED, PREEMPTED = 0, 1, 2, 3, 75
# Command of a process of this program, independent of PATH and of the working directory.
RANK_COMMAND = (sys.executable, "-P", "-c", "from halfbyte.cli.main import entry; entry()")
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
SUPERVISOR = "HALFBYTE_SUPERVISOR"
SUPERVISOR_POLL_S = 0.2


@dataclass(frozen=True)
class RestartPolicy:
    """Limits of restarts, and pauses.

    restarts: maximum in a row without a new checkpoint. pause_s: before the first of them; it doubles up to
    longest_pause_s. grace_s: time for the other ranks to end after one has ended, before they are killed.
    """

    restarts: int = 5
    pause_s: float = 1.0
    longest_pause_s: float = 60.0
    grace_s: float = 30.0


@dataclass
class Supervisor:
    """Runs `command` (the words after `halfbyte`) as `ranks` processes; `progress` returns the newest checkpoint."""

    command: Sequence[str]
    ranks: int
    policy: RestartPolicy
    progress: Callable[[], int]
    say: Callable[[str], None]
    restarts: int = 0
    _running: list[subprocess.Popen[bytes]] = field(default_factory=list)
    _received_signals: list[signal.Signals] = field(default_factory=list)

    def run(self) -> int:
        """Runs the ranks, with restarts, to the end. Returns the exit code of the group."""
        old = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        try:
            return self._run()
        finally:
            self._kill()
            for number, handler in old.items():
                signal.signal(number, handler)

    def _run(self) -> int:
        failed_starts, newest = 0, self.progress()
        while True:
            code, rank = self._run_once()
            if code in (DONE, BAD_INPUT, NOT_PASSED) or self._received_signals:
                return code
            step = self.progress()
            failed_starts, newest = (0 if step > newest else failed_starts + 1), max(newest, step)
            if failed_starts > self.policy.restarts:
                self.say(
                    f"rank {rank} ended with {_name(code)}; {failed_starts} starts in a row brought no new checkpoint: "
                    f"giving up at step {newest}"
                )
                return code
            pause = min(self.policy.pause_s * 2 ** max(0, failed_starts - 1), self.policy.longest_pause_s)
            pause = 0.0 if code == PREEMPTED else pause
            self.restarts += 1
            self.say(
                f"rank {rank} ended with {_name(code)}; RESTART {self.restarts} from the checkpoint of step {newest}"
                + (f" in {pause:g} s" if pause else "")
            )
            if not self._sleep(pause):
                return PREEMPTED

    def _sleep(self, seconds: float) -> bool:
        """Sleeps; returns False, at once, if a signal was received."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self._received_signals:
            time.sleep(0.1)
        return not self._received_signals

    def _run_once(self) -> tuple[int, int]:
        """Starts the ranks and waits for all. Returns (exit code of the group, the rank that ended it)."""
        with reserved_port() as port:
            return self._started_on(port)

    def _started_on(self, port: int) -> tuple[int, int]:
        environment = {**os.environ, SUPERVISOR: str(os.getpid())}
        self._running = [
            # A separate process group: a rank gets Ctrl-C of the terminal once, forwarded by the supervisor.
            subprocess.Popen(
                [*RANK_COMMAND, *self.command, *self._distributed_flags(rank, port)], env=environment, process_group=0
            )
            for rank in range(self.ranks)
        ]
        first_ended: tuple[int, int] | None = None
        deadline, forwarded = float("inf"), 0
        while any(process.poll() is None for process in self._running):
            for number in self._received_signals[forwarded:]:
                self._forward(number)
                forwarded += 1
            ended = [(process.returncode, rank) for rank, process in enumerate(self._running) if process.poll()]
            if ended and first_ended is None:
                first_ended, deadline = ended[0], time.monotonic() + self.policy.grace_s
            if time.monotonic() > deadline:
                self._kill()
            time.sleep(0.05)
        codes = [(process.returncode, rank) for rank, process in enumerate(self._running)]
        return first_ended or next((pair for pair in codes if pair[0]), (DONE, 0))

    def _distributed_flags(self, rank: int, port: int) -> list[str]:
        if self.ranks == 1:
            return []
        flags = {"coordinator": f"{LOOPBACK}:{port}", "processes": str(self.ranks), "process": str(rank)}
        return [word for name, value in flags.items() for word in (f"--distributed.{name}", value)]

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Only records the signal: it may arrive while ranks are being started, before their processes are known."""
        self._received_signals.append(signal.Signals(number))

    def _forward(self, number: signal.Signals) -> None:
        for process in self._running:
            if process.poll() is None:
                process.send_signal(number)

    def _kill(self) -> None:
        for process in self._running:
            if process.poll() is None:
                process.kill()
                process.wait()


def exit_with_supervisor(environ: MutableMapping[str, str]) -> None:
    """Ends this rank as soon as its supervisor has ended, so that the next supervisor finds the run directory unlocked.

    Does nothing in a process without a supervisor.
    """
    if (parent := environ.pop(SUPERVISOR, "")).isdigit():
        threading.Thread(
            target=_exit_when_parent_dies, args=(int(parent),), name="halfbyte-supervisor", daemon=True
        ).start()


def _exit_when_parent_dies(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(SUPERVISOR_POLL_S)
    reason = "the supervisor has gone; this rank ends, the last checkpoint is intact"
    print(f"halfbyte: {reason}", file=sys.stderr, flush=True)
    os._exit(FAILED)


def newest_checkpoint(directory: Path) -> int:
    """Returns the step of the newest committed checkpoint of a run, from its name; 0 if there is none."""
    try:
        return max((int(name) for name in os.listdir(directory / "checkpoints") if name.isdigit()), default=0)
    except OSError:
        return 0


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """Yields a port of this host that no other process gets meanwhile.

    It is bound here without a listener, so Linux assigns it to no other process; a server that reuses addresses, as the
    coordinator does, may listen on it. Other systems may refuse that server too: there the port is released at once.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((LOOPBACK, 0))
        port = int(holder.getsockname()[1])
        if sys.platform != "linux":
            holder.close()
        yield port


def _name(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
