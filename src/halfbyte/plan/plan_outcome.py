"""Outcome of a plan for one recipe: memory, FLOPs, collectives, step time with error band, and the budget of a run.

`run_budget` gives days, cost and energy to N tokens. `break_even_overhead` says whether a faster step that needs more
tokens is a gain.
"""

import contextlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from halfbyte import models
from halfbyte.devices.device_table import TDP_WATTS
from halfbyte.distributed import parse_mesh
from halfbyte.io import read_json
from halfbyte.io.install_command import install_command
from halfbyte.plan.analytic_step import analytic_memory
from halfbyte.plan.cluster_model import (
    GROUPED_PREFIX,
    ClusterModel,
    DeviceRates,
    batch_shards,
    make_cluster,
    place_run,
)
from halfbyte.plan.compiled_step import StepProfile, can_compile, profile_from_config
from halfbyte.plan.rate_calibration import FITTED_RATES, ZERO_OPERAND_SPEEDUP, error_band, is_blackwell, worst_fit_error
from halfbyte.plan.simulator import StepEvent, Timeline, event_seconds, iter_events, simulate_step
from halfbyte.plan.step_placement import balanced_expert_load
from halfbyte.recipes import recipe
from halfbyte.study.arms import BASELINE
from halfbyte.train import TrainConfig

