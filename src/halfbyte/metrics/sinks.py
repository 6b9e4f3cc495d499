"""Where step records go: a JSONL file and TensorBoard always, Weights & Biases when asked.

A record is a flat dict of numbers with `step`. After a resume from step N the lines past N, which the new run will
write again, are dropped.
"""

import importlib.util
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

Row = Mapping[str, Any]


class Sink(Protocol):
    """Takes one record a step."""

    def write(self, row: Row) -> None: ...

    def close(self) -> None: ...


class Jsonl:
    """One JSON object a line, flushed at once. Rows of steps past `resume_step` are removed when it opens."""

    def __init__(self, path: str | os.PathLike[str], *, resume_step: int | None = None):
        self.path = Path(path)
        kept = [] if resume_step is None or not self.path.exists() else rows_until(self.path, resume_step)
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
        temporary.replace(self.path)
        self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 (open for the life of the run)

    def write(self, row: Row) -> None:
        self._file.write(json.dumps(_finite(row)) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def rows_until(path: Path, step: int) -> list[str]:
    """Whole lines of a metrics file up to and including `step`; a last line cut by a kill is left out."""
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if row.get("step", 0) <= step:
            kept.append(line)
    return kept


def read_rows(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """All records of a metrics file; a line cut by a kill is left out."""
    last = 2**62
    return [json.loads(line) for line in rows_until(Path(path), last)]


def _finite(row: Row) -> dict[str, Any]:
    """NaN and infinities as strings: JSON has no word for them, and a diverged run must still be readable."""
    return {
        name: str(value) if isinstance(value, float) and value - value != 0 else value for name, value in row.items()
    }


class TensorBoard:
    """Scalars under their own names. A resumed run purges what lies past its first step."""

    def __init__(self, directory: str | os.PathLike[str], *, resume_step: int | None = None):
        from tensorboardX import SummaryWriter

        purge = None if resume_step is None else resume_step + 1
        self._writer = SummaryWriter(str(directory), purge_step=purge, flush_secs=30)

    def write(self, row: Row) -> None:
        for name, value in row.items():
            if name != "step" and isinstance(value, int | float):
                self._writer.add_scalar(name, value, row["step"])

    def close(self) -> None:
        self._writer.close()


class WandB:
    """Weights & Biases; needs the extra `wandb`. The run resumes under the id kept in the run directory."""

    def __init__(self, project: str, *, name: str, directory: Path, config: Row):
        if importlib.util.find_spec("wandb") is None:
            raise ValueError("--wandb needs the package: pip install 'halfbyte[wandb]'")
        import wandb

        marker = directory / "wandb_id"
        if not marker.exists():
            marker.write_text(wandb.util.generate_id())
        self._run = wandb.init(
            project=project, name=name, id=marker.read_text(), resume="allow", dir=directory, config=dict(config)
        )

    def write(self, row: Row) -> None:
        self._run.log({name: value for name, value in row.items() if name != "step"}, step=row["step"])

    def close(self) -> None:
        self._run.finish()
