"""The defect radar: every K steps, on a run's own weights and batch, each quantized GEMM beside what its recipe gives.

An alarm is an operand or a result that is not the recipe's on these very tensors (see `truth`), a result that is not
finite, or random bits that two linears share (see `bits`). It costs a few forward and backward passes over a part of
the batch.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from halfbyte.metrics import append_row
from halfbyte.models import Context
from halfbyte.recipe import Resolved, step_key
from halfbyte.train.config import TrainConfig
from halfbyte.train.observing import Moment
from halfbyte.train.step import make_context

from .bits import BitsCheck
from .replay import Replay
from .truth import judge

FILE = "radar.jsonl"
MOST_TOKENS = 2048  # of the batch that are looked at, where one device holds it all
BLOCK = 32  # tokens: the largest that a format has
MOST_NAMED = 4  # alarms in a line


def quantized_gemms(resolved: Resolved) -> bool:
    return any(r.quantized for segment in resolved.segments for r in segment.recipes.values())


def looking_context(config: TrainConfig, resolved: Resolved, mesh: Any) -> Context:
    """The step's context for a replay: layers in a loop, nothing recomputed, no mesh of one device."""
    context = make_context(config, resolved, mesh, None)
    one = mesh is None or mesh.size == 1
    return dataclasses.replace(context, mesh=None if one else mesh, remat="none", unroll=1)


class Probe:
    """One probe, compiled for a policy."""

    def __init__(self, config: TrainConfig, resolved: Resolved, mesh: Any):
        self.context = context = looking_context(config, resolved, mesh)
        self.whole_batch = context.mesh is not None
        self._replay = Replay(config.model, context)
        self._judge = jax.jit(functools.partial(judge, backend=context.backend, sharded=self.whole_batch))
        self._bits = BitsCheck(config.model, context)

    def gemms(self, params: Any, batch: Any, key: jax.Array) -> list[dict[str, Any]]:
        """One entry a GEMM: layer, site, gemm, recipe, and the numbers of `truth.judge`."""
        rows = batch if self.whole_batch else part_of(batch)
        found = []
        for layer, linears in self._replay.layers(params, rows, key):
            for given in linears:
                if given.recipe.quantized:  # linears of one shape and recipe share a program
                    numbers = jax.device_get(self._judge(dataclasses.replace(given, site="")))
                    place = {"layer": layer, "site": given.site, "recipe": given.recipe.name}
                    found += [{**place, "gemm": g, **{k: float(v) for k, v in n.items()}} for g, n in numbers.items()]
        order = {"fprop": 0, "dgrad": 1, "wgrad": 2}
        return sorted(found, key=lambda g: (g["site"], order.get(g["gemm"], 3), g["layer"]))

    def bits(self, seed: int, step: int) -> dict[str, Any]:
        """The bits of this step and the next."""
        return self._bits.run([step_of(seed, step), step_of(seed, step + 1)])


def step_of(seed: int, step: int) -> jax.Array:
    """The key of a step's first microbatch, `step` finished steps before it."""
    return jax.random.fold_in(step_key(seed, step), 0)


def part_of(batch: Mapping[str, Any], most: int = MOST_TOKENS) -> dict[str, Any]:
    """The first rows of a batch, or the first tokens of its first row: `most` tokens at most, in whole blocks. All of
    it, if no part is."""
    many, length = next(iter(batch.values())).shape
    whole = [rows for rows in range(1, min(most // length, many) + 1) if rows * length % BLOCK == 0]
    rows = 1 if length > most else max(whole, default=many)
    return {name: value[:rows, :most] for name, value in batch.items()}


def judged(gemms: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[str]]:
    """(the GEMMs, each with whether it is not what its recipe gives; alarms as text)."""
    right = [g["error"] <= 1 and g["wrong"] == 0 and math.isfinite(g["gain"]) for g in gemms]  # NaN passes nothing
    marked = [{**gemm, "alarm": not held} for gemm, held in zip(gemms, right, strict=True)]
    kinds = dict.fromkeys(gemm["gemm"] for gemm in marked)
    found = {kind: [g for g in marked if g["gemm"] == kind] for kind in kinds}
    return marked, [_alarm(kind, these) for kind, these in found.items() if any(g["alarm"] for g in these)]


def _alarm(kind: str, gemms: Sequence[Mapping[str, Any]]) -> str:
    bad = sorted((g for g in gemms if g["alarm"]), key=lambda g: (-g["wrong"], -g["error"]))
    gain, snr, right_gain, right_snr = (
        float(np.mean([g[name] for g in bad])) for name in ("gain", "snr_db", "recipe_gain", "recipe_snr_db")
    )
    where = ", ".join(f"layer {g['layer']} {g['site']}" for g in bad[:MOST_NAMED])
    more = f" and {len(bad) - MOST_NAMED} more" if len(bad) > MOST_NAMED else ""
    worst = bad[0]
    codes = f"; {100 * worst['wrong']:.3g}% of an operand's numbers differ" if worst["wrong"] else ""
    return (
        f"{kind}: mean gain {gain:.4f} and {snr:.1f} dB of {len(bad)} of {len(gemms)} GEMMs, where {worst['recipe']} "
        f"gives {right_gain:.4f} and {right_snr:.1f} dB{codes}: {where}{more}"
    )


class Recorder:
    """An observer of a run that keeps what it sees in a file of rows."""

    def __init__(self, every: int, file: Path):
        self.every, self._file = every, file

    def _write(self, row: dict[str, Any]) -> None:
        if jax.process_index() == 0:
            append_row(self._file, row)


class Radar(Recorder):
    """Writes radar.jsonl, says what it found."""

    def __init__(self, every: int, directory: Path):
        super().__init__(every, directory / FILE)
        self._probes: dict[Resolved, Probe] = {}

    def observe(self, moment: Moment) -> list[str]:
        """Probe; a line for the log, and one for each alarm."""
        if not quantized_gemms(moment.resolved):
            return []
        probe = self._probes.get(moment.resolved)
        if probe is None:
            probe = self._probes[moment.resolved] = Probe(moment.config, moment.resolved, moment.mesh)
        seed, finished = moment.config.rounding_seed, moment.step - 1
        try:
            gemms, alarms = judged(probe.gemms(moment.params, moment.batch, step_of(seed, finished)))
        except ValueError as reason:  # a backend that serves the step and not a part of its batch, say
            self._write({"step": moment.step, "gemms": [], "bits": None, "alarms": [], "not_judged": str(reason)})
            return [f"radar before step {moment.step}: NOT JUDGED, {reason}"]
        bits = probe.bits(seed, finished)
        if bits["alarm"]:
            alarms.append(
                f"random bits: {' and '.join(bits['between'])} share them (correlation {bits['largest']:.2f})"
            )
        self._write({"step": moment.step, "gemms": gemms, "bits": bits, "alarms": alarms})
        return [summary(moment.step, gemms, alarms), *(f"RADAR ALARM: {alarm}" for alarm in alarms)]


def summary(step: int, gemms: Sequence[Mapping[str, Any]], alarms: Sequence[str]) -> str:
    """A line for the log."""
    gains = [gemm["gain"] for gemm in gemms]
    line = f"radar before step {step}: {len(gemms)} GEMMs, gains {min(gains):.3f} to {max(gains):.3f}"
    return line if alarms else f"{line}, each what its recipe gives, no alarm"
