"""Captures a profile of steps N..M (`--profile xprof|nsys`).

xprof: the JAX profiler writes a trace under `profile/`, from which the breakdown of step time is printed. nsys: the
CUDA profiler API marks the range. The program must be started under nsys; the command is printed.
"""

import ctypes
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax

from halfbyte.hlo import HloParseError
from halfbyte.hlo.trace_breakdown import step_time_breakdown


@dataclass(frozen=True)
class ProfileConfig:
    """Which steps to capture, and with what."""

    profile: Literal["off", "xprof", "nsys"] = "off"
    """Capture steps: xprof (trace and a breakdown of step time) or nsys (marks the range)."""
    profile_start: int = 10
    """First step captured."""
    profile_stop: int = 12
    """Last step captured."""

    def __post_init__(self) -> None:
        if self.profile != "off" and not 1 <= self.profile_start <= self.profile_stop:
            raise ValueError(
                f"profile_start {self.profile_start} and profile_stop {self.profile_stop} must be steps, "
                "the first not after the last"
            )


class ProfileCapture:
    """Captures from before step `profile_start` until after step `profile_stop`, or until the run ends.

    `shares` is the breakdown of step time afterwards.
    """

    def __init__(self, config: ProfileConfig, directory: Path, *, say: Callable[[str], None]):
        self._config, self._directory, self._say = config, directory, say
        self._running, self._captured = False, config.profile == "off"
        self.shares: dict[str, float] = {}
        if config.profile == "nsys":
            command = " ".join(sys.argv)
            nsys = "nsys profile --capture-range=cudaProfilerApi --capture-range-end=stop"
            say(f"to record: {nsys} -o {directory} {command}")

    @property
    def compiler_options(self) -> dict[str, str]:
        """Returns the compiler options of the captured program.

        They disable CUDA graphs: kernels inside a graph do not name their HLO instruction.
        """
        return {"xla_gpu_enable_command_buffer": ""} if self._config.profile == "xprof" else {}

    def before_step(self, step: int, state: Any) -> None:
        """Starts the capture before `step` is dispatched, if it is due; `state` is the result of the last step.

        Waits for `state`: starting a profiler takes longer than a step, and the trace would show an idle device.
        """
        if self._config.profile == "off" or self._running or step != self._config.profile_start:
            return
        jax.block_until_ready(state)
        self._running = True
        if self._config.profile == "xprof":
            self._directory.mkdir(parents=True, exist_ok=True)
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0
            jax.profiler.start_trace(str(self._directory), profiler_options=options)
        elif error_text := _cuda_profiler("cudaProfilerStart"):
            self._say(f"NOTHING IS CAPTURED: {error_text}")

    def after_step(self, step: int, result: Any, program_text: Callable[[], str]) -> None:
        """Ends the capture after `step` was dispatched, if it is due; waits for `result`."""
        if self._running and step == self._config.profile_stop:
            self._end(step, result, program_text)

    def finish(self, step: int, result: Any, program_text: Callable[[], str]) -> None:
        """Ends a capture that is running after the last step of the run; reports a range that was never reached."""
        if self._running:
            self._end(step, result, program_text)
        if not self._captured:
            first = self._config.profile_start
            self._say(f"NOTHING WAS CAPTURED: this start ended at step {step} and did not run step {first}, the first")

    def _end(self, step: int, result: Any, program_text: Callable[[], str]) -> None:
        self._running, self._captured = False, True
        jax.block_until_ready(result)
        if self._config.profile == "nsys":
            if error_text := _cuda_profiler("cudaProfilerStop"):
                self._say(f"the captured range has no end: {error_text}")
            return
        jax.profiler.stop_trace()
        traces = sorted(self._directory.rglob("*.xplane.pb"))
        steps = f"steps {self._config.profile_start} to {step}"
        self._say(f"trace of {steps} in {self._directory} (open with xprof or Perfetto)")
        if traces:
            try:
                self.shares = step_time_breakdown(traces[-1], program_text())
            except HloParseError as error:  # the run continues: the trace was written and can be read with other tools
                self._say(f"no breakdown of step time: {error}")
        if self.shares:
            parts = "  ".join(f"{name} {100 * share:.1f}%" for name, share in self.shares.items())
            self._say(f"step time, {steps}: {parts}")


def _cuda_profiler(function: str) -> str:
    """Calls a function of the CUDA profiler API; returns the error, or "" on success."""
    for library in ("libcudart.so.12", "libcudart.so.13", "libcudart.so"):
        try:
            runtime = ctypes.CDLL(library)
        except OSError:
            continue
        code = getattr(runtime, function)()
        runtime.cudaGetErrorString.restype = ctypes.c_char_p
        return f"{function} failed with {code}, {runtime.cudaGetErrorString(code).decode()}" if code else ""
    raise ValueError(
        "--profile nsys needs the CUDA runtime library (libcudart), and none is found; use --profile xprof"
    )
