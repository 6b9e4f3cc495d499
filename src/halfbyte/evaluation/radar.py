"""Radar of numerical faults: every K steps, compare each quantized GEMM of a run with its recipe.

It uses the run's own weights and part of its batch, and costs a few forward and backward passes over that part. An
alarm is an operand or result that differs from the recipe on these tensors (`gemm_accuracy`), a non-finite result,
results whose mean gain against the recipe is not 1 (`mean_gain_alarm`), or two random streams that share bits
(`RandomBitsCheck`).
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import NormalDist
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from halfbyte.evaluation.gemm_accuracy import judge_linear
from halfbyte.evaluation.step_replay import StepReplay
from halfbyte.formats import random_bytes
from halfbyte.models import LlamaConfig, ModelContext
from halfbyte.models.model_context import layer_segments, stream_words_of_layer, stream_words_of_layers
from halfbyte.recipes import GEMM_ROLES, Recipe, ResolvedPolicy, role_key, signs_key
from halfbyte.train import append_row, train_step
from halfbyte.train.train_config import TrainConfig
from halfbyte.train.train_state import StepSnapshot, TrainState

STREAM_SHAPE = (64, 64)  # bytes drawn per random stream
EXPERTS_COMPARED = 2  # experts per layer whose streams are drawn: all experts derive theirs alike
FALSE_ALARM_RATE = 1e-6  # per probe of a healthy run, for the random bits and for the mean gains
GAIN_TOLERANCE = 2.0**-10  # of a mean gain: an eighth of a bfloat16 ulp, for accumulators that truncate
RADAR_FILE = "radar.jsonl"
MAX_RADAR_TOKENS = 2048  # of the batch that are probed on a single device
TOKEN_BLOCK_SIZE = 32  # tokens: the maximum block size of any format
MAX_LISTED_ALARMS = 4  # per log line


class RandomBitsCheck:
    """Check that no two random streams of a model share bits. Compiled once per model and policy.

    Two streams that share bits are each unbiased, so no gain reveals it, but their errors add up. A stream supplies the
    stochastic rounding of one operand of a linear, or the random Hadamard signs of a GEMM. The correlation of n bytes
    of two unrelated streams is normal with standard deviation 1 / sqrt(n); shared bits give 1.
    """

    def __init__(self, cfg: LlamaConfig, ctx: ModelContext):
        self._draw = jax.jit(functools.partial(draw_streams, cfg, ctx))

    def run(self, steps: Mapping[str, jax.Array]) -> dict[str, Any]:
        """Returns the maximum correlation between two streams and their names, for the keys of `steps` (name -> key).
        `alarm`: it exceeds `limit`, which unrelated streams do in FALSE_ALARM_RATE of probes."""
        names, rows = [], []
        for step, key in steps.items():
            for (first_layer, site, stream), drawn in jax.device_get(self._draw(key)).items():
                names += [f"{step} layer {first_layer + index} {site} {stream}" for index in range(len(drawn))]
                rows.append(drawn.reshape(len(drawn), -1) - np.float32(127.5))  # the mean of a random byte
        if len(names) < 2:
            return {"pairs": 0, "largest": None, "limit": None, "alarm": False, "between": []}
        streams = np.concatenate(rows)
        streams /= np.linalg.norm(streams, axis=1, keepdims=True)
        correlation = np.abs(streams @ streams.T)
        np.fill_diagonal(correlation, 0.0)
        a, b = np.unravel_index(int(correlation.argmax()), correlation.shape)
        max_correlation, pairs = float(correlation[a, b]), len(names) * (len(names) - 1) // 2
        limit = _normal_bound(FALSE_ALARM_RATE / pairs) / math.sqrt(math.prod(STREAM_SHAPE))
        return {
            "pairs": pairs,
            "largest": max_correlation,
            "limit": limit,
            "alarm": max_correlation > limit,
            "between": [names[int(a)], names[int(b)]],
        }


class RadarProbe:
    """The programs of a probe, compiled for one policy."""

    def __init__(self, config: TrainConfig, resolved: ResolvedPolicy, mesh: Any):
        self.context = context = replay_context(config, resolved, mesh)
        self.whole_batch, self.accumulates = context.mesh is not None, config.accumulate > 1
        self._replay = StepReplay(config.model, context)
        self._judge = jax.jit(
            functools.partial(judge_linear, backend=context.backend, partitioned_by_xla=self.whole_batch)
        )
        self._bits = RandomBitsCheck(config.model, context)

    def gemms(self, params: Any, batch: Any, key: jax.Array) -> list[dict[str, Any]]:
        """Returns one entry per GEMM: layer, site, gemm, recipe, and the statistics of `judge_linear`."""
        rows = batch if self.whole_batch else subsample_batch(batch)
        entries = []
        for layer, linears in self._replay.layers(params, rows, key):
            for capture in linears:
                if capture.recipe.quantized:
                    # `site` is a static field: with an empty one, linears of the same shape and recipe share a program.
                    stats = jax.device_get(self._judge(dataclasses.replace(capture, site="")))
                    linear = {"layer": layer, "site": capture.site, "recipe": capture.recipe.name}
                    entries += [{**linear, "gemm": g, **{k: float(v) for k, v in s.items()}} for g, s in stats.items()]
        order = {"fprop": 0, "dgrad": 1, "wgrad": 2}
        return sorted(entries, key=lambda g: (g["site"], order.get(g["gemm"], 3), g["layer"]))

    def bits(self, seed: int, step: int) -> dict[str, Any]:
        """Compare the random streams of this step, of its second microbatch and of the next step."""
        keys = {"step +0": microbatch_key(seed, step), "step +1": microbatch_key(seed, step + 1)}
        if self.accumulates:
            keys["step +0, second microbatch"] = microbatch_key(seed, step, 1)
        return self._bits.run(keys)


class JsonlObserver:
    """Observer of a run that appends its results to a JSONL file, with one program for each policy."""

    def __init__(self, every: int, file: Path):
        self.every, self._file = every, file
        self._programs: dict[ResolvedPolicy, Any] = {}

    def _program(self, moment: StepSnapshot, make: Callable[[TrainConfig, ResolvedPolicy, Any], Any]) -> Any:
        if moment.resolved not in self._programs:
            self._programs[moment.resolved] = make(moment.config, moment.resolved, moment.mesh)
        return self._programs[moment.resolved]

    def _write(self, row: dict[str, Any]) -> None:
        if jax.process_index() == 0:
            append_row(self._file, row)


class Radar(JsonlObserver):
    """Observer that probes the GEMMs of a run and writes radar.jsonl."""

    def __init__(self, every: int, directory: Path):
        super().__init__(every, directory / RADAR_FILE)

    def observe(self, moment: StepSnapshot) -> list[str]:
        """Run a probe. Returns a line for the log, and one per alarm."""
        if not has_quantized_gemms(moment.resolved):
            return []
        probe: RadarProbe = self._program(moment, RadarProbe)
        seed, finished = moment.config.rounding_seed, moment.step - 1
        try:
            gemms, alarms = judge_gemms(probe.gemms(moment.params, moment.batch, microbatch_key(seed, finished)))
        except ValueError as error:  # e.g. a backend that supports the whole batch, but not part of it
            self._write({"step": moment.step, "gemms": [], "bits": None, "alarms": [], "not_judged": str(error)})
            return [f"radar before step {moment.step}: NOT JUDGED, {error}"]
        bits = probe.bits(seed, finished)
        if bits["alarm"]:
            alarms.append(
                f"random bits: {' and '.join(bits['between'])} share them (correlation {bits['largest']:.2f})"
            )
        self._write({"step": moment.step, "gemms": gemms, "bits": bits, "alarms": alarms})
        return [log_line(moment.step, gemms, alarms), *(f"RADAR ALARM: {alarm}" for alarm in alarms)]


def draw_streams(cfg: LlamaConfig, ctx: ModelContext, key: jax.Array) -> dict[tuple[int, str, str], jax.Array]:
    """Returns (first layer of its segment, site, stream) -> uint8 [layers, *STREAM_SHAPE], the bytes of each random
    stream under a step's key, drawn with the words that the model derives for its linears."""
    streams: dict[tuple[int, str, str], jax.Array] = {}
    for segment in layer_segments(cfg, ctx):
        layers = jnp.arange(segment.start, segment.stop, dtype=jnp.int32)
        for site, words in stream_words_of_layers(key, segment.recipes, layers).items():
            draw = functools.partial(_draw_linear, segment.recipes[f"layers/{site}"], words)
            drawn = jax.vmap(draw)(jnp.arange(len(layers), dtype=jnp.int32))
            streams |= {(segment.start, site, stream): sample for stream, sample in drawn.items()}
    return streams


