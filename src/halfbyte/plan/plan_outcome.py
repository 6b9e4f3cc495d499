"""Outcome of a plan for one recipe: memory, FLOPs, collectives, step time with error band, and the budget of a run.

`run_budget` returns days, cost and energy for N tokens. `break_even_overhead` decides whether a faster step that needs
more tokens is a gain.
"""

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from halfbyte import models
from halfbyte.devices.device_table import TDP_WATTS
from halfbyte.distributed import mesh_to_text, parse_mesh
from halfbyte.distributed.mesh import DCN
from halfbyte.io import read_json
from halfbyte.io.install_command import install_command
from halfbyte.plan.analytic_step import analytic_memory
from halfbyte.plan.cluster_model import (
    GROUPED_PREFIX,
    ClusterModel,
    DeviceRates,
    batch_shards,
    layout_error,
    make_cluster,
    place_run,
)
from halfbyte.plan.compiled_step import StepProfile, can_compile, profile_from_config
from halfbyte.plan.rate_calibration import FITTED_RATES, ZERO_OPERAND_SPEEDUP, error_band, is_blackwell
from halfbyte.plan.simulator import Timeline, iter_events, simulate_step
from halfbyte.plan.step_placement import balanced_expert_load
from halfbyte.recipes import recipe
from halfbyte.study.arms import BASELINE
from halfbyte.train import TrainConfig

