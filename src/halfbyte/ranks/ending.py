"""How a group ends: one sentence and one exit code, the same on every rank. The first that is written down holds."""

import json
import os
import sys
from dataclasses import asdict, dataclass
from typing import Self

FAILED, PREEMPTED = 1, 75


@dataclass(frozen=True)
class Message:
    """What ranks write to each other."""

    def to_json(self) -> str:
        """As the other ranks read it."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """What another rank has written."""
        return cls(**json.loads(text))


@dataclass(frozen=True)
class End(Message):
    """`rank`: who failed or was told to stop; `sentence`: why; `code`: with which every rank exits."""

    rank: int
    sentence: str
    code: int


def leave(end: End) -> None:
    """Say the sentence and end this process at once: a thread stuck inside a collective cannot be unwound."""
    print(f"halfbyte: {end.sentence}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(end.code)