def _draw_linear(recipe: Recipe, words: Any, index: jax.Array) -> dict[str, jax.Array]:
    """Returns the bytes of each random stream of the linear in layer `index`; with experts, of the first ones."""
    (linear,) = stream_words_of_layer({"": words}, index).values()
    policies = recipe.operands()
    roles = [role for role, policy in policies.items() if policy.uses_random_bits]
    gemms = [gemm for gemm, pair in GEMM_ROLES.items() if any(policies[role].uses_random_signs for role in pair)]
    keys = {"": linear}
    if not isinstance(linear, Mapping):  # experts derive their streams
        keys = {f"expert {expert} ": jax.random.fold_in(linear, expert) for expert in range(EXPERTS_COMPARED)}
    streams = {f"{name}{role}": role_key(key, role) for name, key in keys.items() for role in roles}
    streams |= {f"{name}{gemm} signs": signs_key(key, gemm) for name, key in keys.items() for gemm in gemms}
    return {name: random_bytes(key, STREAM_SHAPE) for name, key in streams.items()}


def _normal_bound(rate: float) -> float:
    """Returns the bound that the absolute value of a standard normal variable exceeds with probability `rate`."""
    return -NormalDist().inv_cdf(rate / 2)


def has_quantized_gemms(resolved: ResolvedPolicy) -> bool:
    return any(r.quantized for segment in resolved.segments for r in segment.recipes.values())


