"""Search for the fastest layout of a run on a cluster: bound all layouts by the analytic model, compile the best ones.

A layout is a mesh, a remat policy, the reduce dtype of gradients and, if the whole batch does not fit, a number of
microbatches; the global batch does not change. The analytic step is the lower bound of the time, because it models a
well placed program. Profiles are cached on disk, so that the next call continues a search that ran out of time.
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
EXPERT_AXIS_SIZES = (1, 4, 8, 16, 64)  # of the mesh axis `expert`, which shards stacks of experts
NEAR_BEST_FACTOR = 1.10  # layouts are compiled if their bound is within this factor of the best one
PIPELINES_WIN = 2_000  # tokens per GPU below which pipeline parallelism might be faster


@dataclasses.dataclass(frozen=True)
class LayoutCandidate:
    """A layout with its analytic bound and, if it was compiled, the outcome of its program."""

    config: TrainConfig
    bound: PlanOutcome
    is_near_best: bool = False
    """True if it is to be compiled."""
    compiled: PlanOutcome | None = None
    refused: str = ""
    """Why it could not be compiled or parsed."""

    @property
    def best_estimate(self) -> PlanOutcome:
        """Returns the compiled outcome if there is one, else the bound."""
        return self.compiled or self.bound

    @property
    def seconds(self) -> float:
        """Returns the step time of the best estimate."""
        return self.best_estimate.shared.seconds

    @property
    def bytes_needed(self) -> float:
        """Returns the bytes per device of the best estimate."""
        return self.best_estimate.step_profile.bytes_needed

    @property
    def estimate_note(self) -> str:
        """Returns how the figures were obtained, or why there are none from a program."""
        if self.compiled is None:
            return self.refused or ("bound, to be compiled" if self.is_near_best else "bound")
        return "compiled" if self.compiled.fits else "compiled, does not fit"

    @property
    def sort_key(self) -> tuple[bool, bool, float]:
        """Returns a key that sorts compiled layouts that fit first, then bounds, then layouts that do not work."""
        return self.estimate_note.startswith("compiled,") or bool(self.refused), self.compiled is None, self.seconds


def search_layouts(
    config: TrainConfig, cluster: ClusterModel, *, minutes: float, say: Callable[[str], None],
    read: Callable[..., StepProfile] = profile_step,
    kept: Callable[[TrainConfig, ClusterModel], bool] = is_profile_cached,
) -> list[LayoutCandidate]:  # fmt: skip
    """Returns the layouts that fit, the best first.

    The current layout and all that are near the best bound are compiled. No compilation is started that would exceed
    `minutes` if it takes as long as the longest one so far. Cached profiles (`kept`) are always read.
    """
    candidates = [estimate_analytically(layout, cluster) for layout in enumerate_layouts(config, cluster)]
    fitting = sorted((c for c in candidates if c is not None), key=lambda c: c.seconds)
    say(f"{len(candidates)} layouts, {len(fitting)} of which fit by shapes")
    fitting = [
        dataclasses.replace(
            c, is_near_best=c.seconds <= NEAR_BEST_FACTOR * fitting[0].seconds or is_current_layout(c.config, config)
        )
        for c in fitting
    ]
    if not can_compile():
        return fitting
    start, longest = time.monotonic(), 0.0
    order = sorted(
        (index for index, c in enumerate(fitting) if c.is_near_best),
        key=lambda index: not is_current_layout(fitting[index].config, config),
    )
    for count, index in enumerate(order, 1):
        before = time.monotonic()
        if not kept(fitting[index].config, cluster) and before + longest - start > 60 * minutes:
            continue
        say(f"layout {count} of {len(order)}, {(before - start) / 60:.1f} of {minutes:g} minutes")
        fitting[index] = estimate_by_compiling(fitting[index], cluster, lambda config: read(config, cluster, say=say))
        longest = max(longest, time.monotonic() - before)
    return sorted(fitting, key=lambda c: c.sort_key)


def estimate_analytically(config: TrainConfig, cluster: ClusterModel) -> LayoutCandidate | None:
    """Returns the candidate with the fewest microbatches that fit, or None if none fit.

    More microbatches send more bytes and save no FLOPs.
    """
    shards = batch_shards(parse_mesh(config.mesh))
    for count in (config.accumulate, *(n for n in MICROBATCHES if n > config.accumulate)):
        if config.batch % (shards * count) == 0:
            split_config = dataclasses.replace(config, accumulate=count)
            profile = profile_from_config(split_config, cluster)
            if SEARCH_MARGIN * profile.bytes_needed <= cluster.usable_bytes:
                return LayoutCandidate(split_config, evaluate_plan(split_config, cluster, profile))
    return None


def estimate_by_compiling(
    candidate: LayoutCandidate, cluster: ClusterModel, read_profile: Callable[[TrainConfig], StepProfile]
) -> LayoutCandidate:
    """Returns the candidate with its compiled outcome, or with an error in `refused`, so that the search continues."""
    try:
        return dataclasses.replace(
            candidate, compiled=evaluate_plan(candidate.config, cluster, read_profile(candidate.config))
        )
    except (ValueError, jax.errors.JaxRuntimeError) as error:
        return dataclasses.replace(candidate, refused=f"refused: {str(error).splitlines()[0][:160]}")


def enumerate_layouts(config: TrainConfig, cluster: ClusterModel) -> Iterator[TrainConfig]:
    """Yields every mesh that `train` accepts, with every remat policy and reduce dtype, and the current layout.

    Axis sizes are powers of two; the number of replicas may also have the odd factor of a rack.
    """
    racks, seen = cluster.count // cluster.rack, False
    for tensor in (size for size in (1, 2, 4, 8) if cluster.rack % size == 0):
        inner = cluster.rack // tensor
        odd = inner // (inner & -inner)
        for across in ("data", "fsdp") if racks > 1 else ("data",):
            copies = dict.fromkeys(part * size for part in (1, odd) for size in (1, 2, 4, 8))
            for data, expert in itertools.product(copies, EXPERT_AXIS_SIZES if config.model.experts else (1,)):
                if inner % (data * expert):
                    continue
                inside = {"data": data, "fsdp": inner // data // expert, "expert": expert, "tensor": tensor}
                meshed = dataclasses.replace(config, mesh=mesh_to_text({f"{DCN}{across}": racks, **inside}))
                if layout_error(meshed, cluster):
                    continue
                for remat, reduced in itertools.product(REMAT_CHOICES, REDUCE_DTYPES):
                    precision = dataclasses.replace(config.precision, reduce_dtype=reduced)
                    layout = dataclasses.replace(meshed, remat=remat, precision=precision)
                    seen |= is_current_layout(layout, config)
                    yield layout
    if not seen:
        yield config


def is_current_layout(config: TrainConfig, current: TrainConfig) -> bool:
    """Returns True if `config` has the layout of `current`, except for the number of microbatches."""
    layout_config, current_config = (dataclasses.replace(layout, accumulate=1) for layout in (config, current))
    return layout_config == current_config


def pareto_front(candidates: Sequence[LayoutCandidate]) -> list[LayoutCandidate]:
    """Returns the candidates that no other beats in both time and memory: compiled ones if there are any, else all."""
    programs = [c for c in candidates if c.estimate_note == "compiled"] or candidates
    points = {(c.seconds, c.bytes_needed) for c in programs}
    beaten = {(s, b) for s, b in points if any(o <= s and m <= b and (o, m) != (s, b) for o, m in points)}
    return [c for c in programs if (c.seconds, c.bytes_needed) not in beaten]


def rank_of_current(config: TrainConfig, candidates: Sequence[LayoutCandidate]) -> int | None:
    """Returns the rank of the current layout, counted from 1; None if it does not fit."""
    return next((rank for rank, c in enumerate(candidates, 1) if is_current_layout(c.config, config)), None)


def coverage(candidates: Sequence[LayoutCandidate]) -> dict[str, int]:
    """Returns how many candidates were compiled, and how many others their bound does not rule out."""
    programs = [c.seconds for c in candidates if c.estimate_note == "compiled"]
    others = [c.seconds for c in candidates if not (c.is_near_best or c.compiled or c.refused)]
    return {
        "fitting": len(candidates),
        "near": sum(c.is_near_best for c in candidates),
        "compiled": sum(c.compiled is not None for c in candidates),
        "ranked": len(programs),
        "refused": sum(bool(c.refused) for c in candidates),
        "near_not_compiled": sum(c.is_near_best and c.compiled is None for c in candidates),
        "not_ruled_out": sum(bound < min(programs, default=float("inf")) for bound in others),
    }


def command(config: TrainConfig, run: Sequence[str]) -> str:
    """Returns the `halfbyte train` command of a layout. `run` is the list of arguments that select the run."""
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


def pipeline_parallelism_note(config: TrainConfig, cluster: ClusterModel) -> str:
    """Returns a note on whether pipeline parallelism, which this package does not have, would be faster."""
    tokens = config.batch * config.seq / cluster.count
    verdict = "might win" if tokens < PIPELINES_WIN else "would not win"
    limit = f"{PIPELINES_WIN:,}"
    return f"{tokens:,.0f} tokens a GPU: pipeline parallelism, which Halfbyte does not have, {verdict} (under {limit})"
