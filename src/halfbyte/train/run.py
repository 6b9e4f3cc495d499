"""Runs training from config to end: checks, run directory, restored checkpoint, loop."""

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
    """Trains to the last step, to step `until` of the same schedule, or to a signal; resumes from a checkpoint if any.

    Args:
        group: the process group, whose caller handles signals. None: a single process, which handles its own signals.
        initial: returns the initial weights of a run with `init_from`.
        observers: called with snapshots before some steps.
        opened: called on the main process with the directory and the run's identifier, once the directory is claimed.
        committed: called with the step of each committed checkpoint.
        notes: `notes(seq, steps)` returns lines to log before `steps` steps of `seq` tokens per sequence.
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
        opened_run = open_run(session.existing_run, config, session.content, **options)
        stack.callback(opened_run.store.release)
        group.assert_equal_across_ranks("checkpoints", {"checkpoints seen": opened_run.store.steps()})
        restore = functools.partial(
            resume_or_initialize,
            config,
            session.mesh,
            opened_run.store,
            content=session.content,
            say=session.say,
            initial=initial,
        )
        start = restore(allow=session.allow_change)
        group.assert_equal_across_ranks("start", {"restored step": start.step})
        group.report_activity("start")
        goodput = Goodput.resumed(start.goodput, count_discarded_rows(session, start.step))
        _announce(session, start)
        if session.is_main:  # other processes print nothing
            for line in notes(session.source.seq, min(config.steps, until or config.steps) - start.step):
                session.say(line)
        finalize_directory(session, opened_run, start.rollbacks)
        if session.is_main:
            opened(session.directory, opened_run.identity.run)
        sinks = open_sinks(session, stack, resume_step=start.step if start.resumed else None)
        capture = ProfileCapture(profile or ProfileConfig(), session.directory / "profile", say=session.say)
        outputs = RunOutputs(stack, opened_run.store, sinks, goodput, capture, claim=claim)
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
    """Yields the process group of a run on a single process, which handles its own signals."""
    group = ProcessGroup(limits=WatchdogLimits(step_timeout_s=config.watchdog_s)).open()
    with SignalHandler(group.request_stop), closing(group):
        yield group


def _announce(session: Session, start: ResumePoint) -> None:
    if start.resumed:
        session.say(f"resuming {session.directory} after step {start.step}")
        return
    archive = archive_metrics(session.directory) if session.is_main else None
    if session.existing_run.values:
        archive_note = f"; the rows of the start before are kept in {archive.name}" if archive else ""
        session.say(f"{session.directory} has no checkpoint yet: STARTING AT STEP 0{archive_note}")
    else:
        session.say(f"run directory: {session.directory}")
