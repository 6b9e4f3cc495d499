"""A run from its config to its end: checks, the directory, the checkpoint it goes on from, and then the loop."""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from halfbyte.distributed import ProcessGroup, SignalHandler, WatchdogLimits
from halfbyte.io.disk_cache import enable_compile_cache
from halfbyte.ops import run_gemm_selftest_once
from halfbyte.train.loop import Loop, RunResult
from halfbyte.train.profiler import ProfileCapture, ProfileConfig
from halfbyte.train.resume import Goodput, InitialParamsFn, ResumePoint, facts_equal_on_all_ranks, resume_or_initialize
from halfbyte.train.run_directory import archive_metrics, open_run
from halfbyte.train.run_identity import RunDirectoryClaim
from halfbyte.train.session import (
    RunOutputs,
    Session,
    count_discarded_rows,
    finalize_directory,
    log_run_header,
    open_session,
    open_sinks,
    selftest_native_gemms,
)
from halfbyte.train.train_config import TrainConfig
from halfbyte.train.train_state import Observer


def train(
    config: TrainConfig,
    directory: Path,
    *,
    console: Console,
    allow_change: bool = False,
    profile: ProfileConfig | None = None,
    group: ProcessGroup | None = None,
    initial: InitialParamsFn | None = None,
    observers: Sequence[Observer] = (),
    until: int | None = None,
    opened: Callable[[Path, str], object] = lambda directory, run: None,
    committed: Callable[[int], object] = lambda step: None,
    notes: Callable[[int, int], Sequence[str]] = lambda seq, steps: (),
) -> RunResult:
    """Train to the last step, to step `until` of the same schedule, or to a signal; resume by itself when the directory
    has a checkpoint.

    `group` is this process among its peers, with signals in the caller's hands; without one the run is alone and
    takes its signals itself. `initial` makes the weights of a run that has `init_from`. `observers` are shown some
    steps. `opened` is called on the main process with the directory and the run's name, once both are the run's;
    `committed` with the step of each checkpoint that was written whole. `notes(seq, steps)` returns lines that are
    logged before the first of `steps` steps of `seq` tokens per sequence.
    """
    with ExitStack() as stack:
        if group is None:
            group = stack.enter_context(_single_process_group(config))
        say = functools.partial(console.print, soft_wrap=True, markup=False)
        if config.compile_cache:
            enable_compile_cache(config.compile_cache)
        group.assert_equal_across_ranks(
            "config", facts_equal_on_all_ranks(config, directory, allow_change=allow_change)
        )
        claim = stack.enter_context(RunDirectoryClaim(directory)) if group.rank == 0 else None
        if config.precision.backend == "auto":
            group.assert_equal_across_ranks(
                "card", {"native GEMMs that are believed": run_gemm_selftest_once(say) is None}
            )
        session = open_session(config, directory, console=console, allow_change=allow_change)
        group.assert_equal_across_ranks("data", {"content of the data set": session.content})
        log_run_header(session)
        selftest_native_gemms(session)
        group.report_activity("restore")
        options: Any = {"is_main": session.is_main, "say": session.say, "committed": committed}
        taken = open_run(session.existing_run, config, session.content, **options)
        stack.callback(taken.store.release)
        group.assert_equal_across_ranks("checkpoints", {"checkpoints seen": taken.store.steps()})
        restore = functools.partial(
            resume_or_initialize,
            config,
            session.mesh,
            taken.store,
            content=session.content,
            say=session.say,
            initial=initial,
        )
        start = restore(allow=session.allow_change)
        group.assert_equal_across_ranks("start", {"restored step": start.step})
        group.report_activity("start")
        goodput = Goodput.resumed(start.goodput, count_discarded_rows(session, start.step))
        _announce(session, start)
        if session.is_main:  # only its lines are shown
            for line in notes(session.source.seq, min(config.steps, until or config.steps) - start.step):
                session.say(line)
        finalize_directory(session, taken, start.rollbacks)
        if session.is_main:
            opened(session.directory, taken.identity.run)
        sinks = open_sinks(session, stack, resume_step=start.step if start.resumed else None)
        capture = ProfileCapture(profile or ProfileConfig(), session.directory / "profile", say=session.say)
        outputs = RunOutputs(stack, taken.store, sinks, goodput, capture, claim=claim)
        return Loop(
            session,
            outputs,
            start,
            restore_for_rollback=functools.partial(restore, allow=True),
            group=group,
            observers=observers,
            until=until,
        ).run()


@contextmanager
def _single_process_group(config: TrainConfig) -> Iterator[ProcessGroup]:
    """The group of a run without peers, which takes its signals itself."""
    group = ProcessGroup(limits=WatchdogLimits(step_timeout_s=config.watchdog_s)).open()
    with SignalHandler(group.request_stop), closing(group):
        yield group


def _announce(session: Session, start: ResumePoint) -> None:
    if start.resumed:
        session.say(f"resuming {session.directory} after step {start.step}")
        return
    archive = archive_metrics(session.directory) if session.is_main else None
    if session.existing_run.values:
        kept = f"; the rows of the start before are kept in {archive.name}" if archive else ""
        session.say(f"{session.directory} has no checkpoint yet: STARTING AT STEP 0{kept}")
    else:
        session.say(f"run directory: {session.directory}")
