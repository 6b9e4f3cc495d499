"""Download a run that `train --copy-to` has copied to a bucket.

halfbyte fetch s3://bucket/runs/nvfp4 runs/nvfp4
halfbyte train --run-dir runs/nvfp4

Fetches the newest checkpoint (--step: another one) and the run's files, verifies every byte, and puts them into DIR,
which must be new or empty. A broken download is resumed by the same command. --list shows what the bucket holds."""

import shlex
from dataclasses import dataclass
from typing import Annotated, Any

import tyro

from halfbyte.cli.next_steps import program
from halfbyte.cli.result import Result
from halfbyte.cli.screen import console, note, say, table
from halfbyte.inputs import check_output


@dataclass(frozen=True)
class Args:
    """What to fetch, and where to."""

    url: Annotated[str, tyro.conf.Positional]
    """The address that was given to --copy-to: s3://BUCKET/PREFIX or gs://BUCKET/PREFIX."""
    directory: Annotated[str, tyro.conf.Positional] = ""
    """The run directory to make."""
    step: int | None = None
    """The checkpoint to fetch; default the newest."""
    list: bool = False
    """Show what is there, and fetch nothing."""


def run(args: Args) -> Result:
    """List, or fetch."""
    from halfbyte.checkpoint.fetching import fetch, listing
    from halfbyte.checkpoint.objects import Objects

    if args.list:
        _, head = listing(Objects(args.url))
        found = head["checkpoints"]
        sizes = {step: _size(found[step]) for step in sorted(found, key=int)}
        rows = [(step, len(found[step]), "?" if size is None else f"{size / 2**20:,.1f}") for step, size in sizes.items()]
        writer = head["where"] if head["session"] else None
        title = f"run {head['run'] or 'of an earlier version'}" + (f", being written from {writer}" if writer else "")
        console().print(table(("checkpoint", "files", "MiB"), rows, title=title))
        return Result({"url": args.url, "run": head["run"], "writer": writer, "checkpoints": sizes})
    directory = check_output(args.directory, flag="DIR")
    result = fetch(args.url, directory, step=args.step, say=note)
    say(f"fetched step {result['step']}; go on with: {program()} train --run-dir {shlex.quote(str(directory))}")
    return Result({**result, "run_dir": str(directory)})


def _size(files: dict[str, list[list[Any]]]) -> int | None:
    """Bytes of a checkpoint; None where an earlier version wrote it down nowhere."""
    sizes = [part[1] for parts in files.values() for part in parts]
    return None if -1 in sizes else sum(sizes)
