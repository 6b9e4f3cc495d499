"""From text files to a prepared data set: `prepare`.

Chunks of the input are read in order, turned into tokens by worker processes, taken back in order, packed per source
and written. Order and cuts never depend on the number of workers, so neither do the bytes that come out. All of it
happens in a hidden directory beside `out`, renamed at the end: `out` is complete or absent.
"""

import concurrent.futures
import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

from halfbyte.data import asking
from halfbyte.data.dataset import open_dataset
from halfbyte.data.encoding import Encoder, parts_of, summarize, text_key
from halfbyte.data.files import Chunk, InputFile, chunks, is_blank, sha256_of
from halfbyte.data.manifest import FILE, SHARD_SUFFIX, TOKENIZER_FILE, Manifest, canonical, read_manifest
from halfbyte.data.parallel import ChunkRunner, Runner
from halfbyte.data.progress import Meter
from halfbyte.data.shards import SHARD_BYTES
from halfbyte.data.sinks import Sinks
from halfbyte.data.splitting import TRAIN, SplitRule, Summary, merge_summaries
from halfbyte.data.staging import Staging, clear_left, publish
from halfbyte.data.tokenizer import Tokenizer, bpe_size, train_bpe

BPE_BYTES = 100_000_000
MOST_SEQ = 1 << 24
MOST_WORKERS = 1024
MOST_NAMED = 4  # files in a message


@dataclasses.dataclass(frozen=True)
class Prepared:
    """The outcome of `prepare`: where it is, what is in it, and whether it had to be made."""

    directory: Path
    manifest: Manifest
    fresh: bool  # False: an identical request had been prepared before, nothing was written
    seconds: float
    blank: tuple[str, ...] = ()  # text files that hold none


def prepare(
    files: Sequence[str | Path] | str | Path,
    *,
    tokenizer: str | Path,
    out: str | Path,
    seq_len: int = 2048,
    workers: int | None = None,
    engine: str = "processes",
    overwrite: bool = False,
    shard_bytes: int = SHARD_BYTES,
    bpe_bytes: int = BPE_BYTES,
    progress: bool = False,
    **reading: Unpack[asking.Reading],
) -> Prepared:
    """A data set in `out`, made from files of text or tables, directories and globs; the same bytes for any `workers`
    and either `engine`.

    `tokenizer` is a path of a `tokenizer.json`, 'bpe:N' (trained on the training documents, on a sample of about
    `bpe_bytes` when there are more) or 'bytes'. Validation is `val_fraction` of the documents, or exactly the files
    named in `validation`. An `out` that holds the same request is left as it is; any other needs `overwrite`.
    Compressed files must carry a checksum, unless `unchecked`. `column` is the field of a record that holds its text.
    """
    begun = time.monotonic()
    _check_numbers(seq_len=seq_len, workers=workers, shard_bytes=shard_bytes)
    asked = asking.asked(files, tokenizer, out, reading)
    out, given = asked.out, asked.tokenizer
    clear_left(out)
    request: dict[str, Any] = asked.settings | {
        "seq_len": seq_len,
        "shard_bytes": shard_bytes,
        "bpe_bytes": None if given else bpe_bytes,
        "inputs": _fingerprints(asked.inputs, progress=progress),
        "validation": _fingerprints(asked.held_out, progress=progress),
    }
    _check_apart(request)
    if (existing := _existing(out, request, overwrite=overwrite, progress=progress)) is not None:
        return Prepared(out, existing, False, time.monotonic() - begun)
    with Staging(out) as staging, ChunkRunner(workers, asked.size, engine=engine) as run:
        job = _Job(run, asked, progress)
        rule = job.split_rule(always=given is None)
        made = given or job.train_tokenizer(rule, bpe_size(str(tokenizer)) or 0, bpe_bytes)
        manifest = job.write(staging, made, rule, request)
        check = functools.partial(_existing, out, request, overwrite=overwrite, progress=False)
        if not publish(staging, out, replace=overwrite, check=check):  # another was first: the same request, or raise
            return Prepared(out, _made_meanwhile(out, request, progress), False, time.monotonic() - begun)
    blank = tuple(file.name for file in asked.inputs + asked.held_out if is_blank(file))
    return Prepared(out, manifest, True, time.monotonic() - begun, blank)


