"""Where step records go: a JSONL file and TensorBoard always, Weights & Biases when asked.

A record is a flat dict of numbers with `step`. After a resume from step N the lines past N, which the new run will
write again, move to another file. No sink may stop or delay a run: `Guarded` says once what failed and lets the run go
on.
"""

import contextlib
import importlib.util
import json
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from halfbyte.inputs import no_follow, read_text, replace_file

from . import events
from .rows import rows_until

Row = Mapping[str, Any]


class Sink(Protocol):
    """Takes one record a step."""

    def write(self, row: Row) -> None: ...

    def close(self) -> None: ...


class Guarded:
    """A sink whose failures are said in one line and never reach the run. A sink that `retries` is asked again with
    the next row; any other is dropped."""

    def __init__(self, name: str, make: Callable[[], Sink], say: Callable[[str], None]):
        self._name, self._say = name, say
        self._sink: Sink | None = None
        self._failing = False
        self._guard(lambda: setattr(self, "_sink", make()))

    def write(self, row: Row) -> None:
        sink = self._sink
        if sink is None:
            return
        failed = self._failing
        if self._guard(lambda: sink.write(row)) and failed:
            self._failing = False
            lost = getattr(sink, "dropped", 0)
            what = f"{lost} rows of it are lost" if lost else "nothing of it is lost"
            self._say(f"{self._name} is written again; {what}")

    def close(self) -> None:
        sink, self._sink = self._sink, None
        if sink is None:
            return
        try:
            sink.close()
        except Exception as error:  # as in `_guard`; the run is over, so that nothing can be tried again
            self._say(f"{self._name} WAS NOT CLOSED: {type(error).__name__}: {error}; its last rows may be missing")

    def _guard(self, action: Callable[[], None]) -> bool:
        """True if it worked. ValueError is a mistake of the caller's and passes."""
        try:
            action()
        except ValueError:
            raise
        except Exception as error:  # a writer may raise anything; whatever it is, it is said
            retries = getattr(self._sink, "retries", False)
            if not self._failing:
                end = ", its rows are kept and tried again" if retries else " without it"
                self._say(f"{self._name} CANNOT BE WRITTEN: {type(error).__name__}: {error}; training goes on{end}")
            self._failing = True
            sink = self._sink
            if sink is not None and not retries:
                self._sink = None
                with contextlib.suppress(Exception):  # its failure has been said
                    sink.close()
            return False
        return True


class Jsonl:
    """One JSON object per line, written at once. Rows of steps past `resume_step` move to NAME.dropped.jsonl when it
    opens.

    What could not be written (a full disk) is kept, 10,000 rows at most, and written with a later row or at the end;
    half a line is taken back. `dropped` counts the rows that were too many to keep.
    """

    retries = True
    MOST_KEPT = 10_000

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        resume_step: int | None = None,
        say: Callable[[str], None] = lambda text: None,
    ):
        self.path = Path(path)
        self._waiting: list[bytes] = []
        self.dropped = 0
        if resume_step is None or not self.path.exists():
            replace_file(self.path, b"")
        else:
            self._cut(resume_step, say)
        self._file = open(self.path, "ab", buffering=0, opener=no_follow)  # noqa: SIM115 (open for the life of the run)
        self._good = self._file.tell()

    def _cut(self, step: int, say: Callable[[str], None]) -> None:
        """Leave only whole lines up to `step`; append later ones to a file of their own. A line that is no record is
        said, unless it is the last, which a kill has cut."""
        found = rows_until(self.path, step)
        if found.damaged[:-1] or (found.damaged and found.damaged[-1] <= len(found.lines + found.later)):
            lines = ", ".join(map(str, found.damaged[:8])) + (", ..." if len(found.damaged) > 8 else "")
            say(f"{self.path}: {len(found.damaged)} damaged line(s) left out (line {lines})")
        if found.later:  # first: a kill between the two writes leaves them twice, and not nowhere
            dropped = self.path.with_name(f"{self.path.stem}.dropped.jsonl")
            with open(dropped, "ab", opener=no_follow) as file:
                file.write(b"".join(line + b"\n" for line in found.later))
            say(f"{len(found.later)} rows after step {step}, which are computed again, are kept in {dropped.name}")
        replace_file(self.path, b"".join(line + b"\n" for line in found.lines))

    def write(self, row: Row) -> None:
        self._waiting.append(json.dumps(_finite(row)).encode() + b"\n")
        self.dropped += max(0, len(self._waiting) - self.MOST_KEPT)
        del self._waiting[: -self.MOST_KEPT]
        self._write_waiting()

    def _write_waiting(self) -> None:
        data = b"".join(self._waiting)
        try:
            if self._file.write(data) != len(data):
                raise OSError(f"only a part of a line could be written to {self.path}")
        except OSError:
            self._file.truncate(self._good)
            raise
        self._good += len(data)
        self._waiting = []

    def close(self) -> None:
        """Raises OSError, closed all the same, if rows still wait and cannot be written now either."""
        try:
            self._write_waiting()
        finally:
            self._file.close()


