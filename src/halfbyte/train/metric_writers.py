"""Metric writers: a JSONL file and TensorBoard always, Weights & Biases on request.

A row is a flat dict of numbers with `step`. After a resume from step N the rows past N, which the new run writes again,
move to another file. No sink may stop or delay a run: `FaultTolerantSink` reports a failure once, and the run
continues.

TensorBoard's event files are written here: the packages for it import PyTorch if it is installed, which takes seconds,
and write from a thread behind a queue, on which a run would wait forever if the disk is full. An event is a protocol
buffer (TensorFlow's event.proto and summary.proto), a file a sequence of records: length, checksum, event, checksum.

    Event    1 wall_time: double  2 step: varint  3 file_version: text  5 summary: Summary  7 session_log: SessionLog
    Summary  1 value, repeated: { 1 tag: text   2 simple_value: float }
    SessionLog  1 status: varint (1: START, which hides everything from this step on that was written before)
"""

import contextlib
import importlib.util
import json
import os
import queue
import secrets
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from halfbyte.io import atomic_write, open_no_follow, read_text
from halfbyte.io.install_command import install_command
from halfbyte.train.metrics_log import read_rows_until

Row = Mapping[str, Any]
VERSION = "brain.Event:2"
_VARINT, _DOUBLE, _BYTES, _FLOAT = 0, 1, 2, 5  # wire types
_MASK = 0xFFFFFFFF


class Sink(Protocol):
    """Takes one row per step."""

    def write(self, row: Row) -> None: ...

    def close(self) -> None: ...


class FaultTolerantSink:
    """A sink whose failures are reported in one line and never stop the run.

    After a failure a sink with `retries` gets the next row, any other is closed and dropped.
    """

    def __init__(self, name: str, open_sink: Callable[[], Sink], say: Callable[[str], None]):
        self._name, self._say = name, say
        self._sink: Sink | None = None
        self._failing = False
        self._guard(lambda: setattr(self, "_sink", open_sink()))

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
        """Returns True if `action` succeeded. A ValueError is an error of the caller and is raised."""
        try:
            action()
        except ValueError:
            raise
        except Exception as error:  # a writer may raise anything; all of it is reported
            retries = getattr(self._sink, "retries", False)
            if not self._failing:
                end = ", its rows are kept and tried again" if retries else " without it"
                self._say(f"{self._name} CANNOT BE WRITTEN: {type(error).__name__}: {error}; training goes on{end}")
            self._failing = True
            sink = self._sink
            if sink is not None and not retries:
                self._sink = None
                with contextlib.suppress(Exception):  # its failure has been reported
                    sink.close()
            return False
        return True


class JsonlSink:
    """Writes one JSON object per line, without buffering.

    Opening moves the rows of steps after `resume_step` to NAME.dropped.jsonl.

    Rows that could not be written (a full disk) are retained, MAX_RETAINED at most, and written with a later row or at
    the end; half a line is truncated. `dropped` counts the rows beyond that limit.
    """

    retries = True
    MAX_RETAINED = 10_000

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
            atomic_write(self.path, b"")
        else:
            self._truncate_after(resume_step, say)
        self._file = open(self.path, "ab", buffering=0, opener=open_no_follow)  # noqa: SIM115 (open for the life of the run)
        self._good = self._file.tell()

    def _truncate_after(self, step: int, say: Callable[[str], None]) -> None:
        """Keeps whole lines up to `step`; appends later ones to another file. Reports lines that are no rows, except
        for the last line, which a kill may have truncated."""
        rows = read_rows_until(self.path, step)
        if rows.damaged[:-1] or (rows.damaged and rows.damaged[-1] <= len(rows.lines + rows.later)):
            lines = ", ".join(map(str, rows.damaged[:8])) + (", ..." if len(rows.damaged) > 8 else "")
            say(f"{self.path}: {len(rows.damaged)} damaged line(s) left out (line {lines})")
        if (
            rows.later
        ):  # before the truncation: a kill between the two writes leaves the rows in both files, not in none
            dropped = self.path.with_name(f"{self.path.stem}.dropped.jsonl")
            with open(dropped, "ab", opener=open_no_follow) as file:
                file.write(b"".join(line + b"\n" for line in rows.later))
            say(f"{len(rows.later)} rows after step {step}, which are computed again, are kept in {dropped.name}")
        atomic_write(self.path, b"".join(line + b"\n" for line in rows.lines))

    def write(self, row: Row) -> None:
        self._waiting.append(json.dumps(_nonfinite_as_text(row)).encode() + b"\n")
        self.dropped += max(0, len(self._waiting) - self.MAX_RETAINED)
        del self._waiting[: -self.MAX_RETAINED]
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
        """Writes the retained rows and closes the file. Raises OSError, after closing, if they cannot be written."""
        try:
            self._write_waiting()
        finally:
            self._file.close()