def _made_meanwhile(out: Path, request: dict[str, Any], progress: bool) -> Manifest:
    found = _existing(out, request, overwrite=False, progress=progress)
    if found is None:
        raise ValueError(f"--out {out}: could not be made, something is in its place; choose another --out")
    return found


def _check_numbers(*, seq_len: int = 2, workers: int | None, shard_bytes: int = 1) -> None:
    if not 2 <= seq_len <= MOST_SEQ:
        raise ValueError(f"seq_len {seq_len}: a row needs at least 2 tokens to read, and takes at most {MOST_SEQ:,}")
    if workers is not None and not 1 <= workers <= MOST_WORKERS:
        raise ValueError(f"workers {workers}: at least 1 process must do the work, and at most {MOST_WORKERS} can")
    if shard_bytes < 1:
        raise ValueError(f"shard_bytes {shard_bytes}: it must be positive")


def _fingerprints(files: Sequence[InputFile], *, progress: bool) -> list[dict[str, Any]]:
    prints = []
    with (
        Meter("hashing input", sum(f.size for f in files), shown=progress) as meter,
        concurrent.futures.ThreadPoolExecutor(4) as threads,
    ):
        for file, digest in zip(files, threads.map(lambda f: sha256_of(f.path), files), strict=True):
            prints.append({"name": file.name, "bytes": file.size, "sha256": digest})
            meter.advance(file.size)
    return prints


def _check_apart(request: dict[str, Any]) -> None:
    training = {entry["sha256"]: entry["name"] for entry in request["inputs"]}
    for entry in request["validation"]:
        if entry["sha256"] in training:
            raise ValueError(
                f"validation file {entry['name']} has the same content as training file {training[entry['sha256']]}; "
                "a model would be scored on text it was trained on: leave one of them out"
            )


