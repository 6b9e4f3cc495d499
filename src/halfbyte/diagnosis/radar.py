"""The defect radar: every K steps, on the run's own weights and batch, each quantized GEMM against its bf16 result.

An alarm is a gain outside of its band (see `bands`), a result that is not finite, or random bits that two linears share
(see `bits`). It costs a few forward and backward passes over a part of the batch.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from halfbyte.metrics import append_row
from halfbyte.models import Context
from halfbyte.models.context import segments
from halfbyte.recipe import Recipe, Resolved, step_key
from halfbyte.train.config import TrainConfig
from halfbyte.train.observing import Moment
from halfbyte.train.step import make_context

from .bands import bands, kind_of, of_mean, outside
from .bits import BitsCheck
from .replay import Replay
from .truth import look_for_truth

FILE = "radar.jsonl"
MOST_TOKENS = 2048  # of the batch that are looked at, where one device holds it all
MOST_NAMED = 4  # alarms in a line


def quantized_gemms(resolved: Resolved) -> bool:
    return any(r.quantized for segment in resolved.segments for r in segment.recipes.values())


class Probe:
    """One probe, compiled for a policy."""

    def __init__(self, config: TrainConfig, resolved: Resolved, mesh: Any):
        one = mesh is None or mesh.size == 1
        context = make_context(config, resolved, mesh, None)
        context = dataclasses.replace(context, mesh=None if one else mesh, remat="none", unroll=1)
        self.context: Context = context
        self.recipes = {s: segment.recipes for segment in segments(config.model, context)
                        for s in range(segment.start, segment.stop)}  # fmt: skip
        self._replay = Replay(config.model, context, look_for_truth(context))
        self._bits = BitsCheck(config.model, context)
        self.whole_batch = not one

    def gemms(self, params: Any, batch: Any, key: jax.Array) -> list[dict[str, Any]]:
        """One entry a GEMM: layer, site, gemm, kind, and the numbers of `truth.agreement`."""
        rows = batch if self.whole_batch else part_of(batch)
        found = []
        for layer, sites in self._replay.layers(params, rows, key):
            for site, gemms in jax.device_get(sites).items():
                chosen: Recipe = self.recipes[layer][f"layers/{site}"]
                found += [
                    {"layer": layer, "site": site, "gemm": gemm, "kind": kind_of(gemm, chosen),
                     **{name: float(value) for name, value in numbers.items()}}
                    for gemm, numbers in gemms.items()
                ]  # fmt: skip
        order = {"fprop": 0, "dgrad": 1, "wgrad": 2}
        return sorted(found, key=lambda g: (g["site"], order.get(g["gemm"], 3), g["layer"]))

    def bits(self, seed: int, step: int) -> dict[str, Any]:
        """The bits of this step and the next."""
        return self._bits.run([step_of(seed, step), step_of(seed, step + 1)])


def step_of(seed: int, step: int) -> jax.Array:
    """The key of a step's first microbatch, `step` finished steps before it."""
    return jax.random.fold_in(step_key(seed, step), 0)


def part_of(batch: Mapping[str, Any], most: int = MOST_TOKENS) -> dict[str, Any]:
    """The first rows of a batch, or the first tokens of its first row: `most` tokens at most."""
    length = next(iter(batch.values())).shape[1]
    rows = max(1, most // length)
    return {name: value[:rows, :most] for name, value in batch.items()}


def judged(
    gemms: Sequence[Mapping[str, Any]], known: Mapping[str, Any] | None = None
) -> tuple[list[dict[str, Any]], list[str]]:
    """(the GEMMs, each with its band and whether it is outside; alarms as text)."""
    limits = bands() if known is None else known
    marked, alarms = [], []
    for gemm in gemms:
        band = limits.get(gemm["kind"])
        marked.append({**gemm, "band": band, "alarm": outside(gemm["gain"], band) or not math.isfinite(gemm["gain"])})
    for kind in dict.fromkeys(gemm["kind"] for gemm in marked):
        these = [gemm for gemm in marked if gemm["kind"] == kind]
        alarms += _alarms(kind, these, of_mean(limits.get(kind), len(these)))
    return marked, alarms


def _alarms(kind: str, gemms: Sequence[Mapping[str, Any]], mean_band: Any) -> list[str]:
    name = kind.split()[0]
    mean = float(np.mean([gemm["gain"] for gemm in gemms]))
    bad = sorted((gemm for gemm in gemms if gemm["alarm"]), key=lambda g: -abs(g["gain"] - 1))
    if outside(mean, mean_band):
        low, high = mean_band
        return [f"{name}: mean gain {mean:.4f} over {len(gemms)} GEMMs, healthy is {low:.4f} to {high:.4f} ({kind})"]
    if not bad:
        return []
    worst = ", ".join(f"layer {g['layer']} {g['site']} {g['gain']:.4f}" for g in bad[:MOST_NAMED])
    more = f" and {len(bad) - MOST_NAMED} more" if len(bad) > MOST_NAMED else ""
    low, high = bad[0]["band"] or (math.nan, math.nan)
    return [f"{name}: gain outside {low:.4f} to {high:.4f}: {worst}{more}"]


class Radar:
    """An observer of a run: writes radar.jsonl, says what it found."""

    def __init__(self, every: int, directory: Path):
        self.every, self._file = every, directory / FILE
        self._probes: dict[Resolved, Probe] = {}

    def observe(self, moment: Moment) -> list[str]:
        """Probe; a line for the log, and one for each alarm."""
        if not quantized_gemms(moment.resolved):
            return []
        probe = self._probes.get(moment.resolved)
        if probe is None:
            probe = self._probes[moment.resolved] = Probe(moment.config, moment.resolved, moment.mesh)
        seed, finished = moment.config.rounding_seed, moment.step - 1
        gemms, alarms = judged(probe.gemms(moment.params, moment.batch, step_of(seed, finished)))
        bits = probe.bits(seed, finished)
        if bits["alarm"]:
            alarms.append(
                f"random bits: {' and '.join(bits['between'])} share them (correlation {bits['largest']:.2f})"
            )
        self._write({"step": moment.step, "gemms": gemms, "bits": bits, "alarms": alarms})
        return [summary(moment.step, gemms, alarms), *(f"RADAR ALARM: {alarm}" for alarm in alarms)]

    def _write(self, row: dict[str, Any]) -> None:
        if jax.process_index() == 0:
            append_row(self._file, row)


def summary(step: int, gemms: Sequence[Mapping[str, Any]], alarms: Sequence[str]) -> str:
    """A line for the log. GEMMs of a kind that no band is known of are not judged, and that is said."""
    gains = [gemm["gain"] for gemm in gemms]
    line = f"radar before step {step}: {len(gemms)} GEMMs, gains {min(gains):.3f} to {max(gains):.3f}"
    unknown = list(dict.fromkeys(gemm["kind"] for gemm in gemms if gemm["band"] is None))
    line += "" if alarms else ", no alarm"
    if not unknown:
        return line
    many = sum(gemm["band"] is None for gemm in gemms)
    more = f" and {len(unknown) - 1} more kinds" if len(unknown) > 1 else ""
    return f"{line}; {many} of them NOT JUDGED, no band is known of {unknown[0]}{more}"
