"""The host loop: feeds the device, reads its numbers one step late, validates, saves, and stops when asked.

The loop owns everything that is not arithmetic. The device never waits for it: step n + 1 is dispatched before the
numbers of step n are read.
"""

import functools
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from halfbyte.inputs.compile_cache import use_compile_cache
from halfbyte.metrics import Finished, OneStepLate, Throughput
from halfbyte.profiling import Capture, ProfileConfig
from halfbyte.ranks import Group, Limits, Signals

from .config import TrainConfig
from .directory import set_rows_aside
from .jsonconfig import to_dict
from .observing import Moment, Observer, due
from .precision import Phase, phase_at, phases
from .preflight import GIB
from .resume import Initial, Start, begin, common_facts
from .session import (
    Outputs,
    Session,
    check_native_gemms,
    make_meter,
    open_display,
    open_session,
    open_sinks,
    settle_directory,
    show_start,
    take_directory,
)
from .source import to_mesh
from .state import TrainState
from .step import abstract_batch, compile_train_step, jit_train_step, make_eval_step
from .validation import validate

MOST_SKIPS_IN_A_ROW = 25


class Diverged(Exception):
    """The loss or its gradient is not finite and loss scaling cannot help."""


@dataclass
class RunResult:
    """How a run ended. `stopped` names the signal if it was asked to stop."""

    directory: Path
    step: int
    loss: float | None = None
    validation: dict[str, float] = field(default_factory=dict)
    stopped: str | None = None
    seconds: float = 0.0
    breakdown: dict[str, float] = field(default_factory=dict)
    params: Any = None
    """Final weights, on the mesh."""


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
    session = open_session(config, directory, console=console, allow_change=allow_change)
    group.agree("data", {"content of the data set": session.content})
    show_start(session)
    check_native_gemms(session)
    with ExitStack() as stack:
        group.at("restore")
        taken = take_directory(session, stack)
        group.agree("checkpoints", {"checkpoints seen": taken.store.steps()})
        start = begin(
            config, session.mesh, taken.store, content=session.content, allow=session.allow_change, say=session.say,
            initial=initial,
        )  # fmt: skip
        group.agree("start", {"restored step": start.step})
        _announce(session, start)
        settle_directory(session, taken)
        sinks = open_sinks(session, stack, resume_step=start.step if start.resumed else None)
        outputs = Outputs(stack, taken.store, sinks)
        return Loop(session, outputs, start, profile or ProfileConfig(), group, observers, until).run()


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


