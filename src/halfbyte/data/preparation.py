"""From text files to a prepared data set: `prepare`.

Chunks of the input are read in order, turned into tokens by worker processes, taken back in order, packed per source
and written. Order and cuts never depend on the number of workers, so neither do the bytes that come out. All of it
happens in a hidden directory beside `out`, renamed at the end: `out` is complete or absent.
"""

import concurrent.futures
import dataclasses
import functools
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from halfbyte.data.dataset import open_dataset
from halfbyte.data.encoding import Encoder, parts_of, summarize, text_key
from halfbyte.data.files import MOST_SOURCE, Chunk, InputFile, chunks, find_files, sha256_of
from halfbyte.data.manifest import FILE, SHARD_SUFFIX, TOKENIZER_FILE, VERSION, Manifest, canonical, read_manifest
from halfbyte.data.parallel import ChunkRunner, Runner
from halfbyte.data.progress import Meter
from halfbyte.data.shards import SHARD_BYTES
from halfbyte.data.sinks import Sinks
from halfbyte.data.splitting import TRAIN, VALIDATION, SplitRule, Summary, merge_summaries
from halfbyte.data.staging import Staging, clear_left, publish
from halfbyte.data.tokenizer import END_OF_TEXT, Tokenizer, bpe_size, byte_tokenizer, load_tokenizer, train_bpe
from halfbyte.inputs import check_output

BPE_BYTES = 100_000_000
MOST_SEQ = 1 << 24
MOST_WORKERS = 1024


@dataclasses.dataclass(frozen=True)
class Prepared:
    """The outcome of `prepare`: where it is, what is in it, and whether it had to be made."""

    directory: Path
    manifest: Manifest
    fresh: bool  # False: an identical request had been prepared before, nothing was written
    seconds: float


def prepare(
    files: Sequence[str | Path] | str | Path,
    *,
    tokenizer: str | Path,
    out: str | Path,
    seq_len: int = 2048,
    val_fraction: float = 0.01,
    validation: Sequence[str | Path] = (),
    workers: int | None = None,
    overwrite: bool = False,
    default_source: str = "default",
    eos: str | None = None,
    bos: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    bpe_bytes: int = BPE_BYTES,
    unchecked: bool = False,
    progress: bool = False,
) -> Prepared:
    """A data set in `out`, made from jsonl and text files, directories and globs; the same bytes for any `workers`.

    `tokenizer` is a path of a `tokenizer.json`, 'bpe:N' (trained on the training documents, on a sample of about
    `bpe_bytes` when there are more) or 'bytes'. Validation is `val_fraction` of the documents, or exactly the files
    named in `validation`. An `out` that holds the same request is left as it is; any other needs `overwrite`.
    Compressed files must carry a checksum, unless `unchecked`.
    """
    begun = time.monotonic()
    files = [files] if isinstance(files, str | Path) else list(files)
    _check_numbers(seq_len=seq_len, val_fraction=val_fraction, workers=workers, shard_bytes=shard_bytes)
    _check_source(default_source)
    out = _output(out)
    clear_left(out)
    held_out = find_files(validation, unchecked=unchecked)
    apart = {file.path.resolve() for file in held_out}
    inputs = [file for file in find_files(files, unchecked=unchecked) if file.path.resolve() not in apart]
    if not inputs:
        raise ValueError("no training files: name at least one file that is not a validation file")
    given = _named_tokenizer(str(tokenizer), eos=eos, bos=bos)
    request: dict[str, Any] = {
        "version": VERSION,
        "tokenizer": given.sha256 if given else str(tokenizer),
        "markers": [given.bos, given.eos] if given else None,
        "seq_len": seq_len,
        "val_fraction": 0.0 if held_out else val_fraction,
        "default_source": default_source,
        "shard_bytes": shard_bytes,
        "bpe_bytes": None if given else bpe_bytes,
        "inputs": _fingerprints(inputs, progress=progress),
        "validation": _fingerprints(held_out, progress=progress),
    }
    _check_apart(request)
    if (existing := _existing(out, request, overwrite=overwrite, progress=progress)) is not None:
        return Prepared(out, existing, False, time.monotonic() - begun)
    total = sum(file.size for file in inputs + held_out)
    with Staging(out) as staging, ChunkRunner(workers, total) as run:
        job = _Job(staging, run, default_source, progress)
        rule = job.split_rule(inputs, request["val_fraction"], always=given is None)
        made = given or job.train_tokenizer(inputs, rule, bpe_size(str(tokenizer)) or 0, bpe_bytes)
        manifest = job.write(inputs, held_out, made, rule, request)
        if not publish(staging, out, replace=overwrite):  # another process was first: with the same request, or raise
            return Prepared(out, _made_meanwhile(out, request, progress), False, time.monotonic() - begun)
    return Prepared(out, manifest, True, time.monotonic() - begun)


def _output(out: str | Path) -> Path:
    """The directory to make; ValueError where nothing can be made, and for a link, which a rename would not follow."""
    path = check_output(out, flag="--out")
    if path.is_symlink():
        raise ValueError(
            f"--out {path}: a symbolic link to {os.readlink(path)}; the data set takes the place of its --out in one "
            "rename, which does not follow links: name the directory itself"
        )
    return path


def _made_meanwhile(out: Path, request: dict[str, Any], progress: bool) -> Manifest:
    found = _existing(out, request, overwrite=False, progress=progress)
    if found is None:
        raise ValueError(f"--out {out}: could not be made, something is in its place; choose another --out")
    return found


def _check_source(name: str) -> None:
    if not 0 < len(name) <= MOST_SOURCE:
        raise ValueError(f"--source must have 1 to {MOST_SOURCE} characters, got {len(name)}")


