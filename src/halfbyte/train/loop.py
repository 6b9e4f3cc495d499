"""The host loop: feeds the device, reads its numbers one step late, validates, saves, and stops when asked.

The loop owns everything that is not arithmetic. The device never waits for it: step n + 1 is dispatched before the
numbers of step n are read.
"""

import errno
import functools
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import jax

from halfbyte.checkpoint import PoisonedCheckpoint
from halfbyte.metrics import Compiling, Finished, OneStepLate, Throughput
from halfbyte.ranks import Group
from halfbyte.recipe import Recipe

from .goodput import Goodput
from .guard import Guard, Return, Trouble
from .jsonconfig import to_dict
from .locate import locate
from .observing import Moment, Observer, due
from .precision import Phase, phase_at, phases, with_fallback
from .preflight import GIB
from .resume import Start
from .scheduling import Scheduling
from .session import Outputs, Session, check_stacks_of_loops, make_meter, open_display, open_sinks, write_manifest
from .source import to_mesh, validate
from .state import TrainState, bit_sum
from .step import Batch, abstract_batch, compile_train_step, jit_train_step, make_eval_step


class Diverged(Exception):
    """The run is in trouble that it was not told to get out of by itself, or could not."""


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
    goodput: Goodput | None = None
    params: Any = None
    """Final weights, on the mesh."""


