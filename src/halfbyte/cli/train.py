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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TextIO, cast

import tyro

from halfbyte.cli.console import (
    EXIT_BAD_INPUT,
    EXIT_FAILED,
    EXIT_NOT_PASSED,
    EXIT_OK,
    EXIT_PREEMPTED,
    ClosableStream,
    CommandResult,
    PlainConsole,
    say_error,
)
from halfbyte.cli.flag_parsing import read_flags
from halfbyte.cli.maxtext_flags import refuse_maxtext
from halfbyte.cli.run_summary import program_name
from halfbyte.cli.terminal_signals import TerminalFeedback, terminal_feedback
from halfbyte.devices.compile_target import unused_gpu_hint
from halfbyte.distributed.cluster_env import DistributedConfig
from halfbyte.io import check_int, validated_output_path
from halfbyte.train import ProfileConfig
from halfbyte.train.train_config import TrainConfig

if TYPE_CHECKING:
    from halfbyte.checkpoint import Copy
    from halfbyte.devices.xla_flags import RuntimeFlag
    from halfbyte.distributed import GroupExit, ProcessGroup
    from halfbyte.train import Observer, RunResult

BOOLEAN_FLAGS = (
    "--deterministic", "--no-deterministic", "--allow-change", "--no-allow-change", "--json", "--sample", "--no-sample",
    "--copy-take-over", "--no-copy-take-over", "-h", "--help", "--help-all",
    "--log.tensorboard", "--log.no-tensorboard", "--model.tied", "--model.no-tied", "--model.qk-norm",
    "--model.no-qk-norm", "--model.joint-qk-norm", "--model.no-joint-qk-norm", "--model.norm-topk",
    "--model.no-norm-topk", "--validation.at-end", "--validation.no-at-end",
)  # fmt: skip
"""Flags without a value: the word behind one may be the run's name."""
SHORT_HELP = {
    "--data DIR": "a prepared data set (`halfbyte data prepare`), several as DIR:WEIGHT,DIR:WEIGHT, demo, or synthetic",
    "--recipe NAME": "bf16, fp8, mxfp8, mxfp4, nvfp4, ... (`halfbyte recipes`), or FILE.py:NAME",
    "--policy RULES": "which linears it quantizes: mlp, experts, all_linear, paper, or rules",
    "--steps N": "steps of the whole run",
    "--batch N": "sequences of a global step",
    "--seq N": "tokens per sequence; 0: as the data set was packed",
    "--optimizer.learning-rate X": "peak of the schedule",
    "--mesh AXIS=SIZE,...": "data, fsdp, expert, tensor, context; empty: fsdp over all devices",
    "--init-from DIR": "begin with the weights of a run or a Hugging Face folder",
    "--run-dir DIR": "where the run is stored; one with a checkpoint is resumed",
}
"""Flags that --help lists."""
PEER_LOST_PATTERN = re.compile(r"gloo|nccl|coordination|UNAVAILABLE|by peer|DEADLINE|Barrier", re.I)
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
    words: tyro.conf.Suppress[tuple[str, ...]] = ()
    """The command line, for messages that repeat it."""

    def __post_init__(self) -> None:
        check_int("--copy-keep", self.copy_keep)
        if (self.copy_keep or self.copy_take_over) and not self.copy_to:
            raise ValueError("--copy-keep and --copy-take-over need a copy: give --copy-to s3://BUCKET/PREFIX, too")
        if self.copy_to:
            from halfbyte.checkpoint.object_store import spec_of

            spec_of(self.copy_to)


def parse(argv: list[str]) -> Args:
    """Flags over the config of the named run, of --config, or of the run directory."""
    refuse_maxtext(argv)
    name, rest = split_run_name(argv)
    default = Args(run=base_config(name, rest))
    args: Args = read_flags(
        Args, rest, prog=f"halfbyte train {name or 'RUN'}", doc=__doc__, short=SHORT_HELP, default=default
    )
    return replace(args, words=tuple(argv))


def split_run_name(argv: list[str]) -> tuple[str, list[str]]:
    """(name of the run or "", the other arguments). The name is the one argument that is no flag and no flag's
    value."""
    for at, word in enumerate(argv):
        before = argv[at - 1] if at else ""
        is_value = before.startswith("--") and "=" not in before and before.replace("_", "-") not in BOOLEAN_FLAGS
        if not word.startswith("-") and not is_value:
            return word, argv[:at] + argv[at + 1 :]
    return "", argv


