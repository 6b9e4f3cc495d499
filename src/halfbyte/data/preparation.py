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

from halfbyte.data import prepare_request
from halfbyte.data.dataset import open_dataset
from halfbyte.data.dataset_manifest import (
    MANIFEST_FILE,
    SHARD_SUFFIX,
    TOKENIZER_FILE,
    DatasetManifest,
    canonical_json,
    read_manifest,
)
from halfbyte.data.encode import (
    TRAIN,
    DocumentEncoder,
    SourceSummary,
    SplitRule,
    merge_summaries,
    split_documents,
    summarize_chunk,
    text_key,
)
from halfbyte.data.shard_files import SHARD_BYTES, RunWriters
from halfbyte.data.text_files import InputChunk, InputFile, is_blank, iter_chunks, sha256_of
from halfbyte.data.tokenizer import Tokenizer, bpe_size, train_bpe
from halfbyte.data.worker_pool import MapFn, ProgressMeter, WorkerPool
from halfbyte.io.files import StagingDirectory, remove_stale, rename_into_place

BPE_BYTES = 100_000_000
MAX_SEQ_LEN = 1 << 24
MAX_WORKERS = 1024
MAX_LISTED_FILES = 4  # files in a message


@dataclasses.dataclass(frozen=True)
class PrepareResult:
    """Result of `prepare`: directory, manifest, and whether it was written by this call."""

    directory: Path
    manifest: DatasetManifest
    newly_written: bool  # False: an identical request had been prepared before, nothing was written
    seconds: float
    empty_files: tuple[str, ...] = ()  # text files that hold none


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
    **reading: Unpack[prepare_request.ReadOptions],
) -> PrepareResult:
    """A data set in `out`, made from files of text or tables, directories and globs; the same bytes for any `workers`
    and either `engine`.

    `tokenizer` is a path of a `tokenizer.json`, 'bpe:N' (trained on the training documents, on a sample of about
    `bpe_bytes` when there are more) or 'bytes'. Validation is `val_fraction` of the documents, or exactly the files
    named in `validation`. An `out` that holds the same request is left as it is; any other needs `overwrite`.
    Compressed files must carry a checksum, unless `unchecked`. `column` is the field of a record that holds its text,
    `text` are endings of further files that are read as plain text ('.py').
    """
    begun = time.monotonic()
    _check_numbers(seq_len=seq_len, workers=workers, shard_bytes=shard_bytes)
    parsed = prepare_request.build_request(files, tokenizer, out, reading)
    out, given = parsed.out, parsed.tokenizer
    remove_stale(out)
    request: dict[str, Any] = parsed.settings | {
        "seq_len": seq_len,
        "shard_bytes": shard_bytes,
        "bpe_bytes": None if given else bpe_bytes,
        "inputs": _fingerprints(parsed.inputs, progress=progress),
        "validation": _fingerprints(parsed.held_out, progress=progress),
    }
    _check_no_overlap(request)
    if (existing := _existing_manifest(out, request, overwrite=overwrite, progress=progress)) is not None:
        return PrepareResult(out, existing, False, time.monotonic() - begun)
    with StagingDirectory(out) as staging, WorkerPool(workers, parsed.size, engine=engine) as run:
        job = _PrepareJob(run, parsed, progress)
        rule = job.split_rule(always=given is None)
        made = given or job.train_tokenizer(rule, bpe_size(str(tokenizer)) or 0, bpe_bytes)
        manifest = job.write(staging, made, rule, request)
        check = functools.partial(_existing_manifest, out, request, overwrite=overwrite, progress=False)
        # False: another process was first. Its data set is returned if it has the same request.
        if not rename_into_place(staging, out, replace=overwrite, check=check):
            return PrepareResult(out, _adopt_concurrent_result(out, request, progress), False, time.monotonic() - begun)
    blank = tuple(file.name for file in parsed.inputs + parsed.held_out if is_blank(file))
    return PrepareResult(out, manifest, True, time.monotonic() - begun, blank)


def _adopt_concurrent_result(out: Path, request: dict[str, Any], progress: bool) -> DatasetManifest:
    manifest = _existing_manifest(out, request, overwrite=False, progress=progress)
    if manifest is None:
        raise ValueError(f"--out {out}: could not be made, something is in its place; choose another --out")
    return manifest