GIB = 2**30
SEARCH_MARGIN = 1.15  # programs need more than shapes say
GEMM_EXCESS_LIMIT = 1.02  # FLOPs multiplied for each that is needed: more is an error
MOST_SHOWN = 10
UNITS = {"": 1, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
DAY = 86_400
ANALYTIC = "nothing was compiled, an analytic model answers"


@dataclass(frozen=True)
class PlanOutcome:
    """One recipe on one cluster."""

    config: TrainConfig
    cluster: ClusterModel
    step_profile: StepProfile
    rates: DeviceRates
    shared: Timeline
    queued: Timeline
    assumed: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        return self.step_profile.bytes_needed <= self.cluster.usable_bytes

    @property
    def band(self) -> float:
        """Relative error that published steps do not exceed: more where a part of the layout or routing is assumed."""
        return error_band(self.cluster.device, known=not self.assumed and not self.config.model.experts)

    @property
    def compute(self) -> float:
        """Seconds of a step that waits for nothing."""
        return self.shared.seconds - self.shared.exposed_communication

    @property
    def mock_seconds(self) -> float | None:
        """What `bench --mock-gpus` would measure: nothing is waited for, and GEMMs multiply zeros. None where nobody
        has measured how much faster those are.
        """
        if is_blackwell(self.cluster.device):
            return None
        alone = simulate_step(self.step_profile.events, replace(self.rates, gains=ZERO_OPERAND_SPEEDUP), queued=False)
        return alone.seconds - alone.exposed_communication

    def tflops(self, seconds: float) -> float:
        """TFLOP/s of a device, as MaxText counts FLOPs."""
        return self.tokens * models.flops_per_token(self.config.model, self.config.seq) / seconds / 1e12

    @property
    def tokens(self) -> float:
        """Tokens of a step and device."""
        return self.config.batch * self.config.seq / self.cluster.count

    @property
    def mfu(self) -> float:
        """Of the dense peaks of the formats that multiply, each for its FLOPs."""
        peaks = self.cluster.device.gemm_peaks
        ideal = sum(
            times * each.flops / peaks.get(each.format.removeprefix(GROUPED_PREFIX), peaks["bf16"])
            for each, times in iter_events(self.step_profile.events)
            if each.what in ("gemm", "attention")
        )
        return ideal / self.shared.seconds


def evaluate_plan(
    config: TrainConfig, on: ClusterModel, found: StepProfile, *, assumed: Sequence[str] = ()
) -> PlanOutcome:
    """The step of `found`, simulated."""
    rates = FITTED_RATES.rates(on.device)
    shared, queued = (simulate_step(found.events, rates, queued=way) for way in (False, True))
    return PlanOutcome(config, on, found, rates, shared, queued, tuple(assumed))


def problems(found: PlanOutcome) -> Iterator[str]:
    """What is wrong with the program, or does not fit."""
    read = found.step_profile
    if not found.fits:
        yield memory_shortfall(found)
    remade = read.remade_flops / read.needed_flops
    multiplied = (read.gemm_flops - read.filling_flops) / read.needed_flops - remade
    if found.fits and remade > GEMM_EXCESS_LIMIT - 1:
        knob = "" if found.config.remat == "full" else "--remat full, or "
        yield f"for want of memory XLA multiplies {remade:.0%} of the FLOPs again; take {knob}a smaller --batch"
    if multiplied > GEMM_EXCESS_LIMIT:
        where = found.config.mesh or "one device"
        yield (
            f"GEMMs multiply {multiplied:.3f}x of the FLOPs that are needed: it is misplaced on {where}; take another "
            "--mesh or --batch"
        )
    if read.native != read.native_expected:
        yield f"{read.native} FP4 GEMMs a step run natively, and the manifest says {read.native_expected}"


def memory_shortfall(found: PlanOutcome) -> str:
    """By how much, and which knob helps most."""
    config, memory, limit = found.config, found.step_profile.memory, found.cluster.usable_bytes
    over = found.step_profile.bytes_needed - limit
    halves = config.batch % (2 * batch_shards(parse_mesh(config.mesh)) * config.accumulate) == 0
    knobs = {
        "--remat full": memory["residuals"] * (0.7 if config.remat != "full" else 0.0),
        f"--batch {config.batch // 2}": (memory["residuals"] + memory["activations"]) / 2 if halves else 0.0,
        "--optimizer.mu-dtype bfloat16 --optimizer.nu-dtype bfloat16": memory["optimizer"] / 2,
    }
    enough = [knob for knob, saved in knobs.items() if saved >= over]
    best = enough[0] if enough else max(knobs, key=lambda knob: knobs[knob])
    partly = "" if enough else ", which is not enough alone"
    return (
        f"does not fit: {found.step_profile.bytes_needed / GIB:.1f} GiB per device, {limit / GIB:.1f} GiB usable, "
        f"{over / GIB:.1f} GiB too much; {best} saves about {knobs[best] / GIB:.0f} GiB{partly}{_smallest_count(found)}"
    )


def _smallest_count(found: PlanOutcome) -> str:
    """Returns the remedy of more devices: the fewest on which shapes fit, with one sequence each and full remat."""
    device = found.cluster.device

    def fits(config: TrainConfig, count: int) -> bool:
        usable = replace(found.cluster, count=count).usable_bytes
        return SEARCH_MARGIN * sum(analytic_memory(config).values()) <= usable

    embed = found.config.model.embed  # the dim that FSDP shards
    for count in (size for size in range(found.cluster.count + 1, embed + 1) if embed % size == 0):
        lean = replace(found.config, remat="full", mesh=f"fsdp={count}", batch=count * found.config.accumulate)
        if fits(lean, count):  # as far as memory goes: is there a cluster of so many, and a mesh over all of them?
            with contextlib.suppress(ValueError):
                placed, _ = place_run(lean, make_cluster(device, count))
                if fits(placed, count):
                    return f"; by shapes --count {count} --batch {placed.batch} --remat full is the least that fits"
    return "; by shapes FSDP alone fits no larger --count, cut layers with --mesh ...,tensor=4"


def plan_remarks(found: PlanOutcome) -> Iterator[str]:
    """What a reader must know beside the figures."""
    if not found.step_profile.compiled and not can_compile():
        yield f"{ANALYTIC}, for want of the compiler plugin ({install_command('plan')})"
    elif not found.step_profile.compiled:
        yield f"{ANALYTIC}: every program of this run needs more memory than a device has"
    elif found.config.remat != "full":
        yield from _leaner_remat(found)
    if found.config.model.experts:
        yield from expert_assumptions(found)
    elif is_fp4_emulated(found.config, found.step_profile):
        yield f"{found.config.recipe} on {found.cluster.device.name} is emulated: no speed-up is predicted; fp8 is"
    elif (more := found.step_profile.filling_flops / found.step_profile.needed_flops) > GEMM_EXCESS_LIMIT - 1:
        yield (
            f"block-scaled GEMMs multiply whole tiles of 128 rows: sizes of this model that are no multiple of 128 "
            f"make {more:.0%} more FLOPs than it needs"
        )
    yield from found.assumed


def _leaner_remat(found: PlanOutcome) -> Iterator[str]:
    """Full remat, where the analytic step, which no program beats, does not rule out that it is faster."""
    config, own = replace(found.config, remat="full"), found.step_profile
    lean = evaluate_plan(config, found.cluster, profile_from_config(config, found.cluster))
    saved = sum(analytic_memory(found.config).values()) - lean.step_profile.bytes_needed
    if lean.shared.seconds < found.shared.seconds:
        yield (
            f"--remat full may be faster: an analytic step takes {lean.shared.seconds:.3f} s, this one "
            f"{found.shared.seconds:.3f} s and about {saved / GIB:.0f} of {own.bytes_needed / GIB:.0f} GiB more"
        )


def expert_assumptions(found: PlanOutcome) -> Iterator[str]:
    """What a plan of experts is counted from."""
    more = balanced_expert_load(found.config, found.cluster.count).filled - 1
    yield f"an even load of all experts is assumed; tiles that are not full make their rows {more:.1%} more"
    if any(each.format == f"{GROUPED_PREFIX}fp4" for each, _ in iter_events(found.step_profile.events)):
        rate = found.rates.achieved_flops(f"{GROUPED_PREFIX}fp4") / 1e12
        yield (
            f"experts are multiplied in FP4 by a kernel that no card has run; it is counted at {rate:,.0f} TFLOP/s, "
            "the rate of dense FP4 GEMMs"
        )
        return
    yield "experts are multiplied in bfloat16, in which codes of every recipe are exact: no GEMM is faster"
    if is_blackwell(found.cluster.device):
        yield "experts' tiles are multiplied one after another, each by a GEMM of XLA's: a step is not faster than this"


def is_fp4_emulated(config: TrainConfig, read: StepProfile) -> bool:
    """Whether the recipe asks for 4-bit GEMMs, and the device has none of them."""
    found = [policy.format.element for policy in recipe(config.recipe).operands().values()]
    return any(element and element.bits == 4 for element in found) and not read.native_expected


def outcome_to_json(found: PlanOutcome, others: Sequence[PlanOutcome]) -> dict[str, Any]:
    """The entry of one recipe."""
    read, seconds = found.step_profile, found.shared.seconds
    tflops = found.tflops(seconds)
    return {
        "fits": found.fits,
        "memory": {**read.memory, "total": read.bytes_needed, "limit": found.cluster.usable_bytes},
        "native_fp4_gemms": read.native,
        "native_fp4_gemms_expected": read.native_expected,
        "gemm_flops": read.gemm_flops,
        "gemm_flops_needed": read.needed_flops,
        "gemms": flops_by_linear(read),
        "collectives": collective_table(found),
        "operand_bytes": read.operand_bytes,
        "operand_bytes_compulsory": read.compulsory,
        "bytes_by_purpose": bytes_by_purpose(read),
        "step_time_s": seconds,
        "step_time_queued_s": found.queued.seconds,
        "compute_time_s": found.compute,
        "mocked_time_s": found.mock_seconds,
        "tflops_per_device": tflops,
        "tflops_per_device_queued": found.tflops(found.queued.seconds),
        "tokens_per_s_per_device": found.tokens / seconds,
        "mfu": found.mfu,
        "exposed_communication_s": found.shared.exposed_communication,
        "exposed_communication_queued_s": found.queued.exposed_communication,
        "speedup_vs": {other.config.recipe: other.shared.seconds / seconds for other in others if other is not found},
        "band": {"relative": found.band, "tflops_per_device": [tflops * (1 - found.band), tflops * (1 + found.band)]},
        "calibration_residual": worst_fit_error(found.cluster.device),
        "most_expensive": longest_events(found),
        "compiled": read.compiled,
        "mesh": found.config.mesh,
        "batch": found.config.batch,
        "remat": found.config.remat,
        "policy": found.config.policy,
        "problems": list(problems(found)),
        "remarks": list(plan_remarks(found)),
    }


def flops_by_linear(read: StepProfile) -> list[dict[str, Any]]:
    """FLOPs of a step by linears and format."""
    total: Counter[tuple[str, str]] = Counter()
    calls: Counter[tuple[str, str]] = Counter()
    for each, times in iter_events(read.events):
        if each.what == "gemm":
            total[each.purpose, each.format] += int(times * each.flops)
            calls[each.purpose, each.format] += times
    return [
        {"site": name, "format": format, "calls": calls[name, format], "flops": flops}
        for (name, format), flops in total.most_common()
    ]


def bytes_by_purpose(read: StepProfile) -> dict[str, float]:
    """Bytes of a step that no GEMM, attention or collective moves."""
    total: Counter[str] = Counter()
    for each, times in iter_events(read.events):
        if each.what == "pass":
            total[each.purpose] += int(times * each.moved)
    return dict(total.most_common())


def collective_table(found: PlanOutcome) -> list[dict[str, Any]]:
    """What travels in a step, the longest first; equal ones together."""
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for each, times, beside in _collective_overlaps(found.step_profile.events, 1):
        seconds, link = found.rates.collective_seconds(each.format, each.moved, each.inner, each.outer)
        key = (each.format, each.axes, each.dtypes, link, each.asynchronous, each.source)
        row = rows.setdefault(key, {
            "kind": each.format, "axes": list(each.axes), "dtypes": list(each.dtypes), "link": link,
            "asynchronous": each.asynchronous, "source": each.source, "times": 0, "bytes": 0.0, "seconds": 0.0,
            "hidden_by": Counter(),
        })  # fmt: skip
        row["times"] += times
        row["bytes"] += times * each.moved
        row["seconds"] += times * seconds
        for event in beside:
            row["hidden_by"][event.purpose] += times * event_seconds(event, found.rates)
    for row in rows.values():
        row["hidden_by"] = [name for name, _ in row["hidden_by"].most_common(3)]
    return sorted(rows.values(), key=lambda row: -row["seconds"])


def _collective_overlaps(events: Sequence[StepEvent], times: int) -> Iterator[tuple[StepEvent, int, list[StepEvent]]]:
    """(collective, how often, what computes between its start and its end)."""
    for at, each in enumerate(events):
        if each.what == "loop":
            yield from _collective_overlaps(each.body, times * each.times)
        elif each.what == "send":
            end = next(
                (i for i in range(at, len(events)) if (events[i].what, events[i].name) == ("wait", each.name)), at
            )
            inside = [e for e, _ in iter_events(events[at + 1 : end]) if e.what in ("gemm", "attention", "pass")]
            yield each, times, inside


def longest_events(found: PlanOutcome) -> list[dict[str, Any]]:
    """The ten things that take longest, by what they are for and the line that they came from."""
    total: defaultdict[tuple[str, str, str], float] = defaultdict(float)
    for each, times in iter_events(found.step_profile.events):
        if each.what in ("gemm", "attention", "pass"):
            name = f"{each.what} {each.format}".strip()
            total[name, each.purpose, each.source] += times * event_seconds(each, found.rates)
    total["exposed communication", "communication", ""] = found.shared.exposed_communication
    ranked = sorted(total.items(), key=lambda item: item[1], reverse=True)
    return [
        {"what": what, "purpose": purpose, "source": source, "seconds": seconds}
        for (what, purpose, source), seconds in ranked[:MOST_SHOWN]
    ]


def parse_tokens(text: str) -> float:
    """`15T`, `300B` or a plain number."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([KMBT]?)", text.strip().upper())
    if found is None or float(found[1]) <= 0:
        raise ValueError(f"tokens: {text!r} is not a number of tokens; write 15T, 300B or 1000000")
    return float(found[1]) * UNITS[found[2]]


def run_budget(found: PlanOutcome, *, tokens: float, price: float, overhead: float | None = None) -> dict[str, Any]:
    """Days, cost (None without a price) and energy of the GPUs to `tokens`, and `overhead` (a part of them, where it is
    known) more."""
    tokens *= 1 + (overhead or 0.0)
    seconds = tokens / (found.tokens / found.shared.seconds) / found.cluster.count
    cost = seconds / 3600 * found.cluster.count * price if price else None
    return {
        "tokens": tokens,
        "token_overhead": overhead,
        "days": seconds / DAY,
        "days_band": [seconds / DAY / (1 + found.band), seconds / DAY / (1 - found.band)],
        "cost": cost,
        "percent_of_step_time_is_worth": cost / 100 if cost else None,
        "megawatt_hours_at_most": seconds / 3600 * found.cluster.count * TDP_WATTS[found.cluster.device.name] / 1e6,
    }


def token_overheads(report: Path) -> dict[tuple[str, str], float]:
    """(recipe, policy) -> token overhead (a part) over the baseline of a parity report, which itself has none. Left out
    is an arm that changes more than these two, and one of which a seed ended above the baseline's whole curve: it needs
    more than any figure says. ValueError if nothing is left."""
    found = read_json(report)
    try:
        base = found["plan"]["base"]
        arms = [arm for arm in found["arms"] if arm["changes"].keys() <= {"recipe", "policy"}]
        places = [
            (a["changes"].get("recipe", base["recipe"]), a["changes"].get("policy", base["policy"])) for a in arms
        ]
        known = {place: _overhead(arm) for place, arm in zip(places, arms, strict=True)}
    except (KeyError, TypeError, AttributeError):
        raise ValueError(f"parity: {report} is no report.json of `halfbyte parity`") from None
    if not any(known.values()):
        raise ValueError(
            f"parity: {report} holds no arm with a token overhead: that takes three validations in a run, and a loss "
            "that the baseline had before its end"
        )
    return {place: value for place, value in known.items() if value is not None}


def _overhead(arm: Mapping[str, Any]) -> float | None:
    if arm["kind"] == BASELINE:
        return 0.0
    found = arm["token_overhead"]
    return None if found is None or found["mean"] is None or found["above"] else found["mean"] / 100


def overhead_of(config: TrainConfig, known: Mapping[tuple[str, str], float]) -> float | None:
    """That of the arm with this recipe and policy; None if there is none."""
    return known.get((recipe(config.recipe).name, config.policy))


def break_even_overhead(
    found: PlanOutcome, others: Sequence[PlanOutcome], known: Mapping[tuple[str, str], float]
) -> list[dict[str, Any]]:
    """Against each other recipe: how many more tokens the faster step may need, and whether it stays under that, if
    the study had both."""
    rows = []
    for other in others:
        if other is found:
            continue
        allowed = other.shared.seconds / found.shared.seconds - 1
        mine, theirs = (overhead_of(each.config, known) for each in (found, other))
        needs = None if mine is None or theirs is None else (1 + mine) / (1 + theirs) - 1
        rows.append({
            "against": other.config.recipe, "may_need_more_tokens": allowed, "needs_more_tokens": needs,
            "gain": None if needs is None else needs < allowed,
        })  # fmt: skip
    return rows