def _check_numbers(*, seq_len: int, val_fraction: float, workers: int | None, shard_bytes: int) -> None:
    if not 2 <= seq_len <= MOST_SEQ:
        raise ValueError(f"seq_len {seq_len}: a row needs at least 2 tokens to read, and takes at most {MOST_SEQ:,}")
    if not 0.0 <= val_fraction < 1.0:
        raise ValueError(
            f"val_fraction {val_fraction}: it is the share of documents held out, from 0 up to (not with) 1"
        )
    if workers is not None and not 1 <= workers <= MOST_WORKERS:
        raise ValueError(f"workers {workers}: at least 1 process must do the work, and at most {MOST_WORKERS} can")
    if shard_bytes < 1:
        raise ValueError(f"shard_bytes {shard_bytes}: it must be positive")


def _named_tokenizer(spec: str, *, eos: str | None, bos: str | None) -> Tokenizer | None:
    """The tokenizer that exists already, or None for 'bpe:N'."""
    ours = spec == "bytes" or bpe_size(spec) is not None
    if ours and (eos or bos):
        raise ValueError(f"--eos and --bos name markers of a tokenizer.json; {spec} has {END_OF_TEXT}: leave them out")
    if ours:
        return byte_tokenizer() if spec == "bytes" else None
    return load_tokenizer(spec, eos=eos, bos=bos)


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
    if not (out / FILE).is_file() or (strangers := _strangers(out)):
        other = f", it also holds {strangers[0]}" if (out / FILE).is_file() else ""
        raise ValueError(f"{out}: exists and is not a prepared data set alone{other}; choose another --out")
    if overwrite:
        return None
    manifest = read_manifest(out)
    if canonical(manifest.request) != canonical(request):
        fields = sorted(k for k in request if canonical(request[k]) != canonical(manifest.request.get(k)))
        raise ValueError(
            f"{out}: holds a data set made from another request (different: {', '.join(fields)}); "
            "choose another --out, or --overwrite to replace it"
        )
    return open_dataset(out, progress=progress).manifest


def _strangers(out: Path) -> list[str]:
    """Names in `out` that no preparation has written; while there are any, nothing there is replaced."""
    return sorted(p.name for p in out.iterdir() if p.name not in (FILE, TOKENIZER_FILE) and p.suffix != SHARD_SUFFIX)


class _Job:
    """The steps of one preparation; `run` maps over chunks in order."""

    def __init__(self, staging: Path, run: Runner, default_source: str, progress: bool):
        self.staging, self.run, self.default_source, self.progress = staging, run, default_source, progress
        self.text_keys: dict[Path, int] = {}
        self.total_text = 0

    def split_rule(self, inputs: Sequence[InputFile], fraction: float, *, always: bool) -> SplitRule:
        """The rule for `fraction`, after a first reading of every file; without one if nothing asks for it."""
        if fraction == 0.0 and not always:
            return SplitRule()
        with Meter("reading", sum(f.size for f in inputs), shown=self.progress) as meter:
            texts = merge_summaries(self._summarize_text(f, meter) for f in inputs if f.kind == "text")
            lines = self._chunks([f for f in inputs if f.kind == "jsonl"], meter)
            found = self.run(functools.partial(summarize, default_source=self.default_source), lines)
            summaries = merge_summaries([texts, *(summary for _, summary in found)])
        self.total_text = sum(summary.size for summary in summaries.values())
        return SplitRule(fraction, summaries)

    def _summarize_text(self, file: InputFile, meter: Meter) -> dict[str, Summary]:
        key, size = text_key(chunks(file))
        self.text_keys[file.path] = key
        meter.advance(file.size)
        return {self.default_source: Summary.of(key, size)} if size else {}

    def train_tokenizer(self, inputs: Sequence[InputFile], rule: SplitRule, size: int, limit: int) -> Tokenizer:
        """A BPE of `size` from the training side of the documents, or of a fixed sample of them."""
        share = min(1.0, limit / max(self.total_text, 1))
        with Meter("training the tokenizer", sum(f.size for f in inputs), shown=self.progress) as meter:
            return train_bpe(self._sample(self._chunks(inputs, meter), rule, share), size)

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

    def write(
        self,
        inputs: Sequence[InputFile],
        held_out: Sequence[InputFile],
        tokenizer: Tokenizer,
        rule: SplitRule,
        request: dict,
    ) -> Manifest:
        """Shards, tokenizer and manifest in the staging directory."""
        tokenizer.save(self.staging / TOKENIZER_FILE)
        encoder = Encoder(
            str(self.staging / TOKENIZER_FILE), tokenizer.eos, tokenizer.bos, self.default_source, rule, TRAIN
        )
        sinks = Sinks(self.staging, request["seq_len"], tokenizer.vocab_size, request["shard_bytes"])
        with Meter("tokenizing", sum(f.size for f in [*inputs, *held_out]), shown=self.progress) as meter:
            for files, way in (
                (inputs, encoder),
                (held_out, dataclasses.replace(encoder, rule=SplitRule(), split=VALIDATION)),
            ):
                for _, runs in self.run(way.encode, self._chunks(files, meter)):
                    sinks.take(runs)
        shards, splits = sinks.finish()
        if not any(totals.rows for totals in splits[TRAIN].values()):
            raise ValueError(f"no text for training in {len(inputs)} file(s): every document is empty")
        manifest = Manifest(
            seq_len=request["seq_len"],
            vocab_size=tokenizer.vocab_size,
            tokenizer={"sha256": tokenizer.sha256, "bos": tokenizer.bos, "eos": tokenizer.eos},
            sources=tuple(sinks.sources),
            splits=splits,
            shards=tuple(shards),
            request=request,
        )
        (self.staging / FILE).write_text(manifest.to_json(), encoding="utf-8")
        return manifest