def base_config(name: str, rest: list[str]) -> TrainConfig:
    """What flags change: the named run, else --config, else the config of an existing --run-dir, else the demo."""
    from halfbyte.cli.flag_parsing import config_from_file
    from halfbyte.train.run_directory import open_run_directory
    from halfbyte.train.run_presets import run_config

    given = flag_value(rest, "--config")
    if given:
        return config_from_file(name, Path(given))
    if name:
        source = flag_value(rest, "--init-from")
        return run_config(name) if not source else replace(run_config(name), model=base_of_source(rest).model)
    directory = Path(flag_value(rest, "--run-dir") or "-")
    if (directory / "config.json").is_file():
        return open_run_directory(
            directory, check=False, say=lambda text: None
        ).config  # checked when the run is opened
    return base_of_source(rest) if flag_value(rest, "--init-from") else run_config("demo")


def base_of_source(rest: list[str]) -> TrainConfig:
    """The config that a run with --init-from changes: that of the run, or of the folder, which has no data."""
    from halfbyte.hf.model_loading import config_from_init

    source = flag_value(rest, "--init-from")
    config = config_from_init(Path(source))
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


def run(args: Args) -> CommandResult:
    """Launch, train, report."""
    import jax

    from halfbyte import distributed
    from halfbyte.devices.xla_flags import apply_flags
    from halfbyte.distributed import SignalHandler

    with SignalHandler(_stopped_early, afterwards=signal.SIG_IGN) as signals:  # what comes later changes no exit code
        output = ClosableStream(sys.stdout, on_close=lambda: signals.on_signal("a closed pipe"))
        console = PlainConsole(file=cast(TextIO, output))
        for applied in apply_flags(gpu_settings(args), os.environ):
            console.say(str(applied))
        group = distributed.initialize_distributed(args.distributed, watchdog_s=args.run.watchdog_s, say=console.say)
        if warning := unused_gpu_hint(os.environ, jax.devices()[0].platform):
            console.say(f"WARNING: {warning}")
        signals.on_signal = group.request_stop
        try:
            with terminal_feedback(feedback_of(group, console)):
                result = fail_on_all_ranks(group, lambda: train_and_copy(args, console, group))
        except BaseException:
            if group.count == 1:  # with several ranks the others still have to hear why
                group.close(EXIT_FAILED)
            raise
        group.close(result.code)
        return result


def feedback_of(group: "ProcessGroup", console: PlainConsole) -> TerminalFeedback:
    """Returns answers to Ctrl-C by how far the run is: before the first step the group ends with its own words."""
    first = {
        "before": "",
        "loop": "stopping after this step, with a checkpoint; Ctrl-C again stops at once, without one",
        "after": "the run is ending, with a checkpoint; Ctrl-C again stops at once, without one",
    }
    options: Any = {"say": console.say} if console.is_terminal else {}
    activities = {"start": "setting the run up", "restore": "initializing or restoring the state"}
    return TerminalFeedback(
        first=lambda: first[group.stage],
        activity=lambda: activities.get(group.activity, ""),
        second=lambda: "stopping at once; the same --run-dir resumes from the last checkpoint, if there is one",
        **options,
    )


def gpu_settings(args: Args) -> "tuple[RuntimeFlag, ...]":
    """What XLA, NCCL and the allocator are told on GPUs: the recommended, and what --deterministic takes."""
    from halfbyte.devices.xla_flags import deterministic_flags, recommended_flags, visible_gpus

    gpus = visible_gpus()
    if not gpus:
        return ()
    several, flags = len(gpus) > 1, args.xla_flags
    settings = recommended_flags(gpus[0], several=several, flags=flags) if flags != "none" else ()
    if not args.run.deterministic:
        return settings
    if not args.run_dir:
        raise ValueError("--deterministic on a GPU needs --run-dir DIR: what autotuning chose is kept there")
    rank = max(args.distributed.process, 0)
    return settings + deterministic_flags(Path(args.run_dir).absolute() / f"autotuned-{rank}.txt")


def _stopped_early(name: str) -> None:
    from halfbyte.distributed import GroupExit, exit_process

    exit_process(
        GroupExit(0, f"stopped by {name} before the run began; nothing is lost, start it again", EXIT_PREEMPTED)
    )


def fail_on_all_ranks(group: "ProcessGroup", work: Callable[[], CommandResult]) -> CommandResult:
    """What `work` returns. When it fails, on one rank of several, every rank says the same sentence and exits with the
    same code; a group of one leaves errors to the command line."""
    try:
        return work()
    except BaseException as error:
        if group.count == 1:
            raise
        end = group_exit_for(group, error)
        exit_after_grace(group, end)
        raise AssertionError("unreachable") from error


def group_exit_for(group: "ProcessGroup", error: BaseException) -> "GroupExit":
    """How the group ends after an error on this rank."""
    from halfbyte.cli.main import is_bad_input
    from halfbyte.distributed import RankMismatchError

    if isinstance(error, RankMismatchError):
        return group.fail_with_message(str(error), EXIT_BAD_INPUT)
    if is_bad_input(error):
        return group.fail(str(error), EXIT_BAD_INPUT)
    if PEER_LOST_PATTERN.search(str(error)):
        return group.explain_collective_failure(error)
    if not isinstance(error, KeyboardInterrupt):
        traceback.print_exception(error)
    return group.fail(f"failed: {type(error).__name__}: {error}", EXIT_FAILED)