class TensorBoardSink:
    """Scalars under their own names, written synchronously. A resumed run hides earlier events past its first step."""

    def __init__(self, directory: str | os.PathLike[str], *, resume_step: int | None = None):
        folder = Path(directory)
        folder.mkdir(exist_ok=True)
        name = f"events.out.tfevents.{time.time():.0f}.{os.getpid()}.{secrets.token_hex(2)}.halfbyte"
        self._file = open(folder / name, "xb", buffering=0, opener=open_no_follow)  # noqa: SIM115 (open for the run's life)
        self._add(file_version(time.time()))
        if resume_step is not None:
            self._add(session_start_event(resume_step + 1, time.time()))

    def write(self, row: Row) -> None:
        numbers = {name: value for name, value in row.items() if name != "step" and isinstance(value, int | float)}
        self._add(scalar_event(row["step"], time.time(), numbers))

    def close(self) -> None:
        self._file.close()

    def _add(self, event: bytes) -> None:
        data = frame_record(event)
        if self._file.write(data) != len(data):
            raise OSError(f"only a part of an event could be written to {self._file.name}")


class WandbSink:
    """Weights & Biases; needs the extra `wandb`. The run resumes under the id in the run directory."""

    def __init__(self, project: str, *, name: str, directory: Path, config: Row):
        if importlib.util.find_spec("wandb") is None:
            raise ValueError(f"--log.wandb needs the package: {install_command('wandb')}")
        import wandb

        marker = directory / "wandb_id"
        if not marker.exists():
            atomic_write(marker, secrets.token_hex(4))
        uid = read_text(marker, most=200).strip()
        self._run = wandb.init(project=project, name=name, id=uid, resume="allow", dir=directory, config=dict(config))

    def write(self, row: Row) -> None:
        self._run.log({name: value for name, value in row.items() if name != "step"}, step=row["step"])

    def close(self) -> None:
        self._run.finish()


class BackgroundSink:
    """Writes to a sink from a separate thread, for a sink that uses a network: the run never waits for it.

    When the thread has failed, or is `MAX_QUEUED` rows behind, `write` raises; `close` waits `CLOSE_S` at most.
    """

    MAX_QUEUED = 1000
    CLOSE_S = 30.0

    def __init__(self, sink: Sink):
        self._sink = sink
        self._rows: queue.Queue[Row | None] = queue.Queue(self.MAX_QUEUED)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._feed, name="halfbyte-sink", daemon=True)
        self._thread.start()

    def write(self, row: Row) -> None:
        self._check()
        try:
            self._rows.put_nowait(dict(row))
        except queue.Full:
            raise OSError(f"it takes no rows any more, {self.MAX_QUEUED} are waiting") from None

    def close(self) -> None:
        self._check()
        try:
            self._rows.put_nowait(None)
        except queue.Full:
            raise OSError(f"its last {self.MAX_QUEUED} rows were not taken") from None
        self._thread.join(self.CLOSE_S)
        self._check()
        if self._thread.is_alive():
            raise OSError(f"it did not end within {self.CLOSE_S:.0f} s")

    def _feed(self) -> None:
        try:
            while (row := self._rows.get()) is not None:
                self._sink.write(row)
            self._sink.close()
        except BaseException as error:  # `_check` raises it on the thread of the run
            self._error = error

    def _check(self) -> None:
        if self._error is not None:
            raise OSError(f"{type(self._error).__name__}: {self._error}")


def scalar_event(step: int, wall_time: float, values: Mapping[str, float]) -> bytes:
    """Returns the event of the numbers of one step."""
    summary = b"".join(
        _text(1, _text(1, tag.encode()) + _key(2, _FLOAT) + struct.pack("<f", _float32(value)))
        for tag, value in values.items()
    )
    return _event_header(wall_time) + _key(2, _VARINT) + _varint(step) + _text(5, summary)