def _check_numbers(*, seq_len: int = 2, workers: int | None, shard_bytes: int = 1) -> None:
    if not 2 <= seq_len <= MAX_SEQ_LEN:
        raise ValueError(f"seq_len {seq_len}: a row needs at least 2 tokens to read, and takes at most {MAX_SEQ_LEN:,}")
    if workers is not None and not 1 <= workers <= MAX_WORKERS:
        raise ValueError(f"workers {workers}: at least 1 process must do the work, and at most {MAX_WORKERS} can")
    if shard_bytes < 1:
        raise ValueError(f"shard_bytes {shard_bytes}: it must be positive")


def _fingerprints(files: Sequence[InputFile], *, progress: bool) -> list[dict[str, Any]]:
    prints = []
    with (
        ProgressMeter("hashing input", sum(f.size for f in files), shown=progress and bool(files)) as meter,
        concurrent.futures.ThreadPoolExecutor(4) as threads,
    ):
        for file, digest in zip(files, threads.map(lambda f: sha256_of(f.path), files), strict=True):
            prints.append({"name": file.name, "bytes": file.size, "sha256": digest})
            meter.advance(file.size)
    return prints


def _check_no_overlap(request: dict[str, Any]) -> None:
    training = {entry["sha256"]: entry["name"] for entry in request["inputs"]}
    for entry in request["validation"]:
        if entry["sha256"] in training:
            raise ValueError(
                f"validation file {entry['name']} has the same content as training file {training[entry['sha256']]}; "
                "a model would be scored on text it was trained on: leave one of them out"
            )


