"""A run from its config to its end: checks, the directory, the checkpoint it goes on from, and then the loop."""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from halfbyte.conformance import ask_card
from halfbyte.inputs.compile_cache import use_compile_cache
from halfbyte.profiling import Capture, ProfileConfig
from halfbyte.ranks import Group, Limits, Signals

from .claim import Claim
from .config import TrainConfig
from .directory import set_rows_aside, take
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
    opened: Callable[[Path, str], object] = lambda directory, run: None,
    committed: Callable[[int], object] = lambda step: None,
) -> RunResult:
    """Train to the last step, to step `until` of the same schedule, or to a signal; resume by itself when the directory
    has a checkpoint.

    `group` is this process among its peers, with signals in the caller's hands; without one the run is alone and
    takes its signals itself. `initial` makes the weights of a run that has `init_from`. `observers` are shown some
    steps. `opened` is called on the main process with the directory and the run's name, once both are the run's;
    `committed` with the step of each checkpoint that was written whole.
    """
    with ExitStack() as stack:
        if group is None:
            group = stack.enter_context(_alone(config))
        say = functools.partial(console.print, soft_wrap=True, markup=False)
        if config.compile_cache:
            use_compile_cache(config.compile_cache)
        group.agree("config", common_facts(config, directory, allow_change=allow_change))
        claim = stack.enter_context(Claim(directory)) if group.rank == 0 else None
        if config.precision.backend == "auto":
            group.agree("card", {"native GEMMs that are believed": ask_card(say) is None})
        session = open_session(config, directory, console=console, allow_change=allow_change)
        group.agree("data", {"content of the data set": session.content})
        show_start(session)
        check_native_gemms(session)
        group.at("restore")
        options: Any = {"is_main": session.is_main, "say": session.say, "committed": committed}
        taken = take(session.found, config, session.content, **options)
        stack.callback(taken.store.release)
        group.agree("checkpoints", {"checkpoints seen": taken.store.steps()})
        restore = functools.partial(
            begin, config, session.mesh, taken.store, content=session.content, say=session.say, initial=initial
        )
        start = restore(allow=session.allow_change)
        group.agree("start", {"restored step": start.step})
        goodput = Goodput.resumed(start.goodput, dropped_rows(session, start.step))
        _announce(session, start)
        settle_directory(session, taken, start.returns)
        if session.is_main:
            opened(session.directory, taken.identity.run)
        sinks = open_sinks(session, stack, resume_step=start.step if start.resumed else None)
        capture = Capture(profile or ProfileConfig(), session.directory / "profile", say=session.say)
        outputs = Outputs(stack, taken.store, sinks, goodput, capture, claim=claim)
        begin_again = functools.partial(restore, allow=True)
        return Loop(
            session, outputs, start, begin_again=begin_again, group=group, observers=observers, until=until
        ).run()


@contextmanager
def _alone(config: TrainConfig) -> Iterator[Group]:
    """The group of a run without peers, which takes its signals itself."""
    group = Group(limits=Limits(progress=config.watchdog_s)).open()
    with Signals(group.request_stop), closing(group):
        yield group


def _announce(session: Session, start: Start) -> None:
    if start.resumed:
        session.say(f"resuming {session.directory} after step {start.step}")
        return
    aside = set_rows_aside(session.directory) if session.is_main else None
    if session.found.values:
        kept = f"; the rows of the start before are kept in {aside.name}" if aside else ""
        session.say(f"{session.directory} has no checkpoint yet: STARTING AT STEP 0{kept}")
    else:
        session.say(f"run directory: {session.directory}")