def file_version(wall_time: float) -> bytes:
    """Returns the first event of a file."""
    return _event_header(wall_time) + _text(3, VERSION.encode())


def session_start_event(step: int, wall_time: float) -> bytes:
    """Returns the event that hides what an earlier run has written for `step` and later."""
    return _event_header(wall_time) + _key(2, _VARINT) + _varint(step) + _text(7, _key(1, _VARINT) + _varint(1))


def read_scalar_events(path: str | os.PathLike[str]) -> Iterator[tuple[int, str, float]]:
    """Yields (step, tag, value) of every number in an event file of TensorBoard; a truncated last record ends it."""
    data, offset = Path(path).read_bytes(), 0
    while offset + 12 <= len(data):
        size = int.from_bytes(data[offset : offset + 8], "little")
        event, offset = data[offset + 12 : offset + 12 + size], offset + 16 + size
        if len(event) < size:
            return
        fields = list(_fields(event))
        step = next((value for field, value in fields if field == 2 and isinstance(value, int)), 0)
        for summary in (value for field, value in fields if field == 5 and isinstance(value, bytes)):
            for value in (value for field, value in _fields(summary) if field == 1 and isinstance(value, bytes)):
                entries = dict(_fields(value))
                tag, number = entries.get(1), entries.get(2)  # a text or an image has no simple_value
                if isinstance(tag, bytes) and isinstance(number, bytes) and len(number) == 4:
                    yield step, tag.decode("utf-8", "replace"), struct.unpack("<f", number)[0]


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yields (number, varint or bytes) of the fields of a protocol buffer."""
    offset = 0
    while offset < len(message):
        key, offset = _read_varint(message, offset)
        kind, value = key & 7, b""
        if kind == _VARINT:
            number, offset = _read_varint(message, offset)
            yield key >> 3, number
            continue
        size = {_DOUBLE: 8, _FLOAT: 4}.get(kind)
        if size is None:
            if kind != _BYTES:
                raise ValueError(f"an event holds a field of wire type {kind}, which protocol buffers do not have")
            size, offset = _read_varint(message, offset)
        value, offset = message[offset : offset + size], offset + size
        yield key >> 3, value


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    while at < len(message):
        byte, at = message[at], at + 1
        number, shift = number | (byte & 0x7F) << shift, shift + 7
        if byte < 0x80:
            break
    return number, at


def frame_record(event: bytes) -> bytes:
    """Returns the event as a record of a file."""
    size = struct.pack("<Q", len(event))
    return size + _masked(size) + event + _masked(event)


def crc32c(data: bytes) -> int:
    """Returns the CRC-32C (Castagnoli polynomial) of `data`."""
    crc = _MASK
    for byte in data:
        crc = _CRC[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ _MASK


def _nonfinite_as_text(row: Row) -> dict[str, Any]:
    """Returns NaN and infinities as strings: JSON cannot represent them, and the rows of a diverged run must be
    readable."""
    return {
        name: str(value) if isinstance(value, float) and value - value != 0 else value for name, value in row.items()
    }


def _event_header(wall_time: float) -> bytes:
    return _key(1, _DOUBLE) + struct.pack("<d", wall_time)


def _key(field: int, wire_type: int) -> bytes:
    return _varint(field << 3 | wire_type)


def _text(field: int, content: bytes) -> bytes:
    return _key(field, _BYTES) + _varint(len(content)) + content


def _varint(number: int) -> bytes:
    """Encodes seven bits per byte, lowest first; the top bit is set if more follow."""
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _float32(value: float) -> float:
    """Replaces numbers beyond the range of float32 by infinities."""
    return value if abs(value) <= 3.4e38 or value - value != 0 else float("inf") * (1 if value > 0 else -1)


def _masked(data: bytes) -> bytes:
    """Returns the checksum of TensorFlow records: CRC-32C, rotated by 15 bits, plus a constant."""
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & _MASK)


def _crc_table() -> list[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)  # the polynomial of CRC-32C, reflected
        table.append(byte)
    return table


_CRC = _crc_table()
