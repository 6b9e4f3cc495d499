"""Signs of life: what each rank is at, and who is to blame when nothing moves.

Collectives make every rank wait for the slowest, so the one that hangs is not the one that complains. It is the one
that is silent, or else the one that is furthest behind.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from .ending import Message

PAUSED = ("start", "compile", "restore", "save", "validation", "finish", "done")
"""What may take long: while one rank is at it, the others may wait for it, and nobody is blamed by the clock."""
ORDER = {"data": 1, "step": 2}


@dataclass(frozen=True)
class Limits:
    """Seconds. `silence`: without any sign of life. `progress`: without the end of a step; 0: no limit."""

    silence: float = 60.0
    progress: float = 0.0


@dataclass(frozen=True)
class Beat(Message):
    """One sign of life: `count` grows with each; `idle` is how long this rank has been at what it is `doing`."""

    count: int
    step: int
    doing: str
    idle: float


def judge(beats: Mapping[int, Beat], silent: Mapping[int, float], limits: Limits) -> tuple[int, str] | None:
    """(rank, sentence) of the one that holds the group up; None while all is well. `silent`: seconds since each
    rank's beat last changed."""
    for rank, seconds in silent.items():
        beat = beats.get(rank)
        if seconds > limits.silence and (beat is None or beat.doing != "done"):
            where = f"after step {beat.step}, at: {beat.doing}" if beat else "since the start"
            return rank, (
                f"rank {rank} has stopped: no sign of life for {seconds:.0f} s ({where}); "
                "every rank ends, the last checkpoint is intact"
            )
    late = [beat for beat in beats.values() if beat.doing not in PAUSED and beat.idle > limits.progress]
    if not limits.progress or not late or len(late) < len(beats):  # one that has just left its compiler is not late
        return None
    rank, beat = min(beats.items(), key=lambda item: (item[1].step, ORDER.get(item[1].doing, 0)))
    idle = max(found.idle for found in late)
    return rank, (
        f"no step has ended for {idle:.0f} s (watchdog_s {limits.progress:g}); rank {rank} is the furthest behind: "
        f"after step {beat.step}, at: {beat.doing} for {beat.idle:.0f} s; the last checkpoint is intact"
    )
