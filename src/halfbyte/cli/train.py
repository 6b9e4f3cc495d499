"""Train a Llama in NVFP4, on this machine or on many hosts.

`halfbyte train` alone trains a small model on the embedded corpus. `halfbyte train RUN` starts from a named run (demo,
llama-60m, ..., llama3.1-405b); every field can be changed by a flag, groups by dotted ones. A run directory with a
checkpoint is resumed; `--run-dir DIR` alone goes on with the config that DIR holds."""

import datetime
import os
import re
import shlex
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TextIO, cast

import tyro

from halfbyte.cli.errors import say_error
from halfbyte.cli.flags import read_flags
from halfbyte.cli.maxtext import refuse_maxtext
from halfbyte.cli.next_steps import program
from halfbyte.cli.result import BAD_INPUT, DONE, FAILED, NOT_PASSED, PREEMPTED, Result
from halfbyte.cli.screen import MayClose, PlainConsole
from halfbyte.devices.platform import idle_card
from halfbyte.inputs import check_output, check_whole
from halfbyte.launch.cluster import DistributedConfig
from halfbyte.profiling import ProfileConfig
from halfbyte.train.config import TrainConfig

if TYPE_CHECKING:
    from halfbyte.checkpoint import Copy
    from halfbyte.launch import Setting
    from halfbyte.ranks import End, Group
    from halfbyte.train import Observer, RunResult

SWITCHES = (
    "--deterministic", "--no-deterministic", "--allow-change", "--no-allow-change", "--json", "--sample", "--no-sample",
    "--copy-take-over", "--no-copy-take-over",
    "--log.tensorboard", "--log.no-tensorboard", "--model.tied", "--model.no-tied", "--model.qk-norm",
    "--model.no-qk-norm", "--model.joint-qk-norm", "--model.no-joint-qk-norm", "--model.norm-topk",
    "--model.no-norm-topk", "--validation.at-end", "--validation.no-at-end",
)  # fmt: skip
"""Flags without a value: the word behind one may be the run's name."""
LOST_A_PEER = re.compile(r"gloo|nccl|coordination|UNAVAILABLE|by peer|DEADLINE|Barrier", re.I)
"""What a collective raises when the other side is gone."""


