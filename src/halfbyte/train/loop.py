"""Host loop: feeds the device, fetches metrics one step late, validates, saves, and stops on a signal.

The device never waits for the host: step n + 1 is dispatched before the metrics of step n are fetched.
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

from halfbyte.checkpoint import NonFiniteCheckpointError
from halfbyte.distributed import ProcessGroup
from halfbyte.io.dataclass_json import to_dict
from halfbyte.recipes import Recipe
from halfbyte.train.batch_source import make_global_batch, run_validation
from halfbyte.train.metrics_log import DeferredMetrics, FinishedStep, Throughput
from halfbyte.train.nan_guard import DivergenceGuard, Rollback, TrainingFault, find_first_nonfinite
from halfbyte.train.precision_phases import PrecisionPhase, phase_at, phases, with_fallback_recipe
from halfbyte.train.preflight import GIB
from halfbyte.train.progress_display import CompileIndicator
from halfbyte.train.resume import Goodput, ResumePoint
from halfbyte.train.session import (
    RunOutputs,
    Session,
    check_stacked_residuals_of_loops,
    make_throughput_meter,
    open_display,
    open_sinks,
    write_manifest,
)
from halfbyte.train.train_state import Observer, StepSnapshot, TrainState, is_due, params_checksum
from halfbyte.train.train_step import (
    Batch,
    StepScheduling,
    abstract_batch,
    compile_train_step,
    jit_train_step,
    make_eval_step,
)


class DivergedError(Exception):
    """Raised if the run has diverged and a rollback is not allowed, or did not help."""


@dataclass
class RunResult:
    """Result of a run. `stopped` is the name of the signal that stopped it, or None."""

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
    """Host loop of one run, from `start` to its end."""

    def __init__(
        self,
        session: Session,
        outputs: RunOutputs,
        start: ResumePoint,
        *,
        restore_for_rollback: Callable[[], ResumePoint],
        group: ProcessGroup,
        observers: Sequence[Observer] = (),
        until: int | None = None,
    ):
        self.restore_for_rollback, self.observers = restore_for_rollback, observers
        self.session, self.outputs, self.group = session, outputs, group
        self.goodput, self.capture = outputs.goodput, outputs.capture
        self.config, self.mesh = session.config, session.mesh
        self.state: TrainState = start.state
        self.step = start.step
        self.last = min(self.config.steps, until or self.config.steps)
        self.data_state = start.data_state
        self.late = DeferredMetrics(energy=session.energy.joules)
        self.result = RunResult(session.directory, start.step)
        self.returns: list[Rollback] = list(start.rollbacks)
        self.phases = phases(self.config)
        for back in self.returns:
            self.phases = with_fallback_recipe(self.phases, back.step, back.recipe)
        self.programs: dict[Recipe, tuple[Any, Any]] = {}
        self.tested: set[Recipe] = set()
        self.program: Any = None
        self.evaluate: Any = None
        self.meter: Throughput | None = None
        self.last_saved: int | None = start.step if start.resumed else None
        self.guard = DivergenceGuard(self.config)
        self.guard.restart(float(jax.device_get(start.state.scaler["skipped"])))
        self.recent: deque[tuple[int, Batch]] = deque(maxlen=3)
        self.row: dict[str, Any] | None = None

    def run(self) -> RunResult:
        """Runs the remaining steps."""
        began = time.monotonic()
        if self.step >= self.last:
            self.session.say(f"the run is complete at step {self.step}; raise --steps to go on")
        while True:
            try:
                self._steps()
                self.group.leave_step_loop()
                self._begin("finish", self.step)
                self._finish()
                break
            except TrainingFault as fault:
                self._handle_fault(fault)
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
                self.group.enter_step_loop()
                self.result.stopped = self.group.stop_reason_before(self.step + 1)
                if self.result.stopped:
                    return
                self._run_step(loader)
                self._at_intervals()

    # Steps

    def _enter_phase(self) -> None:
        """Compiles the train step if a precision phase begins at this step."""
        phase = phase_at(self.phases, self.step)
        if self.program is not None and phase.start != self.step:
            return
        self._begin("compile", self.step)
        if self.program is not None:
            self._flush_pending_step()
            before = phase_at(self.phases, self.step - 1)
            self._note(f"PRECISION SWITCH after step {self.step}: {before.recipe.name} -> {phase.recipe.name}")
        began, how = time.monotonic(), "compiled before"
        shown = self.session.is_main and self.outputs.display is None
        with self.outputs.store.warm_up(self.state.items()), CompileIndicator(self.session.console, shown=shown):
            if phase.recipe not in self.programs:  # after a rollback the compiled programs are reused
                self.programs[phase.recipe] = self._compile(phase)
                # Collectives of a step wait 30 s for a peer (Gloo); compile times may differ by more: ranks wait here.
                self.group.all_gather_json(f"compiled/{len(self.programs)}", phase.recipe.name)
                how = f"compiled in {time.monotonic() - began:.1f} s"
            self.program, self.evaluate = self.programs[phase.recipe]
        self.meter = make_throughput_meter(self.session, phase)
        needed = self.program.memory_analysis()
        total = (needed.argument_size_in_bytes + needed.temp_size_in_bytes) / GIB if needed else 0.0
        self._note(f"{how}; the program needs {total:.2f} GiB a device")
        if self.outputs.display is None:
            self.outputs.display = open_display(self.session, self.outputs.stack, done=self.step)
        self.late.restart_clock()

    def _compile(self, phase: PrecisionPhase) -> tuple[Any, Any]:
        """Compiles the train step and the validation step (None if the run has none).

        A single process compiles both concurrently (XLA mostly uses one core), with the kernels' self-test.
        """
        untested_phases = [later_phase for later_phase in self.phases if later_phase.recipe not in self.tested]
        self.tested.update(later_phase.recipe for later_phase in untested_phases)
        resolved = phase.resolved(self.config)
        state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), self.state)
        batch = abstract_batch(self.config, self.mesh, seq=self.session.source.seq)
        options = self.capture.compiler_options
        step = jit_train_step(self.config, resolved, self.mesh, options=options).lower(state, batch)
        share = lambda topic, value: self.group.all_gather_json(f"order/{len(self.programs)}/{topic}", value)  # noqa: E731
        order = StepScheduling(self.mesh, self.config.schedule_by, share, self._note, options)
        eval_step = None
        if self.config.validation.every or self.config.validation.at_end:
            eval_step = make_eval_step(self.config, resolved, self.mesh).lower(state.params, state.seed, batch)
        if jax.process_count() > 1:  # processes must compile in the same order
            check_stacked_residuals_of_loops(self.session, untested_phases)
            return compile_train_step(step, resolved, order), eval_step and eval_step.compile()
        with ThreadPoolExecutor(2) as pool:
            stacks = pool.submit(check_stacked_residuals_of_loops, self.session, untested_phases)
            evaluate = pool.submit(lambda: eval_step and eval_step.compile())
            try:
                return compile_train_step(step, resolved, order), evaluate.result()
            finally:
                stacks.result()

    def _run_step(self, loader: Any) -> None:
        began = time.perf_counter()
        self._begin("data", self.step)
        rows = next(loader)
        self.data_state = loader.get_state()
        batch = make_global_batch(rows, self.mesh, batch=self.config.batch)
        waited = time.perf_counter() - began
        self._observe(batch)
        self.step += 1
        self._begin("step", self.step)
        self.capture.before_step(self.step, self.state)
        with jax.profiler.StepTraceAnnotation("train", step_num=self.step):
            self.state, values = self.program(self.state, batch)
        self.recent.append((self.step, batch))
        self.capture.after_step(self.step, self.state, self.program.as_text)
        self._write_step_row(self.late.enqueue(self.step, values, input_wait_s=waited))

    def _observe(self, batch: Any) -> None:
        """Calls the observers that are due with the inputs of the next step; step time excludes them."""
        for observer in self.observers:
            if is_due(observer, self.step + 1):
                self._flush_pending_step()
                resolved = phase_at(self.phases, self.step).resolved(self.config)
                moment = StepSnapshot(self.step + 1, self.config, resolved, self.mesh, self.state.params, batch)
                for line in observer.observe(moment):
                    self._note(line)
                self.late.restart_clock()

    # Numbers

    def _write_step_row(self, finished: FinishedStep | None, **extra: Any) -> None:
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
        note = self.guard.check_step(finished.step, values)
        if note is not None:
            self._note(note)

    def _flush_pending_step(self) -> None:
        """Waits for the newest step and writes its row."""
        self._write_step_row(self.late.flush())
        self.late.restart_clock()

    # Faults

    def _handle_fault(self, fault: TrainingFault) -> None:
        """Rolls back to the last checkpoint, or raises DivergedError. After a memory fault the stored weights suffice;
        a divergence needs --on-divergence, the precision to continue in, and skips the batches since the checkpoint."""
        reason = fault.reason + self._where(fault)
        single_process = jax.process_count() == 1  # on several processes a memory fault may be seen by only one
        may_roll_back = single_process if fault.in_memory else self.config.on_divergence != "stop"
        if not may_roll_back or len(self.returns) >= self.config.guard.max_rollbacks:
            raise DivergedError(self._final_status_message(reason, willing=may_roll_back))
        self.outputs.store.wait()
        start = self.restore_for_rollback()
        recipe = "" if fault.in_memory else self.config.on_divergence
        skipped = 0 if fault.in_memory else fault.step - start.step
        self.returns.append(Rollback(start.step, fault.step, fault.reason, recipe, skipped))
        self._note(
            f"{reason}. GOING BACK to "
            + (f"the checkpoint of step {start.step}" if start.resumed else "the beginning")
            + (f", skipping {skipped} batches, and on in {recipe.upper()}" if recipe else "")
            + f" (return {len(self.returns)} of at most {self.config.guard.max_rollbacks})"
        )
        self._roll_back(start, skipped)

    def _roll_back(self, start: ResumePoint, skipped: int) -> None:
        self.state, self.step = start.state, start.step
        index = (start.data_state or {"next_index": 0})["next_index"]
        self.data_state = {"next_index": index + skipped}
        self.phases = with_fallback_recipe(self.phases, start.step, self.returns[-1].recipe)
        self.program = None
        self.late = DeferredMetrics(energy=self.session.energy.joules)
        self.recent.clear()
        self.guard.restart(float(jax.device_get(start.state.scaler["skipped"])))
        self.goodput.discard_since(start.goodput["productive"] if start.goodput else 0.0)
        self.last_saved = start.step if start.resumed else None
        for sink in self.outputs.sinks:
            sink.close()
        self.outputs.sinks = open_sinks(self.session, self.outputs.stack, resume_step=start.step)
        if self.session.is_main:
            write_manifest(self.session, self.phases, self.returns)

    def _where(self, fault: TrainingFault) -> str:
        batch = dict(self.recent).get(fault.step)
        if fault.in_memory or batch is None or "SPIKE" in fault.reason:
            return ""
        resolved = phase_at(self.phases, fault.step - 1).resolved(self.config)
        step = jax.numpy.asarray(fault.step - 1, jax.numpy.int32)
        return "; computed again, the first that is not finite is " + find_first_nonfinite(
            self.config, resolved, self.mesh, self.state.params, batch, step=step
        )

    def _final_status_message(self, reason: str, *, willing: bool) -> str:
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

    def _begin(self, activity: str, step: int | None = None) -> None:
        """Reports the new activity of this rank to its process group and to the display."""
        self.group.report_activity(activity, step)
        if self.outputs.display is not None:
            self.outputs.display.begin(activity)

    def _note(self, text: str) -> None:
        if self.outputs.display is not None:
            self.outputs.display.note(text)
        else:
            self.session.say(text)

    # Intervals

    def _at_intervals(self) -> None:
        self.outputs.assert_still_claimed()
        self.outputs.store.poll()
        if _is_due(self.step, self.config.validation.every) and self.step < self.last:
            self._begin("validation")
            self._validate()
        if _is_due(self.step, self.config.checkpoint.every) and self.step < self.last:
            self._begin("save")
            self._save()

    def _validate(self) -> None:
        finished = self.late.flush()  # before validation, so that step time excludes it
        evaluate = functools.partial(self.evaluate, self.state.params, self.state.seed)
        losses = run_validation(self.session.source, self.mesh, evaluate)
        self.result.validation = losses
        names = {name: "validation_loss" if name == "all" else f"validation_loss/{name}" for name in losses}
        self._write_step_row(finished, **{names[name]: value for name, value in losses.items()})
        self.late.restart_clock()
        text = "  ".join(f"{name} {value:.4f}" for name, value in losses.items() if name != "all" or len(losses) > 2)
        self._note(f"validation after step {self.step}: {text or 'the data set has no validation rows'}")

    def _save(self) -> None:
        self._flush_pending_step()  # the guard checks the metrics of a state before it is saved
        if int(jax.jit(params_checksum)(self.state.params)) != int(self.state.sentinel):
            raise TrainingFault(
                self.step, f"step {self.step}: memory has changed the weights after they were written", in_memory=True
            )
        extra = {
            "config": to_dict(self.config),
            "data": self.data_state,
            "data_set": self.session.content,
            "goodput": self.goodput.to_json(),
            "returns": [asdict(back) for back in self.returns],
        }
        try:
            started = self.outputs.store.save(self.step, self.state.items(), extra=extra)
        except NonFiniteCheckpointError as error:
            raise TrainingFault(self.step, f"step {self.step}: the state was not saved, {error}") from None
        self.last_saved = self.step if started else self.last_saved
        self.late.restart_clock()

    def _finish(self) -> None:
        if self.result.stopped is None and self.program is not None and self.config.validation.at_end:
            self._begin("validation")
            self._validate()
        else:
            self._flush_pending_step()
        self.outputs.assert_still_claimed()
        if self.last_saved != self.step and self.step:
            self._begin("save")
            self._save()
        self._begin("finish")
        written = self.outputs.store.close()
        self.outputs.assert_still_claimed()
        if not written or (self.step and self.last_saved != self.step):
            lost = f"the last checkpoint (step {self.step}) could not be written; see the message above"
            raise OSError(errno.EIO, lost)


def _is_due(step: int, every: int) -> bool:
    return bool(every) and step % every == 0