class Loop:
    """One run from `start` to its end."""

    def __init__(
        self,
        session: Session,
        outputs: Outputs,
        start: Start,
        *,
        begin_again: Callable[[], Start],
        group: Group,
        observers: Sequence[Observer] = (),
        until: int | None = None,
    ):
        self.begin_again, self.observers = begin_again, observers
        self.session, self.outputs, self.group = session, outputs, group
        self.goodput, self.capture = outputs.goodput, outputs.capture
        self.config, self.mesh = session.config, session.mesh
        self.state: TrainState = start.state
        self.step = start.step
        self.last = min(self.config.steps, until or self.config.steps)
        self.data_state = start.data_state
        self.late = OneStepLate(energy=session.energy.joules)
        self.result = RunResult(session.directory, start.step)
        self.returns: list[Return] = list(start.returns)
        self.phases = phases(self.config)
        for back in self.returns:
            self.phases = with_fallback(self.phases, back.step, back.recipe)
        self.programs: dict[Recipe, tuple[Any, Any]] = {}
        self.tested: set[Recipe] = set()
        self.program: Any = None
        self.evaluate: Any = None
        self.meter: Throughput | None = None
        self.last_saved: int | None = start.step if start.resumed else None
        self.guard = Guard(self.config)
        self.guard.restart(float(jax.device_get(start.state.scaler["skipped"])))
        self.recent: deque[tuple[int, Batch]] = deque(maxlen=3)
        self.row: dict[str, Any] | None = None

    def run(self) -> RunResult:
        """Every step that is left."""
        began = time.monotonic()
        if self.step >= self.last:
            self.session.say(f"the run is complete at step {self.step}; raise --steps to go on")
        while True:
            try:
                self._steps()
                self.group.end_steps()
                self.group.at("finish", self.step)
                self._finish()
                break
            except Trouble as trouble:
                self._answer(trouble)
        self.capture.finish(self.step, self.state, lambda: self.program.as_text())
        self.result.seconds = time.monotonic() - began
        self.result.params = self.state.params
        self.result.breakdown = self.capture.shares
        self.result.goodput = self.goodput
        self.session.say(str(self.goodput))
        return self.result

    def _steps(self) -> None:
        with ExitStack() as closing:
            loader = self.session.source.loader(self.mesh)
            closing.callback(loader.close)
            if self.data_state is not None:
                loader.set_state(self.data_state)
            while self.step < self.last:
                self._enter_phase()
                self.group.begin_steps()
                self.result.stopped = self.group.stop_before(self.step + 1)
                if self.result.stopped:
                    return
                self._one_step(loader)
                self._at_intervals()

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
            self._note(f"PRECISION SWITCH after step {self.step}: {before.recipe.name} -> {phase.recipe.name}")
        began, how = time.monotonic(), "compiled before"
        shown = self.session.is_main and self.outputs.display is None
        with self.outputs.store.preparing(self.state.items()), Compiling(self.session.console, shown=shown):
            if phase.recipe not in self.programs:  # a return to a checkpoint compiles nothing that it has
                self.programs[phase.recipe] = self._compile(phase)
                # A step's collectives wait 30 s for a peer (Gloo), and compilers may be further apart: ranks meet here.
                self.group.share(f"compiled/{len(self.programs)}", phase.recipe.name)
                how = f"compiled in {time.monotonic() - began:.1f} s"
            self.program, self.evaluate = self.programs[phase.recipe]
        self.meter = make_meter(self.session, phase)
        needed = self.program.memory_analysis()
        total = (needed.argument_size_in_bytes + needed.temp_size_in_bytes) / GIB if needed else 0.0
        self._note(f"{how}; the program needs {total:.2f} GiB a device")
        if self.outputs.display is None:
            self.outputs.display = open_display(self.session, self.outputs.stack)
        self.late.restart_clock()

    def _compile(self, phase: Phase) -> tuple[Any, Any]:
        """(train step, validation step or None), compiled side by side: a compiler mostly keeps to one core. Beside
        them runs the self-test of kernels that this and all later phases rely on.
        """
        ahead = [each for each in self.phases if each.recipe not in self.tested]
        self.tested.update(each.recipe for each in ahead)
        resolved = phase.resolved(self.config)
        state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), self.state)
        batch = abstract_batch(self.config, self.mesh, seq=self.session.source.seq)
        options = self.capture.compiler_options
        step = jit_train_step(self.config, resolved, self.mesh, options=options).lower(state, batch)
        share = lambda topic, value: self.group.share(f"order/{len(self.programs)}/{topic}", value)  # noqa: E731
        order = Scheduling(self.mesh, self.config.schedule_by, share, self._note, options)
        check = None
        if self.config.validation.every or self.config.validation.at_end:
            check = make_eval_step(self.config, resolved, self.mesh).lower(state.params, state.seed, batch)
        if jax.process_count() > 1:  # processes must compile in the same order
            check_stacks_of_loops(self.session, ahead)
            return compile_train_step(step, resolved, order), check and check.compile()
        with ThreadPoolExecutor(2) as beside:
            stacks = beside.submit(check_stacks_of_loops, self.session, ahead)
            evaluate = beside.submit(lambda: check and check.compile())
            try:
                return compile_train_step(step, resolved, order), evaluate.result()
            finally:
                stacks.result()

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
        self.recent.append((self.step, batch))
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
            **self.meter.rates(finished.step_time_s, finished.joules),
            "input_wait_s": finished.host["input_wait_s"],
            **{name: value for name, value in values.items() if name != "loss"},
            "flops_formula": self.session.preflight.manifests[0].flops_formula,
            **extra,
        }
        row.update(self.goodput.step(row))
        self.row = row
        self.result.loss, self.result.step = values["loss"], finished.step
        self.outputs.write(row)
        note = self.guard.look(finished.step, values)
        if note is not None:
            self._note(note)

    def _drain(self) -> None:
        """Wait for the newest step and write its row."""
        self._emit(self.late.flush())
        self.late.restart_clock()

    # Trouble

    def _answer(self, trouble: Trouble) -> None:
        """Go back to the last checkpoint, or stop. A fault of memory needs only the weights from the disk; anything
        else needs --on-divergence to say in which precision to go on, without the data that led here."""
        reason = trouble.reason + self._where(trouble)
        alone = jax.process_count() == 1  # on several processes only one may have seen a fault of memory
        willing = alone if trouble.fault else self.config.on_divergence != "stop"
        if not willing or len(self.returns) >= self.config.guard.returns:
            raise Diverged(self._last_words(reason, willing=willing))
        self.outputs.store.wait()
        start = self.begin_again()
        recipe = "" if trouble.fault else self.config.on_divergence
        skipped = 0 if trouble.fault else trouble.step - start.step
        self.returns.append(Return(start.step, trouble.step, trouble.reason, recipe, skipped))
        self._note(
            f"{reason}. GOING BACK to "
            + (f"the checkpoint of step {start.step}" if start.resumed else "the beginning")
            + (f", skipping {skipped} batches, and on in {recipe.upper()}" if recipe else "")
            + f" (return {len(self.returns)} of at most {self.config.guard.returns})"
        )
        self._go_back_to(start, skipped)

    def _go_back_to(self, start: Start, skipped: int) -> None:
        self.state, self.step = start.state, start.step
        index = (start.data_state or {"next_index": 0})["next_index"]
        self.data_state = {"next_index": index + skipped}
        self.phases = with_fallback(self.phases, start.step, self.returns[-1].recipe)
        self.program = None
        self.late = OneStepLate(energy=self.session.energy.joules)
        self.recent.clear()
        self.guard.restart(float(jax.device_get(start.state.scaler["skipped"])))
        self.goodput.throw_away(start.goodput["productive"] if start.goodput else 0.0)
        self.last_saved = start.step if start.resumed else None
        for sink in self.outputs.sinks:
            sink.close()
        self.outputs.sinks = open_sinks(self.session, self.outputs.stack, resume_step=start.step)
        if self.session.is_main:
            write_manifest(self.session, self.phases, self.returns)

    def _where(self, trouble: Trouble) -> str:
        batch = dict(self.recent).get(trouble.step)
        if trouble.fault or batch is None or "SPIKE" in trouble.reason:
            return ""
        resolved = phase_at(self.phases, trouble.step - 1).resolved(self.config)
        step = jax.numpy.asarray(trouble.step - 1, jax.numpy.int32)
        return "; computed again, the first that is not finite is " + locate(
            self.config, resolved, self.mesh, self.state.params, batch, step=step
        )

    def _last_words(self, reason: str, *, willing: bool) -> str:
        self.outputs.store.wait()
        written = self.outputs.store.steps()
        saved = f"the checkpoint of step {written[-1]} is good" if written else "there is no checkpoint yet"
        if willing:
            return f"{reason}; after {len(self.returns)} returns to a checkpoint training stops here, and {saved}"
        return (
            f"{reason}; training stops here, weights unchanged by this step, and {saved}. Try --on-divergence bf16, a "
            "lower --optimizer.learning-rate, --loss-scale.mode dynamic, or --recipe bf16 to see whether precision is "
            "at fault"
        )

    def _note(self, text: str) -> None:
        if self.outputs.display is not None:
            self.outputs.display.note(text)
        else:
            self.session.say(text)

    # Intervals

    def _at_intervals(self) -> None:
        self.outputs.check_place()
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
        names = {name: "validation_loss" if name == "all" else f"validation_loss/{name}" for name in found}
        self._emit(finished, **{names[name]: value for name, value in found.items()})
        self.late.restart_clock()
        text = "  ".join(f"{name} {value:.4f}" for name, value in found.items() if name != "all" or len(found) > 2)
        self._note(f"validation after step {self.step}: {text or 'the data set has no validation rows'}")

    def _save(self) -> None:
        self._drain()  # a state whose numbers were not looked at is not worth keeping
        if int(jax.jit(bit_sum)(self.state.params)) != int(self.state.sentinel):
            raise Trouble(
                self.step, f"step {self.step}: memory has changed the weights after they were written", fault=True
            )
        extra = {
            "config": to_dict(self.config),
            "data": self.data_state,
            "data_set": self.session.content,
            "goodput": self.goodput.to_json(),
            "returns": [asdict(back) for back in self.returns],
        }
        try:
            begun = self.outputs.store.save(self.step, self.state.items(), extra=extra)
        except PoisonedCheckpoint as poison:
            raise Trouble(self.step, f"step {self.step}: the state was not saved, {poison}") from None
        self.last_saved = self.step if begun else self.last_saved
        self.late.restart_clock()

    def _finish(self) -> None:
        if self.result.stopped is None and self.program is not None and self.config.validation.at_end:
            self._validate()
        else:
            self._drain()
        self.outputs.check_place()
        if self.last_saved != self.step and self.step:
            self._save()
        written = self.outputs.store.close()
        self.outputs.check_place()
        if not written or (self.step and self.last_saved != self.step):
            lost = f"the last checkpoint (step {self.step}) could not be written; see the message above"
            raise OSError(errno.EIO, lost)


def _due(step: int, every: int) -> bool:
    return bool(every) and step % every == 0