@dataclass(frozen=True)
class Args:
    """Flags of the command around the config of the run."""

    run: Annotated[TrainConfig, tyro.conf.arg(name=""), tyro.conf.AvoidSubcommands]
    config: str = ""
    """Start from this config: JSON, TOML or YAML; fields that it leaves out are those of RUN."""
    run_dir: str = ""
    """Where the run lives; default runs/NAME-DATE."""
    copy_to: str = ""
    """Copy each checkpoint, and the run's files, to s3://BUCKET/PREFIX or gs://BUCKET/PREFIX while the run trains."""
    copy_keep: int = 0
    """Keep this many checkpoints in the bucket, and those in the run directory; 0: delete none."""
    copy_take_over: bool = False
    """Write to a prefix of another directory of this run, or of a run without checkpoints, whose process has ended."""
    allow_change: bool = False
    """Resume although model, recipe or other fields have changed."""
    sample: bool = True
    """Write a sample of text at the end, if the data has a tokenizer."""
    profiling: Annotated[ProfileConfig, tyro.conf.arg(name="")] = field(default_factory=ProfileConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    xla_flags: Literal["recommended", "own-turn", "none"] = "recommended"
    """Settings of XLA, NCCL and the allocator on GPUs; `own-turn`: a layer's gradients travel before the next layer's
    turn."""

    def __post_init__(self) -> None:
        check_whole("--copy-keep", self.copy_keep)
        if (self.copy_keep or self.copy_take_over) and not self.copy_to:
            raise ValueError("--copy-keep and --copy-take-over need a copy: give --copy-to s3://BUCKET/PREFIX, too")
        if self.copy_to:
            from halfbyte.checkpoint.objects import spec_of

            spec_of(self.copy_to)


def parse(argv: list[str]) -> Args:
    """Flags over the config of the named run, of --config, or of the run directory."""
    refuse_maxtext(argv)
    name, rest = split_name(argv)
    default = Args(run=base_config(name, rest))
    return read_flags(Args, rest, prog=f"halfbyte train {name or 'RUN'}", doc=__doc__, default=default)


def split_name(argv: list[str]) -> tuple[str, list[str]]:
    """(name of the run or "", the other arguments). The name is the one argument that is no flag and no flag's
    value."""
    for at, word in enumerate(argv):
        before = argv[at - 1] if at else ""
        is_value = before.startswith("--") and "=" not in before and before.replace("_", "-") not in SWITCHES
        if not word.startswith("-") and not is_value:
            return word, argv[:at] + argv[at + 1 :]
    return "", argv


def base_config(name: str, rest: list[str]) -> TrainConfig:
    """What flags change: the named run, else --config, else the config of an existing --run-dir, else the demo."""
    from halfbyte.cli.base_config import config_over
    from halfbyte.runs import run_config
    from halfbyte.train.reading import open_directory

    given = flag_value(rest, "--config")
    if given:
        return config_over(name, Path(given))
    if name:
        source = flag_value(rest, "--init-from")
        return run_config(name) if not source else replace(run_config(name), model=base_of_source(rest).model)
    directory = Path(flag_value(rest, "--run-dir") or "-")
    if (directory / "config.json").is_file():
        return open_directory(directory, check=False, say=lambda text: None).config  # checked when the run is opened
    return base_of_source(rest) if flag_value(rest, "--init-from") else run_config("demo")


def base_of_source(rest: list[str]) -> TrainConfig:
    """The config that a run with --init-from changes: that of the run, or of the folder, which has no data."""
    from halfbyte.interchange.starting import initial_config

    source = flag_value(rest, "--init-from")
    config = initial_config(Path(source))
    if config.data == "synthetic" and not flag_value(rest, "--data"):
        raise ValueError(
            f"--init-from {source} has no data of its own; give --data DIR, made by `halfbyte data prepare FILES "
            f"--tokenizer {source}/tokenizer.json --out DIR` (or --data synthetic, to time a step)"
        )
    return config


def flag_value(argv: list[str], flag: str) -> str:
    """The value of `--flag VALUE` or `--flag=VALUE`, or "". Underscores and hyphens are the same."""
    for at, word in enumerate(argv):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") == flag:
            return value if equals else (argv[at + 1] if at + 1 < len(argv) else "")
    return ""


def run(args: Args) -> Result:
    """Launch, train, report."""
    import jax

    from halfbyte import launch
    from halfbyte.ranks import Signals

    with Signals(_stopped_early, afterwards=signal.SIG_IGN) as signals:  # what comes later changes no exit code
        output = MayClose(sys.stdout, on_close=lambda: signals.on_signal("a closed pipe"))
        console = PlainConsole(file=cast(TextIO, output))
        for applied in launch.apply(gpu_settings(args), os.environ):
            console.say(str(applied))
        group = launch.start(args.distributed, watchdog_s=args.run.watchdog_s, say=console.say)
        if warning := idle_card(os.environ, jax.devices()[0].platform):
            console.say(f"WARNING: {warning}")
        signals.on_signal = group.request_stop
        try:
            result = ending(group, lambda: train_and_copy(args, console, group))
        except BaseException:
            if group.count == 1:  # with several ranks the others still have to hear why
                group.close(FAILED)
            raise
        group.close(result.code)
        return result


def gpu_settings(args: Args) -> "tuple[Setting, ...]":
    """What XLA, NCCL and the allocator are told on GPUs: the recommended, and what --deterministic takes."""
    from halfbyte import launch

    gpus = launch.visible_gpus()
    if not gpus:
        return ()
    several, flags = len(gpus) > 1, args.xla_flags
    settings = launch.recommended(gpus[0], several=several, flags=flags) if flags != "none" else ()
    if not args.run.deterministic:
        return settings
    if not args.run_dir:
        raise ValueError("--deterministic on a GPU needs --run-dir DIR: what autotuning chose is kept there")
    rank = max(args.distributed.process, 0)
    return settings + launch.repeatable(Path(args.run_dir).absolute() / f"autotuned-{rank}.txt")


def _stopped_early(name: str) -> None:
    from halfbyte.ranks import End, leave

    leave(End(0, f"stopped by {name} before the run began; nothing is lost, start it again", PREEMPTED))


def ending(group: "Group", work: Callable[[], Result]) -> Result:
    """What `work` returns. When it fails, on one rank of several, every rank says the same sentence and exits with the
    same code; a group of one leaves errors to the command line."""
    try:
        return work()
    except BaseException as error:
        if group.count == 1:
            raise
        end = failure(group, error)
        leave_together(group, end)
        raise AssertionError("unreachable") from error


def failure(group: "Group", error: BaseException) -> "End":
    """How the group ends after an error on this rank."""
    from halfbyte.cli.main import is_bad_input
    from halfbyte.ranks import Disagreement

    if isinstance(error, Disagreement):
        return group.fail_as(str(error), BAD_INPUT)
    if is_bad_input(error):
        return group.fail(str(error), BAD_INPUT)
    if LOST_A_PEER.search(str(error)):
        return group.explain(error)
    if not isinstance(error, KeyboardInterrupt):
        traceback.print_exception(error)
    return group.fail(f"failed: {type(error).__name__}: {error}", FAILED)


def leave_together(group: "Group", end: "End") -> None:
    """Give the others time to read the sentence before this process goes; rank 0, which keeps the store, goes last."""
    from halfbyte.ranks import leave

    time.sleep(2.0 if group.rank else 4.0)
    leave(end)


def train_and_copy(args: Args, console: PlainConsole, group: "Group") -> Result:
    """Train, with --copy-to copied to a bucket; exit code 1 if the end of a finished run is not there."""
    copies: "list[Copy]" = []
    try:
        result = _train(args, console, group, copies)
    except Exception:  # an interrupt waits for no bucket
        for copy in copies:
            copy.close()
        raise
    for copy in copies:
        copied = copy.close()
        code = FAILED if copied["missing"] and result.code == DONE else result.code
        result = Result({**result.data, "copy": copied}, code)
    return result


def start_copy(args: Args, console: PlainConsole, directory: Path, run: str) -> "list[Copy]":
    """Starts what --copy-to names."""
    from halfbyte.checkpoint import Copy

    if not args.copy_to:
        return []
    options: Any = {"keep": args.copy_keep, "keep_every": args.run.checkpoint.keep_every, "say": console.say}
    try:
        return [Copy(args.copy_to, directory, run, take_over=args.copy_take_over, **options)]
    except OSError as error:
        raise ValueError(f"--copy-to: {error}; check the address, the credentials and the network") from None


def _train(args: Args, console: PlainConsole, group: "Group", copies: "list[Copy]") -> Result:
    from halfbyte.conformance import SelfTestFailed
    from halfbyte.train import Diverged, train

    main = group.rank == 0
    directory = run_directory(args, group)
    try:
        result = train(
            args.run,
            directory,
            console=console,
            allow_change=args.allow_change,
            profile=args.profiling,
            group=group,
            initial=initial_weights(args.run, directory),
            observers=observers(args.run, directory),
            opened=lambda directory, run: copies.extend(start_copy(args, console, directory, run)),
            committed=lambda step: copies[0].committed(step) if copies else None,
        )
    except (Diverged, SelfTestFailed) as stop:
        code = FAILED if isinstance(stop, Diverged) else NOT_PASSED
        if group.count > 1:
            for copy in copies:
                copy.close()  # leaving ends the process
            leave_together(group, group.fail_as(str(stop), code))
        say_error(str(stop))
        return Result({"run_dir": str(directory), "error": str(stop)}, code)
    if result.stopped:
        if main:
            console.say(
                f"stopped by {result.stopped} after step {result.step}, checkpoint written; "
                f"go on with: {program()} train --run-dir {shlex.quote(str(directory))}"
                + (f" --copy-to {shlex.quote(args.copy_to)}" if args.copy_to else "")
            )
        return Result(_data(result), PREEMPTED)
    data = _data(result)
    if main:
        from halfbyte.cli.after_training import report

        data.update(report(args.run, result, console, sample=args.sample, started=started_with(args)))
    return Result(data, DONE)


def started_with(args: Args) -> tuple[str, ...]:
    """Flags of this command that another run needs too, and that no config holds."""
    flags: tuple[str, ...] = ()
    if args.distributed.cpu_devices:
        flags += ("--distributed.cpu-devices", str(args.distributed.cpu_devices))
    return flags if args.xla_flags == "recommended" else (*flags, "--xla-flags", args.xla_flags)


def initial_weights(config: TrainConfig, directory: Path) -> Any:
    """What reads the weights of --init-from onto the run's mesh; None without it."""
    if not config.init_from:
        return None
    from halfbyte.interchange.starting import initial_params

    return lambda mesh: initial_params(Path(config.init_from), config, mesh, directory)


def observers(config: TrainConfig, directory: Path) -> "list[Observer]":
    """What looks at the run while it goes."""
    found: list[Observer] = []
    if config.radar:
        from halfbyte.diagnosis.radar import Radar

        found.append(Radar(config.radar, directory))
    if config.telemetry:
        from halfbyte.diagnosis.telemetry import Telemetry

        found.append(Telemetry(config.telemetry, directory))
    return found


def _data(result: "RunResult") -> dict[str, Any]:
    return {
        "run_dir": str(result.directory),
        "step": result.step,
        "loss": result.loss,
        "validation": result.validation,
        "seconds": result.seconds,
        "stopped": result.stopped,
        **({"breakdown": result.breakdown} if result.breakdown else {}),
    }


def run_directory(args: Args, group: "Group") -> Path:
    """--run-dir, or runs/NAME-DATE as the first process says it: clocks and time zones differ."""
    if args.run_dir:
        return check_output(args.run_dir, flag="--run-dir")
    date = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    return Path("runs") / group.share("name", f"{args.run.name}-{date}")[0]
