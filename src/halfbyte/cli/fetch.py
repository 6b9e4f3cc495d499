"""Download a run that `train --copy-to` has copied to a bucket.

halfbyte fetch s3://bucket/runs/nvfp4 runs/nvfp4
halfbyte train --run-dir runs/nvfp4

Fetches the newest checkpoint (--step: another one) and the run's files, verifies every byte, and puts them into DIR,
which must be new or empty. A broken download is resumed by the same command. --list shows what the bucket holds."""

import shlex
from dataclasses import dataclass
from typing import Annotated, Any

import tyro

from halfbyte.cli.console import CommandResult, console, print_line, print_note, rich_table
from halfbyte.cli.run_summary import program_name
from halfbyte.io import validated_output_path


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


def run(args: Args) -> CommandResult:
    """List, or fetch."""
    from halfbyte.checkpoint.bucket_copy import fetch

    if args.list:
        listed = listing(args.url)
        rows = [(step, files, f"{size / 2**20:,.1f}") for step, (files, size) in listed["checkpoints"].items()]
        title = f"run {listed['run']}" + (f", being written from {listed['writer']}" if listed["writer"] else "")
        console().print(rich_table(("checkpoint", "files", "MiB"), rows, title=title))
        return CommandResult(listed)
    directory = validated_output_path(args.directory, flag="DIR")
    result = fetch(args.url, directory, step=args.step, say=print_note)
    print_line(
        f"fetched step {result['step']}; go on with: {program_name()} train --run-dir {shlex.quote(str(directory))}"
    )
    return CommandResult({**result, "run_dir": str(directory)})


def listing(url: str) -> dict[str, Any]:
    """The run that a prefix holds, who writes it now, and step -> (files, bytes) of its checkpoints."""
    from halfbyte.checkpoint.bucket_copy import read_head
    from halfbyte.checkpoint.object_store import Objects

    head, _ = read_head(Objects(url))
    if head is None:
        raise ValueError(f"{url} holds no copy of a run")
    steps = {
        step: (len(files), sum(size for parts in files.values() for _, size, _ in parts))
        for step, files in sorted(head["checkpoints"].items(), key=lambda item: int(item[0]))
    }
    writer = head["where"] if head["session"] else None
    return {"url": url, "run": head["run"], "writer": writer, "checkpoints": steps}