def replay_context(config: TrainConfig, resolved: ResolvedPolicy, mesh: Any) -> ModelContext:
    """Returns the step's context for a replay: layers in a loop, no rematerialization, and no mesh if it has one
    device."""
    context = train_step.make_model_context(config, resolved, mesh, None)
    is_single_device = mesh is None or mesh.size == 1
    return dataclasses.replace(context, mesh=None if is_single_device else mesh, remat="none", unroll=1)


def microbatch_key(seed: int, step: int, index: int = 0) -> jax.Array:
    """Returns the key of microbatch `index` of the step after `step` finished ones, as the train step derives it."""
    state = TrainState(jnp.int32(step), None, None, {"scale": jnp.float32(1)}, jnp.uint32(seed), None)
    return train_step.fold_in_microbatch(train_step.step_inputs(state)["key"], index)


def subsample_batch(batch: Mapping[str, Any], most: int = MAX_RADAR_TOKENS) -> dict[str, Any]:
    """Returns the first rows of a batch, or the first tokens of its first row: at most `most` tokens, in whole blocks.
    Returns the whole batch if no number of rows has whole blocks."""
    num_rows, length = next(iter(batch.values())).shape
    candidates = [rows for rows in range(1, min(most // length, num_rows) + 1) if rows * length % TOKEN_BLOCK_SIZE == 0]
    rows = 1 if length > most else max(candidates, default=num_rows)
    return {name: value[:rows, :most] for name, value in batch.items()}


def judge_gemms(gemms: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[str]]:
    """Returns (the GEMMs, each with `alarm`: it differs from its recipe; the alarms as text)."""
    correct = [g["error"] <= 1 and g["wrong"] == 0 and math.isfinite(g["gain"]) for g in gemms]  # NaN is an alarm
    judged = [{**gemm, "alarm": not is_correct} for gemm, is_correct in zip(gemms, correct, strict=True)]
    kinds = dict.fromkeys(gemm["gemm"] for gemm in judged)
    by_kind = {kind: [g for g in judged if g["gemm"] == kind] for kind in kinds}
    alarms = [_alarm(kind, kind_gemms) for kind, kind_gemms in by_kind.items() if any(g["alarm"] for g in kind_gemms)]
    return judged, alarms + [text for kind in kinds if (text := mean_gain_alarm(kind, by_kind[kind], len(kinds)))]


def mean_gain_alarm(kind: str, gemms: Sequence[Mapping[str, Any]], kinds: int = 1) -> str | None:
    """Returns the alarm if the mean gain of results against the recipe's is not 1, None if it is. GEMMs that have an
    alarm already are not counted.

    A gain is normal around 1 with `reference_gain_sd` (`gemm_accuracy.gain_against_reference`), and so is the mean. One
    of `kinds` means exceeds the bound in FALSE_ALARM_RATE of healthy probes, even if accumulators truncate by
    GAIN_TOLERANCE.
    """
    judged = [g for g in gemms if "reference_gain" in g and not g["alarm"]]
    if not judged:
        return None
    mean = math.fsum(g["reference_gain"] for g in judged) / len(judged)
    sd = math.sqrt(math.fsum(g["reference_gain_sd"] ** 2 for g in judged)) / len(judged)
    bound = GAIN_TOLERANCE + _normal_bound(FALSE_ALARM_RATE / kinds) * sd
    if abs(mean - 1) <= bound:
        return None
    return (
        f"{kind}: results of {len(judged)} GEMMs are {mean:.4f} times what {judged[0]['recipe']} gives in the mean, "
        f"where 1 +- {bound:.4f} is rounding"
    )


def _alarm(kind: str, gemms: Sequence[Mapping[str, Any]]) -> str:
    alarmed = sorted((g for g in gemms if g["alarm"]), key=lambda g: (-g["wrong"], -g["error"]))
    mean = {
        name: float(np.mean([g[name] for g in alarmed])) for name in ("gain", "snr_db", "recipe_gain", "recipe_snr_db")
    }
    layers = ", ".join(f"layer {g['layer']} {g['site']}" for g in alarmed[:MAX_LISTED_ALARMS])
    more = f" and {len(alarmed) - MAX_LISTED_ALARMS} more" if len(alarmed) > MAX_LISTED_ALARMS else ""
    worst = alarmed[0]
    codes = f"; {100 * worst['wrong']:.3g}% of an operand's numbers differ" if worst["wrong"] else ""
    return (
        f"{kind}: mean gain {mean['gain']:.4f} and {mean['snr_db']:.1f} dB of {len(alarmed)} of {len(gemms)} GEMMs, "
        f"where {worst['recipe']} gives {mean['recipe_gain']:.4f} and {mean['recipe_snr_db']:.1f} dB{codes}: "
        f"{layers}{more}"
    )


def log_line(step: int, gemms: Sequence[Mapping[str, Any]], alarms: Sequence[str]) -> str:
    """Returns the summary of a probe for the log."""
    gains = [gemm["gain"] for gemm in gemms]
    line = f"radar before step {step}: {len(gemms)} GEMMs, gains {min(gains):.3f} to {max(gains):.3f}"
    return line if alarms else f"{line}, each what its recipe gives, no alarm"