def _existing_manifest(
    out: Path, request: dict[str, Any], *, overwrite: bool, progress: bool
) -> DatasetManifest | None:
    """Returns the manifest in `out` if it is intact and has the same request; None if `out` may be written."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return None
    if not out.is_dir():
        raise ValueError(f"{out}: exists and is no directory; choose another --out")
    ours = (MANIFEST_FILE, TOKENIZER_FILE)
    strangers = sorted(p.name for p in out.iterdir() if p.name not in ours and p.suffix != SHARD_SUFFIX)
    if not (out / MANIFEST_FILE).is_file() or strangers:  # while there are any, nothing there is replaced
        other = f", it also holds {strangers[0]}" if (out / MANIFEST_FILE).is_file() else ""
        raise ValueError(f"{out}: exists and is not a prepared data set alone{other}; choose another --out")
    if overwrite:
        return None
    manifest = read_manifest(out)
    if canonical_json(manifest.request) != canonical_json(request):
        keys = {*request, *manifest.request}
        fields = sorted(k for k in keys if canonical_json(request.get(k)) != canonical_json(manifest.request.get(k)))
        raise ValueError(
            f"{out}: holds a data set made from another request (different: {', '.join(fields)}); "
            "choose another --out, or --overwrite to replace it"
        )
    return open_dataset(out, progress=progress).manifest


class _PrepareJob:
    """The steps of one preparation; `run` maps over chunks in order."""

    def __init__(self, run: MapFn, parsed: prepare_request.PrepareRequest, progress: bool):
        self.run, self.progress, self.size = run, progress, parsed.size
        self.inputs, self.held_out = parsed.inputs, parsed.held_out
        self.default_source, self.fraction = parsed.settings["default_source"], parsed.settings["val_fraction"]
        self.text_keys: dict[Path, int] = {}
        self.total_text = 0

    def split_rule(self, *, always: bool) -> SplitRule:
        """Returns the split rule of the request. Reads every file first, unless neither rule nor `always` needs it."""
        if self.fraction == 0.0 and not always:
            return SplitRule()
        with ProgressMeter("reading", sum(f.size for f in self.inputs), shown=self.progress) as meter:
            summaries = merge_summaries(self._summaries(self.inputs, meter))
        self.total_text = sum(summary.size for summary in summaries.values())
        return SplitRule(self.fraction, summaries)

    def _summaries(self, files: Sequence[InputFile], meter: ProgressMeter) -> Iterator[Mapping[str, SourceSummary]]:
        """Yields the summary of each chunk of lines and each whole text file; stores the keys of text files."""
        for file in (file for file in files if file.kind == "text"):
            summary = self._summarize_text(file, meter)
            own = summary.get(self.default_source)
            self.text_keys[file.path] = 0 if own is None else own.smallest
            yield summary
        summarized = functools.partial(summarize_chunk, default_source=self.default_source)
        yield from self._results(summarized, [f for f in files if f.kind == "jsonl"], meter)

    def _summarize_text(self, file: InputFile, meter: ProgressMeter) -> dict[str, SourceSummary]:
        key, size = text_key(iter_chunks(file))
        meter.advance(file.size)
        return {self.default_source: SourceSummary.from_document(key, size)} if size else {}

    def _results(
        self, function: Callable[[InputChunk], Any], files: Sequence[InputFile], meter: ProgressMeter
    ) -> Iterator[Any]:
        """Yields `function` of every chunk, in order."""
        yield from (result for _, result in self.run(function, self._chunks(files, meter)))

    def train_tokenizer(self, rule: SplitRule, size: int, limit: int) -> Tokenizer:
        """Trains a BPE of `size` tokens on the training documents, or on a fixed sample of about `limit` bytes."""
        share = min(1.0, limit / max(self.total_text, 1))
        with ProgressMeter("training the tokenizer", sum(f.size for f in self.inputs), shown=self.progress) as meter:
            return train_bpe(self._sample(self._chunks(self.inputs, meter), rule, share), size)

    def _sample(self, stream: Iterable[InputChunk], rule: SplitRule, share: float) -> Iterator[str]:
        """Yields documents at even distances: one each time the running sum of `share` passes a whole number."""
        seen = 0
        for chunk in stream:
            for part in split_documents(chunk, self.default_source, rule):
                if part.split == TRAIN:
                    seen += 1
                    if int(seen * share) > int((seen - 1) * share):
                        yield part.data.decode()

    def _chunks(self, files: Sequence[InputFile], meter: ProgressMeter) -> Iterator[InputChunk]:
        for file in files:
            position = 0
            for chunk in iter_chunks(file):
                meter.advance(chunk.position - position)
                position = chunk.position
                yield (
                    dataclasses.replace(chunk, key=self.text_keys.get(file.path, 0)) if chunk.kind == "text" else chunk
                )

    def _encoder(self, folder: Path, tokenizer: Tokenizer, rule: SplitRule) -> DocumentEncoder:
        """Saves the tokenizer in the folder and returns the encoder that reads it there."""
        file = str(folder / TOKENIZER_FILE)
        tokenizer.save(file)
        return DocumentEncoder(file, tokenizer.eos, tokenizer.bos, self.default_source, rule, TRAIN)

    def write(self, staging: Path, tokenizer: Tokenizer, rule: SplitRule, request: dict) -> DatasetManifest:
        """Writes shards, tokenizer and manifest to the staging directory."""
        encoder = self._encoder(staging, tokenizer, rule)
        sinks = RunWriters(staging, request["seq_len"], tokenizer.vocab_size, request["shard_bytes"])
        with ProgressMeter("tokenizing", self.size, shown=self.progress) as meter:
            for files, split_encoder in ((self.inputs, encoder), (self.held_out, encoder.held_out())):
                for runs in self._results(split_encoder.encode, files, meter):
                    sinks.write_runs(runs)
        shards, splits = sinks.finish()
        if not any(totals.rows for totals in splits[TRAIN].values()):
            count, first = len(self.inputs), ", ".join(file.name for file in self.inputs[:MAX_LISTED_FILES])
            named = first + ", ..." * (count > MAX_LISTED_FILES)
            raise ValueError(f"no text for training in {count} file(s), {named}: every document is empty or blank")
        manifest = DatasetManifest(
            seq_len=request["seq_len"],
            vocab_size=tokenizer.vocab_size,
            tokenizer={"sha256": tokenizer.sha256, "bos": tokenizer.bos, "eos": tokenizer.eos},
            sources=tuple(sinks.sources),
            splits=splits,
            shards=tuple(shards),
            request=request,
        )
        (staging / MANIFEST_FILE).write_text(manifest.to_json(), encoding="utf-8")
        return manifest