def _existing(out: Path, request: dict[str, Any], *, overwrite: bool, progress: bool) -> Manifest | None:
    """The manifest in `out` if it is this very request and intact; None if `out` may be written."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return None
    if not out.is_dir():
        raise ValueError(f"{out}: exists and is no directory; choose another --out")
    ours = (FILE, TOKENIZER_FILE)
    strangers = sorted(p.name for p in out.iterdir() if p.name not in ours and p.suffix != SHARD_SUFFIX)
    if not (out / FILE).is_file() or strangers:  # while there are any, nothing there is replaced
        other = f", it also holds {strangers[0]}" if (out / FILE).is_file() else ""
        raise ValueError(f"{out}: exists and is not a prepared data set alone{other}; choose another --out")
    if overwrite:
        return None
    manifest = read_manifest(out)
    if canonical(manifest.request) != canonical(request):
        keys = {*request, *manifest.request}
        fields = sorted(k for k in keys if canonical(request.get(k)) != canonical(manifest.request.get(k)))
        raise ValueError(
            f"{out}: holds a data set made from another request (different: {', '.join(fields)}); "
            "choose another --out, or --overwrite to replace it"
        )
    return open_dataset(out, progress=progress).manifest


class _Job:
    """The steps of one preparation; `run` maps over chunks in order."""

    def __init__(self, run: Runner, asked: asking.Asked, progress: bool):
        self.run, self.progress, self.size = run, progress, asked.size
        self.inputs, self.held_out = asked.inputs, asked.held_out
        self.default_source, self.fraction = asked.settings["default_source"], asked.settings["val_fraction"]
        self.text_keys: dict[Path, int] = {}
        self.total_text = 0

    def split_rule(self, *, always: bool) -> SplitRule:
        """The rule of the request, after a first reading of every file; without one if nothing asks for it."""
        if self.fraction == 0.0 and not always:
            return SplitRule()
        with Meter("reading", sum(f.size for f in self.inputs), shown=self.progress) as meter:
            summaries = merge_summaries(self._summaries(self.inputs, meter))
        self.total_text = sum(summary.size for summary in summaries.values())
        return SplitRule(self.fraction, summaries)

    def _summaries(self, files: Sequence[InputFile], meter: Meter) -> Iterator[Mapping[str, Summary]]:
        """Of every chunk of lines, and of every text file as a whole, whose key is remembered."""
        for file in (file for file in files if file.kind == "text"):
            summary = self._summarize_text(file, meter)
            own = summary.get(self.default_source)
            self.text_keys[file.path] = 0 if own is None else own.smallest
            yield summary
        summarized = functools.partial(summarize, default_source=self.default_source)
        yield from self._results(summarized, [f for f in files if f.kind == "jsonl"], meter)

    def _summarize_text(self, file: InputFile, meter: Meter) -> dict[str, Summary]:
        key, size = text_key(chunks(file))
        meter.advance(file.size)
        return {self.default_source: Summary.of(key, size)} if size else {}

    def _results(self, function: Callable[[Chunk], Any], files: Sequence[InputFile], meter: Meter) -> Iterator[Any]:
        """The function of every chunk, in order."""
        yield from (found for _, found in self.run(function, self._chunks(files, meter)))

    def train_tokenizer(self, rule: SplitRule, size: int, limit: int) -> Tokenizer:
        """A BPE of `size` from the training side of the documents, or of a fixed sample of them."""
        share = min(1.0, limit / max(self.total_text, 1))
        with Meter("training the tokenizer", sum(f.size for f in self.inputs), shown=self.progress) as meter:
            return train_bpe(self._sample(self._chunks(self.inputs, meter), rule, share), size)

    def _sample(self, stream: Iterable[Chunk], rule: SplitRule, share: float) -> Iterator[str]:
        """Documents at even distances: one is taken each time the running sum of `share` passes a whole number."""
        seen = 0
        for chunk in stream:
            for part in parts_of(chunk, self.default_source, rule):
                if part.split == TRAIN:
                    seen += 1
                    if int(seen * share) > int((seen - 1) * share):
                        yield part.data.decode()

    def _chunks(self, files: Sequence[InputFile], meter: Meter) -> Iterator[Chunk]:
        for file in files:
            position = 0
            for chunk in chunks(file):
                meter.advance(chunk.position - position)
                position = chunk.position
                yield (
                    dataclasses.replace(chunk, key=self.text_keys.get(file.path, 0)) if chunk.kind == "text" else chunk
                )

    def _encoder(self, folder: Path, tokenizer: Tokenizer, rule: SplitRule) -> Encoder:
        """How chunks become tokens, with the tokenizer in a file of the folder."""
        file = str(folder / TOKENIZER_FILE)
        tokenizer.save(file)
        return Encoder(file, tokenizer.eos, tokenizer.bos, self.default_source, rule, TRAIN)

    def write(self, staging: Path, tokenizer: Tokenizer, rule: SplitRule, request: dict) -> Manifest:
        """Shards, tokenizer and manifest in the staging directory."""
        encoder = self._encoder(staging, tokenizer, rule)
        sinks = Sinks(staging, request["seq_len"], tokenizer.vocab_size, request["shard_bytes"])
        with Meter("tokenizing", self.size, shown=self.progress) as meter:
            for files, way in ((self.inputs, encoder), (self.held_out, encoder.held_out())):
                for runs in self._results(way.encode, files, meter):
                    sinks.take(runs)
        shards, splits = sinks.finish()
        if not any(totals.rows for totals in splits[TRAIN].values()):
            count, first = len(self.inputs), ", ".join(file.name for file in self.inputs[:MOST_NAMED])
            named = first + ", ..." * (count > MOST_NAMED)
            raise ValueError(f"no text for training in {count} file(s), {named}: every document is empty or blank")
        manifest = Manifest(
            seq_len=request["seq_len"],
            vocab_size=tokenizer.vocab_size,
            tokenizer={"sha256": tokenizer.sha256, "bos": tokenizer.bos, "eos": tokenizer.eos},
            sources=tuple(sinks.sources),
            splits=splits,
            shards=tuple(shards),
            request=request,
        )
        (staging / FILE).write_text(manifest.to_json(), encoding="utf-8")
        return manifest
