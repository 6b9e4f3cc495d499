"""Turn text files into a training data set; check and describe one.

halfbyte data prepare FILES --tokenizer (tokenizer.json | bpe:N | bytes) --out DIR
halfbyte data verify DIR        every file against the manifest
halfbyte data show DIR          sources, rows, tokens, tokenizer
halfbyte data sample DIR        some rows, decoded
"""

import dataclasses
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from halfbyte.cli.console import CommandResult, console, rich_table, to_terminal_text
from halfbyte.cli.run_summary import program_name
from halfbyte.cli.terminal_signals import sigterm_as_interrupt
from halfbyte.io import check_int, escape_control_chars


@dataclasses.dataclass(frozen=True)
class Prepare:
    """Tokenize, pack and write FILES as shards that `--data` reads; same input, same bytes, for any --workers."""

    files: Annotated[tuple[str, ...], tyro.conf.Positional]
    """jsonl (an object a line: `text`, optionally `source`) and plain text, also .xz, .gz, .zst; Parquet, Arrow,
    ArrayRecord, folders of Hugging Face `datasets`; directories, globs."""
    tokenizer: str
    """A tokenizer.json, bpe:N (train a byte-level BPE of N ids on these files) or bytes."""
    out: str
    """Directory to make. It appears when complete; an existing one is kept unless --overwrite."""
    seq_len: int = 2048
    """Tokens that the model reads at once; a row stores one more."""
    val_fraction: float = 0.01
    """Share of documents held out for validation, source by source."""
    validation: tuple[str, ...] = ()
    """Files to validate on instead of --val-fraction."""
    workers: int | None = None
    """Processes; without it one a core, or one alone for small input."""
    engine: Literal["processes", "ray"] = "processes"
    """ray: on the Ray cluster that RAY_ADDRESS names, or that runs here, a worker a CPU; extra `ray`."""
    overwrite: bool = False
    """Replace what is in --out."""
    column: str = "text"
    """Field or column of a record that holds its text."""
    text: tuple[str, ...] = ()
    """Endings of other files to read as plain text: .py .c .tex; every other file of a directory is passed over."""
    source: str = "default"
    """Source name of documents that do not carry one."""
    eos: str | None = None
    """End-of-document token of a tokenizer.json, where it is not a well-known one."""
    bos: str | None = None
    """Begin-of-document token of a tokenizer.json, where it is not a well-known one."""
    unchecked: bool = False
    """Accept .zst and .xz files without a checksum, in which a flipped bit can pass as other text."""


@dataclasses.dataclass(frozen=True)
class Verify:
    """Compare every file of a data set with its manifest (sha256)."""

    directory: Annotated[str, tyro.conf.Positional]


@dataclasses.dataclass(frozen=True)
class Show:
    """What a data set holds, by split and source."""

    directory: Annotated[str, tyro.conf.Positional]


@dataclasses.dataclass(frozen=True)
class Sample:
    """Some rows as text, markers and document boundaries visible."""

    directory: Annotated[str, tyro.conf.Positional]
    split: str = "train"
    rows: int = 3
    seed: int = 0


Args = (
    Annotated[Prepare, tyro.conf.subcommand("prepare")]
    | Annotated[Verify, tyro.conf.subcommand("verify")]
    | Annotated[Show, tyro.conf.subcommand("show")]
    | Annotated[Sample, tyro.conf.subcommand("sample")]
)


def run(args: Prepare | Verify | Show | Sample) -> CommandResult:
    match args:
        case Prepare():
            return run_prepare(args)
        case Verify():
            return run_verify(args)
        case Show():
            return run_show(args)
        case Sample():
            return run_sample(args)


def run_prepare(args: Prepare) -> CommandResult:
    from halfbyte.data import prepare

    own = ("files", "source", "seq_len", "overwrite")
    shared: dict[str, Any] = {name: value for name, value in vars(args).items() if name not in own}
    shared |= {"default_source": args.source, "progress": True}
    with sigterm_as_interrupt():
        made = prepare(args.files, seq_len=args.seq_len, overwrite=args.overwrite, **shared)
    if made.newly_written:
        print(f"prepared {made.directory} in {made.seconds:.1f} s")
        if made.empty_files:
            print(f"passed over, without text: {escape_control_chars(', '.join(made.empty_files))}")
    else:
        print(f"{made.directory} is up to date: it holds exactly this request, and every file is intact")
    print_totals(made.manifest)
    words, takes = train_on(made.directory, made.manifest)
    print(f"train on it{f' ({takes})' if takes else ''}:")
    print(f"  {program_name()} {shlex.join(words)}")
    return CommandResult({"fresh": made.newly_written, "seconds": made.seconds, **facts(made.directory, made.manifest)})


