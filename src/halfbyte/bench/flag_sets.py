"""One command under several sets of XLA flags, each in a process of its own, because XLA reads its flags once."""

import json
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class SetResult:
    """The rows that `halfbyte bench --json` gave under one set; `note` says why there are none."""

    name: str
    rows: tuple[Mapping[str, Any], ...] = ()
    note: str = ""
    circumstances: Mapping[str, Any] = field(default_factory=dict)


def measure_sets(names: Sequence[str], command: Sequence[str], *, say: Callable[[str], None]) -> Iterator[SetResult]:
    """`command`, the words of a `halfbyte bench`, under each set, one after the other."""
    for name in names:
        say(f"measuring under the flags {name!r} ...")
        yield measure_set(name, command)


def measure_set(name: str, command: Sequence[str]) -> SetResult:
    """`command --flags NAME --json` in a process of its own. A set under which it fails is a result too."""
    done = subprocess.run([*command, "--flags", name, "--json"], capture_output=True, text=True, check=False)
    try:
        data = json.loads(done.stdout)
    except ValueError:
        last = (done.stderr.strip().splitlines() or ["nothing was said"])[-1]
        return SetResult(name, note=f"failed with exit code {done.returncode}: {last[:300]}")
    rest = {key: value for key, value in data.items() if key != "rows"}
    return SetResult(name, tuple(data["rows"]), circumstances=rest)


def ratios(found: Sequence[SetResult]) -> dict[tuple[str, str, str], float]:
    """(set, recipe, remat) -> its speed beside the first set's for the same recipe and remat."""
    times = {
        (each.name, row["recipe"], row["remat"]): row["milliseconds"]
        for each in found
        for row in each.rows
        if row["milliseconds"]
    }
    first = found[0].name if found else ""
    return {
        key: times[first, *key[1:]] / milliseconds for key, milliseconds in times.items() if (first, *key[1:]) in times
    }