def _finite(row: Row) -> dict[str, Any]:
    """NaN and infinities as strings: JSON has no word for them, and a diverged run must still be readable."""
    return {
        name: str(value) if isinstance(value, float) and value - value != 0 else value for name, value in row.items()
    }


class TensorBoard:
    """Scalars under their own names, written here and now. A resumed run hides what lies past its first step."""

    def __init__(self, directory: str | os.PathLike[str], *, resume_step: int | None = None):
        folder = Path(directory)
        folder.mkdir(exist_ok=True)
        name = f"events.out.tfevents.{time.time():.0f}.{os.getpid()}.{secrets.token_hex(2)}.halfbyte"
        self._file = open(folder / name, "xb", buffering=0, opener=no_follow)  # noqa: SIM115 (open for the run's life)
        self._add(events.file_version(time.time()))
        if resume_step is not None:
            self._add(events.restart(resume_step + 1, time.time()))

    def write(self, row: Row) -> None:
        numbers = {name: value for name, value in row.items() if name != "step" and isinstance(value, int | float)}
        self._add(events.scalars(row["step"], time.time(), numbers))

    def close(self) -> None:
        self._file.close()

    def _add(self, event: bytes) -> None:
        data = events.record(event)
        if self._file.write(data) != len(data):
            raise OSError(f"only a part of an event could be written to {self._file.name}")


class WandB:
    """Weights & Biases; needs the extra `wandb`. The run resumes under the id kept in the run directory."""

    def __init__(self, project: str, *, name: str, directory: Path, config: Row):
        if importlib.util.find_spec("wandb") is None:
            raise ValueError("--log.wandb needs the package: pip install 'halfbyte[wandb]'")
        import wandb

        marker = directory / "wandb_id"
        if not marker.exists():
            replace_file(marker, secrets.token_hex(4))
        kept = read_text(marker, most=200).strip()
        self._run = wandb.init(project=project, name=name, id=kept, resume="allow", dir=directory, config=dict(config))

    def write(self, row: Row) -> None:
        self._run.log({name: value for name, value in row.items() if name != "step"}, step=row["step"])

    def close(self) -> None:
        self._run.finish()


class Aside:
    """A sink fed by a thread of its own, for one that talks to a network: the run never waits for it.

    When the thread has failed, or is `MOST_WAITING` rows behind, `write` raises; `close` waits `CLOSE_S` at most.
    """

    MOST_WAITING = 1000
    CLOSE_S = 30.0

    def __init__(self, sink: Sink):
        self._sink = sink
        self._rows: queue.Queue[Row | None] = queue.Queue(self.MOST_WAITING)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._feed, name="halfbyte-sink", daemon=True)
        self._thread.start()

    def write(self, row: Row) -> None:
        self._check()
        try:
            self._rows.put_nowait(dict(row))
        except queue.Full:
            raise OSError(f"it takes no rows any more, {self.MOST_WAITING} are waiting") from None

    def close(self) -> None:
        self._check()
        try:
            self._rows.put_nowait(None)
        except queue.Full:
            raise OSError(f"its last {self.MOST_WAITING} rows were not taken") from None
        self._thread.join(self.CLOSE_S)
        self._check()
        if self._thread.is_alive():
            raise OSError(f"it did not end within {self.CLOSE_S:.0f} s")

    def _feed(self) -> None:
        try:
            while (row := self._rows.get()) is not None:
                self._sink.write(row)
            self._sink.close()
        except BaseException as error:  # handed to the run's own thread by `_check`
            self._error = error

    def _check(self) -> None:
        if self._error is not None:
            raise OSError(f"{type(self._error).__name__}: {self._error}")
