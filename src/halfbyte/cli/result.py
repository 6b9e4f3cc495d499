"""What a command hands back: an object for `--json`, and an exit code."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

DONE = 0
FAILED = 1
BAD_INPUT = 2
NOT_PASSED = 3
PREEMPTED = 75


@dataclass(frozen=True)
class Result:
    """`data` is printed by `--json` (anything `json.dumps` takes); `code` is one of the five exit codes above."""

    data: Mapping[str, Any] = field(default_factory=dict)
    code: int = DONE
