"""Which layout of a run is best on a cluster: all that fit by the analytic model, those near the best compiled.

A layout is a mesh, what remat keeps, the type that gradients are summed in and, where the whole batch does not fit, a
number of microbatches; the global batch stays. The analytic step is the bound: no program of ours is faster than one
that is placed well. Every reading is kept, so that a search that ran out of time goes on at its next call.
"""

import dataclasses
import itertools
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import jax

from halfbyte.distributed import mesh_to_text, parse_mesh
from halfbyte.distributed.mesh import DCN
from halfbyte.plan.cluster_model import ClusterModel, batch_shards, layout_error
from halfbyte.plan.compiled_step import StepProfile, can_compile, is_profile_cached, profile_from_config, profile_step
from halfbyte.plan.plan_outcome import SEARCH_MARGIN, PlanOutcome, evaluate_plan
from halfbyte.train import TrainConfig

REMAT_CHOICES: tuple[Literal["quantized", "full", "none"], ...] = ("quantized", "full", "none")
REDUCE_DTYPES: tuple[Literal["float32", "bfloat16"], ...] = ("float32", "bfloat16")
MICROBATCHES = (1, 2, 4, 8)
EXPERT_AXIS_SIZES = (1, 4, 8, 16, 64)  # sizes of the axis that cuts stacks of experts
NEAR_BEST_FACTOR = 1.10  # of the best by the bound: these are compiled
PIPELINES_WIN = 2_000  # tokens a GPU under which they might; we have none


@dataclasses.dataclass(frozen=True)
class LayoutCandidate:
    """A layout, by the bound and, if it was compiled, by its program."""

    config: TrainConfig
    bound: PlanOutcome
    is_near_best: bool = False
    """Whether it is worth compiling."""
    compiled: PlanOutcome | None = None
    refused: str = ""
    """Why it could not be compiled or read."""

    @property
    def best_estimate(self) -> PlanOutcome:
        """The better knowledge."""
        return self.compiled or self.bound

    @property
    def seconds(self) -> float:
        """Of a step, by the better knowledge."""
        return self.best_estimate.shared.seconds

    @property
    def bytes_needed(self) -> float:
        """Of a device, by the better knowledge."""
        return self.best_estimate.step_profile.bytes_needed

    @property
    def estimate_note(self) -> str:
        """What a reader must know of these figures."""
        if self.compiled is None:
            return self.refused or ("bound, to be compiled" if self.is_near_best else "bound")
        return "compiled" if self.compiled.fits else "compiled, does not fit"

    @property
    def sort_key(self) -> tuple[bool, bool, float]:
        """Programs that fit, then bounds, then what does not work."""
        return self.estimate_note.startswith("compiled,") or bool(self.refused), self.compiled is None, self.seconds


def search_layouts(
    config: TrainConfig, on: ClusterModel, *, minutes: float, say: Callable[[str], None],
    read: Callable[..., StepProfile] = profile_step,
    kept: Callable[[TrainConfig, ClusterModel], bool] = is_profile_cached,
) -> list[LayoutCandidate]:  # fmt: skip
    """Layouts that fit, the best first. The run's own and all near the best by the bound are compiled, as far as
    `minutes` go: none is begun that would last longer than what is left, by the longest so far.
    """
    found = [estimate_analytically(each, on) for each in enumerate_layouts(config, on)]
    fitting = sorted((c for c in found if c is not None), key=lambda c: c.seconds)
    say(f"{len(found)} layouts, {len(fitting)} of which fit by shapes")
    fitting = [
        dataclasses.replace(
            c, is_near_best=c.seconds <= NEAR_BEST_FACTOR * fitting[0].seconds or is_current_layout(c.config, config)
        )
        for c in fitting
    ]
    if not can_compile():
        return fitting
    begun, longest = time.monotonic(), 0.0
    chosen = sorted(
        (at for at, c in enumerate(fitting) if c.is_near_best),
        key=lambda at: not is_current_layout(fitting[at].config, config),
    )
    for count, at in enumerate(chosen, 1):
        before = time.monotonic()
        if not kept(fitting[at].config, on) and before + longest - begun > 60 * minutes:
            continue
        say(f"layout {count} of {len(chosen)}, {(before - begun) / 60:.1f} of {minutes:g} minutes")
        fitting[at] = estimate_by_compiling(fitting[at], on, lambda config: read(config, on, say=say))
        longest = max(longest, time.monotonic() - before)
    return sorted(fitting, key=lambda c: c.sort_key)


def estimate_analytically(config: TrainConfig, on: ClusterModel) -> LayoutCandidate | None:
    """With as few microbatches as fit: more have more to send and nothing less to compute. None if none do."""
    shards = batch_shards(parse_mesh(config.mesh))
    for count in (config.accumulate, *(n for n in MICROBATCHES if n > config.accumulate)):
        if config.batch % (shards * count) == 0:
            tried = dataclasses.replace(config, accumulate=count)
            read = profile_from_config(tried, on)
            if SEARCH_MARGIN * read.bytes_needed <= on.usable_bytes:
                return LayoutCandidate(tried, evaluate_plan(tried, on, read))
    return None


