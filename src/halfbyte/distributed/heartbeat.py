"""Messages of a process group: heartbeats, detection of the stalled rank, and the exit of the group.

Collectives make every rank wait for the slowest, so the rank that hangs is not the one that raises an error. It is the
rank without heartbeats, or else the one that is furthest behind. A group ends with one sentence and one exit code, the
same on every rank: those of the rank that was the first to publish them.
"""

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Self

FAILED, PREEMPTED = 1, 75
UNTIMED_PHASES = ("start", "compile", "restore", "save", "validation", "finish", "done")
"""Phases without a time limit: while one rank is in one of them, the others may wait for it."""
ORDER = {"data": 1, "step": 2}


@dataclass(frozen=True)
class WireMessage:
    """JSON message in the key-value store."""

    def to_json(self) -> str:
        """Returns the message as the other ranks read it."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Parses the message of another rank."""
        return cls(**json.loads(text))


@dataclass(frozen=True)
class GroupExit(WireMessage):
    """End of a group: `rank` that failed or got a signal, `sentence` with the reason, exit `code` of every rank."""

    rank: int
    sentence: str
    code: int


@dataclass(frozen=True)
class Heartbeat(WireMessage):
    """Heartbeat of a rank: `count` increases by 1 each time, `idle` is the seconds since the activity `doing` began."""

    count: int
    step: int
    doing: str
    idle: float


@dataclass(frozen=True)
class WatchdogLimits:
    """Seconds without a heartbeat, and without the end of a step; 0: no limit."""

    heartbeat_timeout_s: float = 60.0
    step_timeout_s: float = 0.0


def exit_process(end: GroupExit) -> None:
    """Prints the sentence and ends this process at once: a thread that hangs in a collective cannot be unwound."""
    print(f"halfbyte: {end.sentence}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    if sys.stderr.isatty():  # a live display hides the cursor and leaves its last line unfinished
        os.write(2, b"\r\x1b[K\x1b[?25h")
    os._exit(end.code)


def find_stalled_rank(
    beats: Mapping[int, Heartbeat], silent: Mapping[int, float], limits: WatchdogLimits
) -> tuple[int, str] | None:
    """Returns (rank, sentence) of the rank that stalls the group; None if there is none.

    `silent` has the seconds since the heartbeat of each rank last changed.
    """
    for rank, seconds in silent.items():
        beat = beats.get(rank)
        if seconds > limits.heartbeat_timeout_s and (beat is None or beat.doing != "done"):
            where = f"after step {beat.step}, at: {beat.doing}" if beat else "since the start"
            return rank, (
                f"rank {rank} has stopped: no sign of life for {seconds:.0f} s ({where}); "
                "every rank ends, the last checkpoint is intact"
            )
    late = [beat for beat in beats.values() if beat.doing not in UNTIMED_PHASES and beat.idle > limits.step_timeout_s]
    # A rank that has just left its compiler is not late.
    if not limits.step_timeout_s or not late or len(late) < len(beats):
        return None
    rank, beat = min(beats.items(), key=lambda item: (item[1].step, ORDER.get(item[1].doing, 0)))
    idle = max(beat.idle for beat in late)
    return rank, (
        f"no step has ended for {idle:.0f} s (watchdog_s {limits.step_timeout_s:g}); rank {rank} is the furthest "
        f"behind: after step {beat.step}, at: {beat.doing} for {beat.idle:.0f} s; the last checkpoint is intact"
    )
