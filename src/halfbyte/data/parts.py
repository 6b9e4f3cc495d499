"""A preparation in parts: what several machines have made of some files each, kept until one packs it all.

Beside `out` lies the folder `out.parts`. It belongs to one request (settings, names and sizes of the files). Of each
file and stage (`summary`, then `tokens`) it keeps the results chunk by chunk, in one ArrayRecord that is renamed when
it is whole: a part that was killed leaves nothing that counts, and is done again. What the packer finds it takes,
what it does not find it makes itself, so the bytes that come out are those of one machine.
"""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from array_record.python import array_record_module

from halfbyte.data.encoding import Run
from halfbyte.data.files import InputFile, sha256_of
from halfbyte.data.manifest import canonical
from halfbyte.data.shards import open_shard
from halfbyte.data.splitting import SPLITS, SplitRule, Summary
from halfbyte.inputs import parse_json, read_json, replace_file

SUMMARY, TOKENS = "summary", "tokens"
REQUEST = "request.json"


def parse_part(text: str) -> tuple[int, int]:
    """(I, N) of 'I/N'."""
    number, slash, count = text.partition("/")
    if not (slash and number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count) <= 1 << 20):
        raise ValueError(f"--part {text!r}: it is I/N, part I of N from 1 to N, such as 3/8")
    return int(number), int(count)


class Parts:
    """The folder of a request's parts; `files` in the order of their numbers."""

    def __init__(self, out: Path, settings: Mapping[str, Any], files: Sequence[InputFile]):
        self.folder = out.with_name(out.name + ".parts")
        self.request = {**settings, "files": [[file.name, file.size] for file in files]}
        self._numbers = {file.path: number for number, file in enumerate(files)}
        self._digest = functools.cache(sha256_of)
        begun = self.folder.exists() and any(not path.name.startswith(".") for path in self.folder.iterdir())
        if begun and canonical(_request_in(self.folder)) != canonical(self.request):
            raise ValueError(
                f"{self.folder}: holds parts of another request (other settings, or files of other names and sizes); "
                "remove it, or give the arguments that its parts had"
            )

    def begin(self) -> None:
        """Make the folder, if no other part has."""
        self.folder.mkdir(parents=True, exist_ok=True)
        replace_file(self.folder / REQUEST, canonical(self.request) + "\n")

    def has(self, stage: str, file: InputFile) -> bool:
        return self._place(stage, file).is_file()

    def write(self, stage: str, file: InputFile, results: Iterable[Any], *, rule: SplitRule) -> None:
        """Keep the results of a file, after what they were made from."""
        half = self.folder / f".{self._place(stage, file).name}.{os.uname().nodename}.{os.getpid()}"
        half.touch()
        writer = array_record_module.ArrayRecordWriter(str(half), "group_size:1")
        try:
            writer.write(self._origin(file, rule))
            for result in results:
                writer.write(DUMP[stage](result))
            writer.close()
            half.rename(self._place(stage, file))
        finally:
            half.unlink(missing_ok=True)

    def read(self, stage: str, file: InputFile, *, rule: SplitRule) -> Iterator[Any]:
        """The results of a file, one a chunk; ValueError if the file or the rule was another then."""
        place = self._place(stage, file)
        reader = open_shard(place)
        with _naming(place):
            first = reader.read([0])[0] if reader.num_records() else b""
        if first != self._origin(file, rule):
            raise ValueError(f"{place}: made of other content than {file.name} has now; remove {self.folder}")
        for number in range(1, reader.num_records()):
            with _naming(place):
                found = LOAD[stage](reader.read([number])[0])
            yield found

    def _origin(self, file: InputFile, rule: SplitRule) -> bytes:
        stated = {name: dataclasses.astuple(summary) for name, summary in rule.sources.items()}
        made_of = {"sha256": self._digest(file.path), "fraction": rule.fraction, "sources": stated}
        return canonical(made_of).encode()

    def _place(self, stage: str, file: InputFile) -> Path:
        return self.folder / f"{stage}-{self._numbers[file.path]:06d}.array_record"


@contextlib.contextmanager
def _naming(place: Path) -> Iterator[None]:
    """Whatever is wrong with a stored result, as a ValueError that names its file."""
    try:
        yield
    except (RuntimeError, LookupError, TypeError, AttributeError, ArithmeticError, ValueError) as error:
        raise ValueError(f"{place}: damaged ({error}); remove it, and it is made again") from error


def _request_in(folder: Path) -> Any:
    try:
        return read_json(folder / REQUEST)
    except (ValueError, FileNotFoundError) as error:
        raise ValueError(f"{folder}: no folder of parts ({error}); remove it") from error


def dump_summary(found: Mapping[str, Summary]) -> bytes:
    return canonical({source: dataclasses.astuple(summary) for source, summary in found.items()}).encode()


def load_summary(stored: bytes) -> dict[str, Summary]:
    found = parse_json(stored.decode(), what="a summary")
    return {source: Summary(*map(int, numbers)) for source, numbers in found.items()}


def dump_runs(runs: Mapping[tuple[str, str], Run]) -> bytes:
    """A line of JSON ([split, source, tokens, bytes of text] each), then the tokens and where documents start."""
    head = canonical([[*place, len(run.tokens), run.text_bytes] for place, run in runs.items()]).encode() + b"\n"
    arrays = ((run.tokens.astype("<u4").tobytes(), np.packbits(run.starts).tobytes()) for run in runs.values())
    return head + b"".join(part for pair in arrays for part in pair)


def load_runs(stored: bytes) -> dict[tuple[str, str], Run]:
    head, _, rest = stored.partition(b"\n")
    runs = {}
    for split, source, count, size in parse_json(head.decode(), what="a part's head"):
        if split not in SPLITS or not isinstance(source, str) or type(count) is not int or count < 0:
            raise ValueError("not what a part keeps")  # a split is the beginning of a file's name
        tokens = np.frombuffer(rest, "<u4", count).astype(np.uint32)
        starts = np.unpackbits(np.frombuffer(rest, np.uint8, (count + 7) // 8, 4 * count), count=count).astype(bool)
        rest = rest[4 * count + (count + 7) // 8 :]
        runs[split, source] = Run(tokens, starts, int(size))
    return runs


DUMP: dict[str, Callable[[Any], bytes]] = {SUMMARY: dump_summary, TOKENS: dump_runs}
LOAD: dict[str, Callable[[bytes], Any]] = {SUMMARY: load_summary, TOKENS: load_runs}