GIB = 2**30
SEARCH_MARGIN = 1.15  # compiled programs need more memory than `analytic_memory`
GEMM_EXCESS_LIMIT = 1.02  # GEMM FLOPs over needed ones: more is an error
UNITS = {"": 1, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
DAY = 86_400
ANALYTIC = "nothing was compiled, an analytic model answers"


@dataclass(frozen=True)
class PlanOutcome:
    """Profile and simulated step of one recipe on one cluster."""

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
        """Returns the relative error that published steps stay within; larger if layout or expert load is assumed."""
        return error_band(self.cluster.device, known=not self.assumed and not self.config.model.experts)

    @property
    def compute(self) -> float:
        """Returns the seconds of a step without exposed communication."""
        return self.shared.seconds - self.shared.exposed_communication

    @property
    def mock_seconds(self) -> float | None:
        """Returns the step time of `bench --mock-gpus`: no communication, GEMMs of zeros. None on Blackwell, where
        their speedup was not measured.
        """
        if is_blackwell(self.cluster.device):
            return None
        mock = simulate_step(self.step_profile.events, replace(self.rates, gains=ZERO_OPERAND_SPEEDUP), queued=False)
        return mock.seconds - mock.exposed_communication

    def tflops(self, seconds: float) -> float:
        """Returns TFLOP/s per device for a step of `seconds`, with FLOPs counted as in MaxText."""
        return self.tokens * models.flops_per_token(self.config.model, self.config.seq) / seconds / 1e12

    @property
    def tokens(self) -> float:
        """Returns the tokens per step and device."""
        return self.config.batch * self.config.seq / self.cluster.count

    @property
    def mfu(self) -> float:
        """Returns the MFU: time of all GEMM and attention FLOPs at the dense peaks of their formats over step time."""
        peaks = self.cluster.device.gemm_peaks
        ideal = sum(
            times * event.flops / peaks.get(event.format.removeprefix(GROUPED_PREFIX), peaks["bf16"])
            for event, times in iter_events(self.step_profile.events)
            if event.what in ("gemm", "attention")
        )
        return ideal / self.shared.seconds


def evaluate_plan(
    config: TrainConfig, cluster: ClusterModel, profile: StepProfile, *, assumed: Sequence[str] = ()
) -> PlanOutcome:
    """Simulate the step of `profile` with shared and with queued links."""
    rates = FITTED_RATES.rates(cluster.device)
    shared, queued = (simulate_step(profile.events, rates, queued=in_order) for in_order in (False, True))
    return PlanOutcome(config, cluster, profile, rates, shared, queued, tuple(assumed))


def problems(plan: PlanOutcome) -> Iterator[str]:
    """Yields what is wrong with the program: memory, GEMM FLOPs and native FP4 GEMMs."""
    profile = plan.step_profile
    if not plan.fits:
        yield memory_shortfall(plan)
    remat_excess = profile.remade_flops / profile.needed_flops
    gemm_excess = (profile.gemm_flops - profile.filling_flops) / profile.needed_flops - remat_excess
    if plan.fits and remat_excess > GEMM_EXCESS_LIMIT - 1:
        option = "" if plan.config.remat == "full" else "--remat full, or "
        yield f"for want of memory XLA multiplies {remat_excess:.0%} of the FLOPs again; take {option}a smaller --batch"
    if gemm_excess > GEMM_EXCESS_LIMIT:
        mesh = plan.config.mesh or "one device"
        yield (
            f"GEMMs multiply {gemm_excess:.3f}x of the FLOPs that are needed: it is misplaced on {mesh}; take another "
            "--mesh or --batch"
        )
    if profile.native != profile.native_expected:
        yield f"{profile.native} FP4 GEMMs a step run natively, and the manifest says {profile.native_expected}"


def memory_shortfall(plan: PlanOutcome) -> str:
    """Returns by how many bytes the step does not fit, and the option that saves most."""
    config, memory, limit = plan.config, plan.step_profile.memory, plan.cluster.usable_bytes
    excess = plan.step_profile.bytes_needed - limit
    can_halve = config.batch % (2 * batch_shards(parse_mesh(config.mesh)) * config.accumulate) == 0
    savings = {
        "--remat full": memory["residuals"] * (0.7 if config.remat != "full" else 0.0),
        f"--batch {config.batch // 2}": (memory["residuals"] + memory["activations"]) / 2 if can_halve else 0.0,
        "--optimizer.mu-dtype bfloat16 --optimizer.nu-dtype bfloat16": memory["optimizer"] / 2,
    }
    sufficient = [option for option, saving in savings.items() if saving >= excess]
    best = sufficient[0] if sufficient else max(savings, key=lambda option: savings[option])
    caveat = "" if sufficient else ", which is not enough alone"
    return (
        f"does not fit: {plan.step_profile.bytes_needed / GIB:.1f} GiB per device, {limit / GIB:.1f} GiB usable, "
        f"{excess / GIB:.1f} GiB too much; {best} saves about {savings[best] / GIB:.0f} GiB"
        f"{caveat}{_smallest_count(plan)}"
    )


def _smallest_count(plan: PlanOutcome) -> str:
    """Returns the smallest larger cluster whose memory fits by shapes, with one sequence per device and full remat.

    If FSDP fits no count, returns a mesh of these devices with tensor parallelism that does.
    """
    cluster, device = plan.cluster, plan.cluster.device

    def fits(config: TrainConfig, count: int) -> bool:
        usable = replace(cluster, count=count).usable_bytes
        return SEARCH_MARGIN * sum(analytic_memory(config).values()) <= usable

    embed = plan.config.model.embed  # the dim that FSDP shards
    for count in (size for size in range(cluster.count + 1, embed + 1) if embed % size == 0):
        lean = replace(plan.config, remat="full", mesh=f"fsdp={count}", batch=count * plan.config.accumulate)
        if fits(lean, count):  # then there must also be a cluster of this size, and a mesh over all of it
            with contextlib.suppress(ValueError):
                placed, _ = place_run(lean, make_cluster(device, count))
                if fits(placed, count):
                    return f"; by shapes --count {count} --batch {placed.batch} --remat full is the next that fits"
    for tensor in (size for size in (2, 4, 8) if cluster.rack % size == 0):
        shape = {f"{DCN}fsdp": cluster.count // cluster.rack, "fsdp": cluster.rack // tensor, "tensor": tensor}
        sharded = replace(plan.config, remat="full", mesh=mesh_to_text(shape))
        if fits(sharded, cluster.count) and not layout_error(sharded, cluster):
            return f"; by shapes --mesh {sharded.mesh} --batch {sharded.batch} --remat full fits these devices"
    return "; by shapes FSDP alone fits no larger --count, nor do these with tensor; take more and --mesh ...,tensor=4"


def plan_remarks(plan: PlanOutcome) -> Iterator[str]:
    """Yields the assumptions and limits of the figures."""
    if not plan.step_profile.compiled and not can_compile():
        yield f"{ANALYTIC}, for want of the compiler plugin ({install_command('plan')})"
    elif not plan.step_profile.compiled:
        yield f"{ANALYTIC}: every program of this run needs more memory than a device has"
    elif plan.config.remat != "full":
        yield from _leaner_remat(plan)
    if plan.config.model.experts:
        yield from expert_assumptions(plan)
    elif is_fp4_emulated(plan.config, plan.step_profile):
        yield f"{plan.config.recipe} on {plan.cluster.device.name} is emulated: no speed-up is predicted; fp8 is"
    elif (padding := plan.step_profile.filling_flops / plan.step_profile.needed_flops) > GEMM_EXCESS_LIMIT - 1:
        yield (
            f"block-scaled GEMMs multiply whole tiles of 128 rows: sizes of this model that are no multiple of 128 "
            f"make {padding:.0%} more FLOPs than it needs"
        )
    yield from plan.assumed


def _leaner_remat(plan: PlanOutcome) -> Iterator[str]:
    """Yields a remark if the analytic step with full remat, which bounds any program, is faster than this step."""
    config, profile = replace(plan.config, remat="full"), plan.step_profile
    lean = evaluate_plan(config, plan.cluster, profile_from_config(config, plan.cluster))
    saving = sum(analytic_memory(plan.config).values()) - lean.step_profile.bytes_needed
    if lean.shared.seconds < plan.shared.seconds:
        yield (
            f"--remat full may be faster: an analytic step takes {lean.shared.seconds:.3f} s, this one "
            f"{plan.shared.seconds:.3f} s and about {saving / GIB:.0f} of {profile.bytes_needed / GIB:.0f} GiB more"
        )


def expert_assumptions(plan: PlanOutcome) -> Iterator[str]:
    """Yields the assumptions about expert load and expert GEMM rates."""
    padding = balanced_expert_load(plan.config, plan.cluster.count).filled - 1
    yield f"an even load of all experts is assumed; tiles that are not full make their rows {padding:.1%} more"
    if any(event.format == f"{GROUPED_PREFIX}fp4" for event, _ in iter_events(plan.step_profile.events)):
        rate = plan.rates.achieved_flops(f"{GROUPED_PREFIX}fp4") / 1e12
        yield (
            f"experts are multiplied in FP4 by a kernel that no card has run; it is counted at {rate:,.0f} TFLOP/s, "
            "the rate of dense FP4 GEMMs"
        )
        return
    yield "experts are multiplied in bfloat16, in which codes of every recipe are exact: no GEMM is faster"
    if is_blackwell(plan.cluster.device):
        yield "experts' tiles are multiplied one after another, each by a GEMM of XLA's: a step is not faster than this"


def is_fp4_emulated(config: TrainConfig, profile: StepProfile) -> bool:
    """Returns True if the recipe has 4-bit operands but no GEMM is expected to run natively in FP4."""
    formats = [policy.format.element for policy in recipe(config.recipe).operands().values()]
    return any(element and element.bits == 4 for element in formats) and not profile.native_expected


def parse_tokens(text: str) -> float:
    """Parse a number of tokens: `15T`, `300B` or a plain number."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([KMBT]?)", text.strip().upper())
    if match is None or float(match[1]) <= 0:
        raise ValueError(f"tokens: {text!r} is not a number of tokens; write 15T, 300B or 1000000")
    return float(match[1]) * UNITS[match[2]]


def run_budget(plan: PlanOutcome, *, tokens: float, price: float, overhead: float | None = None) -> dict[str, Any]:
    """Returns days, cost (`price` is per GPU hour; None without one) and energy for (1 + `overhead`) `tokens`."""
    tokens *= 1 + (overhead or 0.0)
    seconds = tokens / (plan.tokens / plan.shared.seconds) / plan.cluster.count
    cost = seconds / 3600 * plan.cluster.count * price if price else None
    return {
        "tokens": tokens,
        "token_overhead": overhead,
        "days": seconds / DAY,
        "days_band": [seconds / DAY / (1 + plan.band), seconds / DAY / (1 - plan.band)],
        "cost": cost,
        "percent_of_step_time_is_worth": cost / 100 if cost else None,
        "megawatt_hours_at_most": seconds / 3600 * plan.cluster.count * TDP_WATTS[plan.cluster.device.name] / 1e6,
    }


def token_overheads(report: Path) -> dict[tuple[str, str], float]:
    """Returns (recipe, policy) -> token overhead over the baseline, as a fraction, from a parity report.

    The baseline has overhead 0. Arms that change anything else are left out, and arms of which a seed ended above the
    baseline's whole loss curve, because their overhead has no upper bound. Raises ValueError if no arm remains.
    """
    study = read_json(report)
    try:
        base = study["plan"]["base"]
        arms = [arm for arm in study["arms"] if arm["changes"].keys() <= {"recipe", "policy"}]
        keys = [(a["changes"].get("recipe", base["recipe"]), a["changes"].get("policy", base["policy"])) for a in arms]
        overheads = {key: _overhead(arm) for key, arm in zip(keys, arms, strict=True)}
    except (KeyError, TypeError, AttributeError):
        raise ValueError(f"parity: {report} is no report.json of `halfbyte parity`") from None
    if not any(overheads.values()):
        raise ValueError(
            f"parity: {report} holds no arm with a token overhead: that takes three validations in a run, and a loss "
            "that the baseline had before its end"
        )
    return {key: value for key, value in overheads.items() if value is not None}


def _overhead(arm: Mapping[str, Any]) -> float | None:
    if arm["kind"] == BASELINE:
        return 0.0
    overhead = arm["token_overhead"]
    return None if overhead is None or overhead["mean"] is None or overhead["above"] else overhead["mean"] / 100


def overhead_of(config: TrainConfig, known: Mapping[tuple[str, str], float]) -> float | None:
    """Returns the token overhead of the arm with this recipe and policy; None if there is none."""
    return known.get((recipe(config.recipe).name, config.policy))


def break_even_overhead(
    plan: PlanOutcome, others: Sequence[PlanOutcome], known: Mapping[tuple[str, str], float]
) -> list[dict[str, Any]]:
    """Returns per other recipe the token overhead at which this plan breaks even, and that of the study (or None)."""
    rows = []
    for other in others:
        if other is plan:
            continue
        allowed = other.shared.seconds / plan.shared.seconds - 1
        overhead, other_overhead = (overhead_of(entry.config, known) for entry in (plan, other))
        needed = None if overhead is None or other_overhead is None else (1 + overhead) / (1 + other_overhead) - 1
        rows.append({
            "against": other.config.recipe, "may_need_more_tokens": allowed, "needs_more_tokens": needed,
            "gain": None if needed is None else needed < allowed,
        })  # fmt: skip
    return rows
