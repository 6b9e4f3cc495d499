"""Print a script that completes commands and flags in bash or zsh.

halfbyte completion bash > ~/.local/share/bash-completion/completions/halfbyte

Without installing anything: source <(halfbyte completion bash). The flags are those of this version; print it again
after an update."""

import contextlib
import importlib
import io
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from halfbyte.cli.console import CommandResult


@dataclass(frozen=True)
class Args:
    shell: Annotated[Literal["bash", "zsh"], tyro.conf.Positional] = "bash"
    """The shell that is to complete."""


def run(args: Args) -> CommandResult:
    from halfbyte.cli.main import find_commands

    files = find_commands()
    commands = {name: importlib.import_module(f"halfbyte.cli.{file.stem}").Args for name, file in files.items()}
    script = io.StringIO()
    with contextlib.redirect_stdout(script), contextlib.suppress(SystemExit):  # tyro exits after printing
        tyro.extras.subcommand_cli_from_dict(commands, prog="halfbyte", args=["--tyro-print-completion", args.shell])
    print(script.getvalue(), end="")
    return CommandResult({"shell": args.shell, "script": script.getvalue()})