def estimate_by_compiling(
    found: LayoutCandidate, on: ClusterModel, read: Callable[[TrainConfig], StepProfile]
) -> LayoutCandidate:
    """What its program says, or why there is none: one layout that fails does not end a search."""
    try:
        return dataclasses.replace(found, compiled=evaluate_plan(found.config, on, read(found.config)))
    except (ValueError, jax.errors.JaxRuntimeError) as error:
        return dataclasses.replace(found, refused=f"refused: {str(error).splitlines()[0][:160]}")


def enumerate_layouts(config: TrainConfig, on: ClusterModel) -> Iterator[TrainConfig]:
    """Every mesh that `train` accepts of powers of two, and of the odd part of a rack as copies, with every remat and
    reduction; and the run's own.
    """
    racks, seen = on.count // on.rack, False
    for tensor in (size for size in (1, 2, 4, 8) if on.rack % size == 0):
        inner = on.rack // tensor
        odd = inner // (inner & -inner)
        for across in ("data", "fsdp") if racks > 1 else ("data",):
            copies = dict.fromkeys(part * size for part in (1, odd) for size in (1, 2, 4, 8))
            for data, expert in itertools.product(copies, EXPERT_AXIS_SIZES if config.model.experts else (1,)):
                if inner % (data * expert):
                    continue
                inside = {"data": data, "fsdp": inner // data // expert, "expert": expert, "tensor": tensor}
                laid = dataclasses.replace(config, mesh=mesh_to_text({f"{DCN}{across}": racks, **inside}))
                if layout_error(laid, on):
                    continue
                for remat, reduced in itertools.product(REMAT_CHOICES, REDUCE_DTYPES):
                    precision = dataclasses.replace(config.precision, reduce_dtype=reduced)
                    each = dataclasses.replace(laid, remat=remat, precision=precision)
                    seen |= is_current_layout(each, config)
                    yield each
    if not seen:
        yield config


def is_current_layout(config: TrainConfig, own: TrainConfig) -> bool:
    """Whether `config` is laid out as `own`, microbatches aside."""
    mine, other = (dataclasses.replace(each, accumulate=1) for each in (config, own))
    return mine == other


def pareto_front(found: Sequence[LayoutCandidate]) -> list[LayoutCandidate]:
    """Those that no other beats in both speed and memory: programs if any was compiled, else bounds."""
    programs = [c for c in found if c.estimate_note == "compiled"] or found
    places = {(c.seconds, c.bytes_needed) for c in programs}
    beaten = {(s, b) for s, b in places if any(o <= s and m <= b and (o, m) != (s, b) for o, m in places)}
    return [c for c in programs if (c.seconds, c.bytes_needed) not in beaten]


def rank_of_current(config: TrainConfig, found: Sequence[LayoutCandidate]) -> int | None:
    """The place of the run's own layout, from 1; None if it does not fit."""
    return next((at for at, c in enumerate(found, 1) if is_current_layout(c.config, config)), None)


def coverage(found: Sequence[LayoutCandidate]) -> dict[str, int]:
    """How much of `found` is known from programs, and how many others their bound does not rule out."""
    programs = [c.seconds for c in found if c.estimate_note == "compiled"]
    others = [c.seconds for c in found if c.compiled is None and not c.refused]
    return {
        "fitting": len(found),
        "near": sum(c.is_near_best for c in found),
        "compiled": sum(c.compiled is not None for c in found),
        "ranked": len(programs),
        "refused": sum(bool(c.refused) for c in found),
        "near_not_compiled": sum(c.is_near_best and c.compiled is None for c in found),
        "not_ruled_out": sum(bound < min(programs, default=float("inf")) for bound in others),
    }


def command(config: TrainConfig, run: Sequence[str]) -> str:
    """The layout as one would type it; `run`: words by which `halfbyte train` knows the run that was laid out."""
    flags = {
        "--recipe": config.recipe,
        "--policy": config.policy,
        "--mesh": config.mesh,
        "--batch": config.batch,
        "--seq": config.seq,
        "--accumulate": config.accumulate,
        "--remat": config.remat,
        "--precision.reduce-dtype": config.precision.reduce_dtype,
        "--schedule-by": config.schedule_by,
    }
    return shlex.join(["halfbyte", "train", *run, *(str(word) for pair in flags.items() for word in pair)])


def pipeline_parallelism_note(config: TrainConfig, on: ClusterModel) -> str:
    """Whether pipeline parallelism, which we do not have, would win."""
    tokens = config.batch * config.seq / on.count
    may = "might win" if tokens < PIPELINES_WIN else "would not win"
    limit = f"{PIPELINES_WIN:,}"
    return f"{tokens:,.0f} tokens a GPU: pipeline parallelism, which Halfbyte does not have, {may} (under {limit})"
