"""Records of a playbook: OUT/records/NN-STAGE.json, one file per stage, written whole.

{"stage": "bench", "command": "halfbyte bench ...", "seconds": 41.2, "data": {...}}     the result of its --json
{"stage": "eval", "command": "halfbyte eval", "seconds": 0.0, "missing": "why"}
{"stage": "parity", "seconds": 309.2}                                                   stopped: it is run again
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfbyte.checkpoint import LOCK
from halfbyte.inputs import read_json, replace_file
from halfbyte.metrics import finite

SETTINGS, ABLATION = "settings", "ablation"  # the latter: a stage of earlier versions
FILES = (
    SETTINGS, "doctor", "preflight", "trace", "inspect", "bench", "plan", "parity", "eval", "compare", ABLATION,
    "cluster",
)  # fmt: skip
STAGES = tuple(name for name in FILES if name not in (SETTINGS, ABLATION))


@dataclass(frozen=True)
class Records:
    """The records under `directory`."""

    directory: Path

    def _path(self, stage: str) -> Path:
        return self.directory / f"{FILES.index(stage):02d}-{stage}.json"

    def get(self, stage: str) -> dict[str, Any]:
        """Returns the record of a stage, an empty one if there is none."""
        path = self._path(stage)
        record = read_json(path) if path.is_file() else {"stage": stage}
        if not isinstance(record, dict) or record.get("stage") != stage:
            raise ValueError(f"{path} is not a record of stage {stage!r}. Remove it to run the stage again")
        return record

    def data(self, stage: str) -> dict[str, Any]:
        """Returns the result of a stage, an empty one if it has none."""
        return self.get(stage).get("data", {})

    def is_over(self, stage: str, budget: float) -> bool:
        """Returns True if the stage has a record and no smaller `budget` ended it. Earlier versions did not write which
        one: their studies that are not complete, or had no time, go on with any."""
        record, data = self.get(stage), self.data(stage)
        ended_by = record.get("ended_by", 0.0 if data.get("complete") is False or data.get("seeds") == 0 else None)
        return bool({"data", "missing"} & record.keys()) and (ended_by is None or budget <= ended_by)

    def seconds(self, *stages: str) -> float:
        """Returns the seconds of these stages, by default of all, in all starts but those that kill -9 ended."""
        return sum(self.get(stage).get("seconds", 0.0) for stage in stages or STAGES)

    def put(self, stage: str, **record: Any) -> None:
        """Write the record of a stage. Those of later stages, which rest on it, are dropped first."""
        self.directory.mkdir(parents=True, exist_ok=True)
        for later in STAGES if stage in STAGES else ():
            if FILES.index(later) > FILES.index(stage):
                self._path(later).unlink(missing_ok=True)
        replace_file(self._path(stage), json.dumps(finite({"stage": stage, **record}), indent=1, default=str) + "\n")

    def settle(self, settings: Mapping[str, Any]) -> None:
        """Write the settings. Raises ValueError if the directory holds something else or was begun with others."""
        stored, values, out = self.data(SETTINGS), json.loads(json.dumps(settings)), self.directory.parent
        for name in values if stored else ():
            if stored.get(name) != values[name]:
                raise ValueError(
                    f"{out} was begun with {name} {stored.get(name)!r}, got {values[name]!r}; go on with what it was "
                    "begun with, or give another --out"
                )
        if not stored:
            folders = [folder for folder in (out, self.directory) if folder.is_dir()]
            names = {path.name for folder in folders for path in folder.iterdir() if path.suffix != ".tmp"}
            if others := names - {LOCK, self.directory.name}:  # stages replace files and folders of `out` by name
                raise ValueError(f"{out} is not empty ({min(others)}) and holds no playbook; give another --out")
            self.put(SETTINGS, data=values)
