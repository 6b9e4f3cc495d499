"""What the stages of a playbook found: one JSON file each, written whole when the stage is over, never changed after.

    {"stage": "bench", "command": "halfbyte bench ...", "seconds": 41.2, "data": {...}}
    {"stage": "eval", "command": "halfbyte eval ...", "seconds": 0.0, "missing": "why"}

`data` is what the command gives with `--json`. A start that was killed leaves the records of the stages before it.
Beside them, of a stage that was stopped, the seconds that it took until then (NN-stage.spent).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfbyte.checkpoint import LOCK
from halfbyte.inputs import read_json, replace_file
from halfbyte.metrics import finite

STAGES = (
    "doctor", "preflight", "trace", "inspect", "bench", "plan", "parity", "eval", "compare", "ablation", "cluster",
)  # fmt: skip
SETTINGS = "settings"


@dataclass(frozen=True)
class Records:
    """The records under `directory`."""

    directory: Path

    def _path(self, stage: str) -> Path:
        place = 0 if stage == SETTINGS else STAGES.index(stage) + 1
        return self.directory / f"{place:02d}-{stage}.json"

    def get(self, stage: str) -> dict[str, Any] | None:
        """A stage's record, None while it is not over."""
        path = self._path(stage)
        if not path.is_file():
            return None
        found = read_json(path)
        if not isinstance(found, dict) or found.get("stage") != stage or not {"data", "missing"} & found.keys():
            raise ValueError(f"{path} is no record of the stage {stage!r}; remove it, and the stage is run again")
        return found

    def data(self, stage: str) -> dict[str, Any] | None:
        """What a stage found; None if it is not over or found nothing."""
        return (self.get(stage) or {}).get("data")

    def put(self, stage: str, record: Mapping[str, Any]) -> None:
        """Write a record, whole or not at all."""
        self.directory.mkdir(parents=True, exist_ok=True)
        replace_file(self._path(stage), json.dumps(finite({"stage": stage, **record}), indent=1, default=str) + "\n")

    def spent(self, stage: str) -> float:
        """Seconds of the starts that were stopped in a stage; one that was killed has told nothing."""
        path = self._path(stage).with_suffix(".spent")
        return float(path.read_text()) if path.is_file() else 0.0

    def spend(self, stage: str, seconds: float) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        replace_file(self._path(stage).with_suffix(".spent"), f"{seconds:.3f}\n")

    def reopen(self, stage: str) -> None:
        """Drop the records of a stage and of all behind it; what it has taken is kept."""
        self.spend(stage, (self.get(stage) or {}).get("seconds", 0.0))
        for later in STAGES[STAGES.index(stage) :]:
            self._path(later).unlink(missing_ok=True)

    def seconds(self) -> float:
        """What the stages took that are over."""
        return sum((self.get(stage) or {}).get("seconds", 0.0) for stage in STAGES)

    def settle(self, settings: Mapping[str, Any]) -> None:
        """Writes the settings of this playbook. Raises ValueError if its directory holds something else, or was begun
        with other settings, which are named."""
        stored, asked = self.data(SETTINGS), json.loads(json.dumps(settings))
        if stored is None:
            out = self.directory.parent
            present = out.iterdir() if out.is_dir() else ()
            others = {path.name for path in present if path.suffix != ".tmp"} - {LOCK, self.directory.name}
            if others:  # later stages replace files and folders of this directory by name
                raise ValueError(f"{out} is not empty ({min(others)}) and holds no playbook; give another --out")
            self.put(SETTINGS, {"data": settings})
            return
        for name in asked:
            if stored.get(name) != asked[name]:
                raise ValueError(
                    f"{self.directory.parent} was begun with {name} {stored.get(name)!r}, got {asked[name]!r}; go on "
                    "with what it was begun with, or give another --out"
                )