def exit_after_grace(group: "ProcessGroup", end: "GroupExit") -> None:
    """Give the others time to read the sentence before this process goes; rank 0, which keeps the store, goes last."""
    from halfbyte.distributed import exit_process

    time.sleep(2.0 if group.rank else 4.0)
    exit_process(end)


def train_and_copy(args: Args, console: PlainConsole, group: "ProcessGroup") -> CommandResult:
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
        code = EXIT_FAILED if copied["missing"] and result.code == EXIT_OK else result.code
        result = CommandResult({**result.data, "copy": copied}, code)
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


def _train(args: Args, console: PlainConsole, group: "ProcessGroup", copies: "list[Copy]") -> CommandResult:
    import jax

    from halfbyte.cli.run_estimate import start_notes
    from halfbyte.devices import lookup
    from halfbyte.ops import SelfTestFailed
    from halfbyte.train import DivergedError, train
    from halfbyte.train.batch_source import DataFitError

    main = group.rank == 0
    directory = choose_run_directory(args, group)
    try:
        result = train(
            args.run,
            directory,
            console=console,
            allow_change=args.allow_change,
            profile=args.profiling,
            group=group,
            initial=initial_weights(args.run, directory),
            observers=make_observers(args.run, directory),
            opened=lambda directory, run: copies.extend(start_copy(args, console, directory, run)),
            committed=lambda step: copies[0].committed(step) if copies else None,
            notes=lambda seq, steps: start_notes(
                args.run, seq, lookup(jax.devices()[0]), len(jax.devices()), steps=steps
            ),
        )
    except DataFitError as error:
        command = [program_name(), "train", shlex.join(with_flags(args.words, error.flags))]
        raise ValueError(f"{error.args[0]}\nThis command fits:\n  {' '.join(command)}") from None
    except (DivergedError, SelfTestFailed) as stop:
        code = EXIT_FAILED if isinstance(stop, DivergedError) else EXIT_NOT_PASSED
        if group.count > 1:
            for copy in copies:
                copy.close()  # leaving ends the process
            exit_after_grace(group, group.fail_with_message(str(stop), code))
        say_error(str(stop))
        return CommandResult({"run_dir": str(directory), "error": str(stop)}, code)
    if result.stopped:
        if main:
            console.say(
                f"stopped by {result.stopped} after step {result.step}, checkpoint written; go on with:\n"
                f"  {program_name()} train --run-dir {shlex.quote(str(directory))}"
                + (f" --copy-to {shlex.quote(args.copy_to)}" if args.copy_to else "")
            )
        return CommandResult(_data(result), EXIT_PREEMPTED)
    data = _data(result)
    if main:
        from halfbyte.cli.run_summary import report_run

        data.update(report_run(args.run, result, console, sample=args.sample, started=rerun_flags(args)))
    return CommandResult(data, EXIT_OK)


def with_flags(words: Sequence[str], flags: Sequence[str]) -> list[str]:
    """Returns a command line with these flags and values in place of those that it has."""
    kept, skip = [], False
    for word in words:
        name, equals, _ = word.partition("=")
        if skip:
            skip = False
        elif name.replace("_", "-") in flags[::2]:
            skip = not equals
        else:
            kept.append(word)
    return [*kept, *flags]


def rerun_flags(args: Args) -> tuple[str, ...]:
    """Flags of this command that another run needs too, and that no config holds."""
    flags: tuple[str, ...] = ()
    if args.distributed.cpu_devices:
        flags += ("--distributed.cpu-devices", str(args.distributed.cpu_devices))
    return flags if args.xla_flags == "recommended" else (*flags, "--xla-flags", args.xla_flags)


def initial_weights(config: TrainConfig, directory: Path) -> Any:
    """What reads the weights of --init-from onto the run's mesh; None without it."""
    if not config.init_from:
        return None
    from halfbyte.hf.model_loading import params_from_init

    return lambda mesh: params_from_init(Path(config.init_from), config, mesh, directory)


def make_observers(config: TrainConfig, directory: Path) -> "list[Observer]":
    """What looks at the run while it goes."""
    found: list[Observer] = []
    if config.radar:
        from halfbyte.evaluation.radar import Radar

        found.append(Radar(config.radar, directory))
    if config.telemetry:
        from halfbyte.evaluation.inspection import Telemetry

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


def choose_run_directory(args: Args, group: "ProcessGroup") -> Path:
    """--run-dir, or runs/NAME-DATE as the first process says it: clocks and time zones differ."""
    if args.run_dir:
        return validated_output_path(args.run_dir, flag="--run-dir")
    date = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    return Path("runs") / group.all_gather_json("name", f"{args.run.name}-{date}")[0]