class Loop:
    """One run from `start` to its end."""

    def __init__(
        self,
        session: Session,
        outputs: Outputs,
        start: Start,
        profile: ProfileConfig,
        group: Group,
        observers: Sequence[Observer] = (),
        until: int | None = None,
    ):
        self.session, self.outputs, self.group, self.observers = session, outputs, group, observers
        self.config, self.mesh = session.config, session.mesh
        self.state: TrainState = start.state
        self.step = start.step
        self.last = min(self.config.steps, until or self.config.steps)
        self.data_state = start.data_state
        self.late = OneStepLate()
        self.result = RunResult(session.directory, start.step)
        self.capture = Capture(profile, session.directory / "profile", say=session.say)
        self.phases = phases(self.config)
        self.program: Any = None
        self.evaluate: Any = None
        self.meter: Throughput | None = None
        self.last_saved: int | None = start.step if start.resumed else None
        self.skips_in_a_row = 0
        self.skipped = 0.0
        self.row: dict[str, Any] | None = None

    def run(self) -> RunResult:
        """Every step that is left."""
        began = time.monotonic()
        if self.step >= self.last:
            self.session.say(f"the run is complete at step {self.step}; raise --steps to go on")
        loader = self.session.source.loader(self.mesh)
        if self.data_state is not None:
            loader.set_state(self.data_state)
        with ExitStack() as closing:
            closing.callback(loader.close)
            while self.step < self.last:
                self._enter_phase()
                self.group.begin_steps()
                self.result.stopped = self.group.stop_before(self.step + 1)
                if self.result.stopped:
                    break
                self._one_step(loader)
                self._at_intervals()
            self.group.end_steps()
            self.group.at("finish", self.step)
            self._finish()
        self.result.seconds = time.monotonic() - began
        self.result.params = self.state.params
        self.result.breakdown = self.capture.shares
        return self.result

    # Steps

    def _enter_phase(self) -> None:
        """Compile the step of the phase that begins here, if one does."""
        phase = phase_at(self.phases, self.step)
        if self.program is not None and phase.start != self.step:
            return
        self.group.at("compile", self.step)
        if self.program is not None:
            self._drain()
            before = phase_at(self.phases, self.step - 1)
            self._note(
                f"PRECISION SWITCH after step {self.step}: {before.recipe.name} -> {phase.recipe.name}; compiling"
            )
        began = time.monotonic()
        self.program, self.evaluate = self._compile(phase)
        self.meter = make_meter(self.session, self.phases.index(phase))
        needed = self.program.memory_analysis()
        total = (needed.argument_size_in_bytes + needed.temp_size_in_bytes) / GIB if needed else 0.0
        self._note(f"compiled in {time.monotonic() - began:.1f} s; the program needs {total:.2f} GiB a device")
        if self.outputs.display is None:
            self.outputs.display = open_display(self.session, self.outputs.stack)
        self.late.restart_clock()

    def _compile(self, phase: Phase) -> tuple[Any, Any]:
        """(train step, validation step), compiled side by side: a compiler mostly keeps to one core."""
        resolved = phase.resolved(self.config)
        state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), self.state)
        batch = abstract_batch(self.config, self.mesh, seq=self.session.source.seq)
        options = self.capture.compiler_options
        step = jit_train_step(self.config, resolved, self.mesh, options=options).lower(state, batch)
        check = make_eval_step(self.config, resolved, self.mesh).lower(state.params, state.seed, batch)
        if jax.process_count() > 1:  # processes must compile in the same order
            return compile_train_step(step, resolved), check.compile()
        with ThreadPoolExecutor(1) as beside:
            evaluate = beside.submit(check.compile)
            return compile_train_step(step, resolved), evaluate.result()

    def _one_step(self, loader: Any) -> None:
        began = time.perf_counter()
        self.group.at("data", self.step)
        rows = next(loader)
        self.data_state = loader.get_state()
        batch = to_mesh(rows, self.mesh, batch=self.config.batch)
        waited = time.perf_counter() - began
        self._observe(batch)
        self.step += 1
        self.group.at("step", self.step)
        self.capture.before(self.step, self.state)
        with jax.profiler.StepTraceAnnotation("train", step_num=self.step):
            self.state, values = self.program(self.state, batch)
        self.capture.after(self.step, self.state, self.program.as_text)
        self._emit(self.late.push(self.step, values, input_wait_s=waited))

    def _observe(self, batch: Any) -> None:
        """Show what the next step is given to whoever is due, outside of the step's time."""
        for observer in self.observers:
            if due(observer, self.step + 1):
                self._drain()
                resolved = phase_at(self.phases, self.step).resolved(self.config)
                moment = Moment(self.step + 1, self.config, resolved, self.mesh, self.state.params, batch)
                for line in observer.observe(moment):
                    self._note(line)
                self.late.restart_clock()

    # Numbers

    def _emit(self, finished: Finished | None, **extra: Any) -> None:
        if finished is None:
            return
        assert self.meter is not None
        values = finished.values
        row = {
            "step": finished.step,
            "loss": values["loss"],
            "tokens": finished.step * self.meter.tokens,
            "step_time_s": finished.step_time_s,
            **self.meter.rates(finished.step_time_s),
            "input_wait_s": finished.host["input_wait_s"],
            **{name: value for name, value in values.items() if name != "loss"},
            "flops_formula": self.session.preflight.manifests[0].flops_formula,
            **extra,
        }
        self.row = row
        self.result.loss, self.result.step = values["loss"], finished.step
        self.outputs.write(row)
        self._guard(finished)

    def _drain(self) -> None:
        """Wait for the newest step and write its row."""
        self._emit(self.late.flush())
        self.late.restart_clock()

    def _guard(self, finished: Finished) -> None:
        """Stop loudly when the numbers are no longer numbers."""
        skipped = finished.values["skipped"]
        self.skips_in_a_row = self.skips_in_a_row + 1 if skipped > self.skipped else 0
        self.skipped = skipped
        if not self.skips_in_a_row:
            return
        scaled = self.config.loss_scale.mode == "dynamic"
        if scaled and self.skips_in_a_row < MOST_SKIPS_IN_A_ROW:
            self._note(f"step {finished.step}: gradient overflow, step skipped, loss scale halved")
            return
        saved = f"the checkpoint of step {self.last_saved} is good" if self.last_saved else "there is no checkpoint yet"
        raise Diverged(
            f"step {finished.step}: loss {finished.values['loss']}, gradient norm {finished.values['grad_norm']}; "
            f"training stops here, weights unchanged by this step, and {saved}. Try a lower --optimizer.learning-rate, "
            "--loss-scale.mode dynamic, or --recipe bf16 to see whether precision is at fault"
        )

    def _note(self, text: str) -> None:
        if self.outputs.display is not None:
            self.outputs.display.note(text)
        else:
            self.session.say(text)

    # Intervals

    def _at_intervals(self) -> None:
        self.outputs.store.poll()
        if _due(self.step, self.config.validation.every) and self.step < self.last:
            self.group.at("validation")
            self._validate()
        if _due(self.step, self.config.checkpoint.every) and self.step < self.last:
            self.group.at("save")
            self._save()

    def _validate(self) -> None:
        finished = self.late.flush()  # before validation, which is not part of the step's time
        evaluate = functools.partial(self.evaluate, self.state.params, self.state.seed)
        found = validate(self.session.source, self.mesh, evaluate)
        self.result.validation = found
        by_source = {f"validation_loss/{name}": value for name, value in found.items() if name != "all"}
        self._emit(finished, validation_loss=found["all"], **by_source)
        self.late.restart_clock()
        text = "  ".join(f"{name} {value:.4f}" for name, value in found.items() if name != "all" or len(found) > 2)
        self._note(f"validation after step {self.step}: {text}")

    def _save(self) -> None:
        self._drain()  # a state whose numbers were not looked at is not worth keeping
        extra = {"config": to_dict(self.config), "data": self.data_state, "data_set": self.session.content}
        self.outputs.store.save(self.step, self.state.items(), extra=extra)
        self.last_saved = self.step
        self.late.restart_clock()

    def _finish(self) -> None:
        if self.result.stopped is None and self.program is not None:
            self._validate()
        else:
            self._drain()
        if self.last_saved != self.step and self.step:
            self._save()
        if not self.outputs.store.close():
            raise RuntimeError(f"the last checkpoint (step {self.step}) could not be written; see the message above")


def _due(step: int, every: int) -> bool:
    return bool(every) and step % every == 0