def train_on(directory: Path, manifest: Any) -> tuple[list[str], str]:
    """Returns (command that trains on a data set, what it takes here): see `run_estimate.suggested_run`."""
    from halfbyte.cli.run_estimate import changed_flags, rough_duration, suggested_run
    from halfbyte.train.run_presets import run_config

    run, seconds = suggested_run(manifest)
    words = ["train", run.name, "--data", str(directory), *changed_flags(run, run_config(run.name))]
    return words, f"{rough_duration(seconds)} on this machine, and compiling first" if seconds else ""


def run_verify(args: Verify) -> CommandResult:
    from halfbyte.data import open_dataset

    dataset = open_dataset(args.directory, progress=True)
    size = sum(shard.bytes for shard in dataset.manifest.shards)
    print(f"{dataset.directory}: {len(dataset.manifest.shards)} shards, {size / 1e6:,.1f} MB, all as the manifest says")
    return CommandResult({"intact": True, **facts(dataset.directory, dataset.manifest)})


def run_show(args: Show) -> CommandResult:
    from halfbyte.data.dataset_manifest import read_manifest

    manifest = read_manifest(Path(args.directory))
    print_totals(manifest)
    return CommandResult(facts(Path(args.directory), manifest))


def run_sample(args: Sample) -> CommandResult:
    import numpy as np

    from halfbyte.data import open_dataset
    from halfbyte.data.encode import split_rows_by_segment

    check_int("--rows", args.rows, least=1)
    check_int("--seed", args.seed)
    dataset = open_dataset(args.directory, verify="sizes")
    tokenizer, rows = dataset.tokenizer(), dataset.rows(args.split)
    if len(rows) == 0:
        raise ValueError(f"{args.directory}: the {args.split} split is empty; --split train has the text")
    chosen = np.random.default_rng(args.seed).permutation(len(rows))[: args.rows]
    shown = []
    for index in sorted(chosen.tolist()):
        row = np.frombuffer(rows[index], rows.dtype)
        texts = [tokenizer.decode(run, markers=True) for run in split_rows_by_segment(row)]
        source = dataset.manifest.sources[int(row["source"][0])]
        print(f"--- {args.split} row {index}, source {escape_control_chars(source)}, {len(texts)} document(s)")
        print(to_terminal_text("\n~~~\n".join(texts)))
        shown.append({"row": index, "source": source, "documents": texts})
    return CommandResult({"split": args.split, "rows": shown})


def facts(directory: Path, manifest: Any) -> dict[str, Any]:
    """What `--json` says of a data set."""
    return {
        "directory": str(directory),
        "seq_len": manifest.seq_len,
        "vocab_size": manifest.vocab_size,
        "tokenizer": manifest.tokenizer,
        "sources": list(manifest.sources),
        "splits": {
            split: {source: dataclasses.asdict(totals) for source, totals in sources.items()}
            for split, sources in manifest.splits.items()
        },
        "shards": len(manifest.shards),
        "bytes": sum(shard.bytes for shard in manifest.shards),
    }


def print_totals(manifest: Any) -> None:
    rows = []
    for split, sources in manifest.splits.items():
        rows += [(split, name, *_cells([sources[name]])) for name in manifest.sources if name in sources]
        if len(sources) > 1:
            rows.append((split, "all", *_cells(sources.values())))
    heading = f"rows of {manifest.seq_len} tokens, vocabulary {manifest.vocab_size:,}"
    columns = ("split", "source", "documents", "MB", "tokens", "rows", "B/token")
    console().print(rich_table(columns, rows, title=heading, numbers=2))


def _cells(totals: Iterable[Any]) -> list[str]:
    totals = list(totals)
    documents, size, tokens, rows = (
        sum(getattr(entry, field) for entry in totals) for field in ("documents", "text_bytes", "tokens", "rows")
    )
    return [f"{documents:,}", f"{size / 1e6:,.2f}", f"{tokens:,}", f"{rows:,}", f"{size / max(tokens, 1):.2f}"]
