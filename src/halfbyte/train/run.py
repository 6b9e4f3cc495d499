"""A run from its config to its end: checks, the directory, the checkpoint it goes on from, and then the loop."""

import functools
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console

from halfbyte.inputs.compile_cache import use_compile_cache
from halfbyte.profiling import ProfileConfig
from halfbyte.ranks import Group, Limits, Signals

from .claim import Claim
from .config import TrainConfig
from .directory import set_rows_aside
from .goodput import Goodput
from .loop import Loop, RunResult
from .observing import Observer
from .resume import Initial, Start, begin, common_facts
from .session import (
    Outputs,
    Session,
    check_native_gemms,
    dropped_rows,
    open_session,
    open_sinks,
    settle_directory,
    show_start,
    take_directory,
)


def train(
    config: TrainConfig,
    directory: Path,
    *,
    console: Console,
    allow_change: bool = False,
    profile: ProfileConfig | None = None,
    group: Group | None = None,
    initial: Initial | None = None,
    observers: Sequence[Observer] = (),
    until: int | None = None,
) -> RunResult:
    """Train to the last step, to step `until` of the same schedule, or to a signal; resume by itself when the directory
    has a checkpoint.

    `group` is this process among its peers, with signals in the caller's hands; without one the run is alone and
    takes its signals itself. `initial` makes the weights of a run that has `init_from`. `observers` are shown some
    steps.
    """
    given: dict[str, Any] = {"console": console, "allow_change": allow_change, "profile": profile, "initial": initial}
    given |= {"observers": observers, "until": until}
    if group is not None:
        return _train(config, directory, group, **given)
    alone = Group(limits=Limits(progress=config.watchdog_s)).open()
    with Signals(alone.request_stop):
        try:
            return _train(config, directory, alone, **given)
        finally:
            alone.close()


def _train(
    config: TrainConfig,
    directory: Path,
    group: Group,
    *,
    console: Console,
    allow_change: bool,
    profile: ProfileConfig | None,
    initial: Initial | None,
    observers: Sequence[Observer],
    until: int | None,
) -> RunResult:
    if config.compile_cache:
        use_compile_cache(config.compile_cache, say=console.print)
    group.agree("config", common_facts(config, directory, allow_change=allow_change))
    with ExitStack() as stack:
        claim = stack.enter_context(Claim(directory)) if group.rank == 0 else None
        session = open_session(config, directory, console=console, allow_change=allow_change)
        group.agree("data", {"content of the data set": session.content})
        show_start(session)
        check_native_gemms(session)
        group.at("restore")
        taken = take_directory(session)
        group.agree("checkpoints", {"checkpoints seen": taken.store.steps()})
        restore = functools.partial(
            begin, config, session.mesh, taken.store, content=session.content, say=session.say, initial=initial
        )
        start = restore(allow=session.allow_change)
        group.agree("start", {"restored step": start.step})
        goodput = Goodput.resumed(start.goodput, dropped_rows(session, start.step))
        _announce(session, start)
        settle_directory(session, taken, start.returns)
        sinks = open_sinks(session, stack, resume_step=start.step if start.resumed else None)
        outputs = Outputs(stack, taken.store, sinks, claim=claim)
        return Loop(
            session,
            outputs,
            start,
            begin_again=functools.partial(restore, allow=True),
            profile=profile or ProfileConfig(),
            group=group,
            goodput=goodput,
            observers=observers,
            until=until,
        ).run()


def _announce(session: Session, start: Start) -> None:
    if start.resumed:
        session.say(f"resuming {session.directory} after step {start.step}")
        return
    aside = set_rows_aside(session.directory) if session.is_main else None
    if session.found.exists:
        kept = f"; the rows of the start before are kept in {aside.name}" if aside else ""
        session.say(f"{session.directory} has no checkpoint yet: STARTING AT STEP 0{kept}")
    else:
        session.say(f"run directory: {session.directory}")
