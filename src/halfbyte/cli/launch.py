"""Start local ranks of a run, and start them again from the last checkpoint when one fails.

`halfbyte launch -- train ...` runs `halfbyte train ...`, as one process or as several that find each other on loopback:

halfbyte launch --ranks 2 -- train demo --mesh fsdp=2 --run-dir runs/two

When a rank dies, hangs or is preempted the group ends, and is started again after a pause that doubles. Starts in a row
that bring no new checkpoint are bounded. SIGTERM, SIGINT and SIGHUP go to every rank; then nothing is started again."""

import datetime
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tyro

from halfbyte.cli.console import CommandResult, print_note
from halfbyte.cli.flag_parsing import read_flags
from halfbyte.io import check_float, check_int

AFTER = "write the command after --, as in: halfbyte launch -- train demo --run-dir runs/demo"


@dataclass(frozen=True)
class Args:
    """Flags of the supervisor; the command after `--` is kept apart."""

    command: tyro.conf.Suppress[tuple[str, ...]] = ()
    ranks: int = 1
    """Processes on this machine."""
    restarts: int = 5
    """Starts in a row that may bring no new checkpoint."""
    pause_s: float = 1.0
    """Before the first restart; doubles up to a minute."""
    grace_s: float = 30.0
    """Once one rank has ended, the others have this long before they are killed."""

    def __post_init__(self) -> None:
        check_int("--ranks", self.ranks, least=1)
        check_int("--restarts", self.restarts)
        check_float("--pause-s", self.pause_s, holds=0 <= self.pause_s < 1e6, wanted="0 or more seconds, below 1e6")
        check_float("--grace-s", self.grace_s, holds=0 <= self.grace_s < 1e6, wanted="0 or more seconds, below 1e6")


def parse(argv: list[str]) -> Args:
    """Flags before `--`; the command of the ranks after it."""
    at = argv.index("--") if "--" in argv else len(argv)
    own, command = argv[:at], argv[at + 1 :]
    if not command and "train" in own:
        raise ValueError(AFTER)
    args = read_flags(Args, own, prog="halfbyte launch", doc=__doc__)
    if not command or command[0] != "train":
        raise ValueError(AFTER)
    return replace(args, command=tuple(command))


def run(args: Args) -> CommandResult:
    """Supervise the ranks."""
    from halfbyte.distributed.supervisor import RestartPolicy, Supervisor, newest_checkpoint

    command, directory = with_run_directory(args.command)
    policy = RestartPolicy(restarts=args.restarts, pause_s=args.pause_s, grace_s=args.grace_s)
    supervisor = Supervisor(
        command, args.ranks, policy, progress=lambda: newest_checkpoint(directory),
        say=lambda text: print_note(f"halfbyte launch: {text}"),
    )  # fmt: skip
    code = supervisor.run()
    data: dict[str, Any] = {"run_dir": str(directory), "restarts": supervisor.restarts, "exit_code": code}
    return CommandResult(data, code if code >= 0 else 128 - code)


def with_run_directory(command: tuple[str, ...]) -> tuple[list[str], Path]:
    """(the command with a --run-dir, that directory): a restart must find what the start before has left."""
    from halfbyte.cli.train import flag_value, split_run_name

    words = list(command)
    given = flag_value(words, "--run-dir")
    if given:
        return words, Path(given)
    name = split_run_name(words[1:])[0] or "demo"
    directory = Path("runs") / f"{name}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    return [*words, "--run-dir", str(directory)], directory
