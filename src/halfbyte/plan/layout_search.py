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

from halfbyte.sharding import format_mesh, parse_mesh
from halfbyte.sharding.hybrid import DCN
from halfbyte.train import TrainConfig

from .cluster import Cluster, batch_shards
from .outcome import FRACTION, Outcome, outcome
from .reading import Reading, by_hand, can_compile, has_read, reading

REMAT: tuple[Literal["quantized", "full", "none"], ...] = ("quantized", "full", "none")
REDUCED: tuple[Literal["float32", "bfloat16"], ...] = ("float32", "bfloat16")
MICROBATCHES = (1, 2, 4, 8)
EXPERT = (1, 4, 8, 16, 64)  # sizes of the axis that cuts stacks of experts
NEAR = 1.10  # of the best by the bound: these are compiled
PIPELINES_WIN = 2_000  # tokens a GPU under which they might; we have none
SPARE = 1.15  # programs need more than shapes say


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A layout, by the bound and, if it was compiled, by its program."""

    config: TrainConfig
    bound: Outcome
    near: bool = False
    """Whether it is worth compiling."""
    compiled: Outcome | None = None
    refused: str = ""
    """Why it could not be compiled or read."""

    @property
    def known(self) -> Outcome:
        """The better knowledge."""
        return self.compiled or self.bound

    @property
    def seconds(self) -> float:
        """Of a step, by the better knowledge."""
        return self.known.shared.seconds

    @property
    def bytes_needed(self) -> float:
        """Of a device, by the better knowledge."""
        return self.known.reading.bytes_needed

    @property
    def known_from(self) -> str:
        """What a reader must know of these figures."""
        if self.compiled is None:
            return self.refused or ("bound, to be compiled" if self.near else "bound")
        return "compiled" if self.compiled.fits else "compiled, does not fit"

    @property
    def order(self) -> tuple[bool, bool, float]:
        """Programs that fit, then bounds, then what does not work."""
        return self.known_from.startswith("compiled,") or bool(self.refused), self.compiled is None, self.seconds


def search(
    config: TrainConfig, on: Cluster, *, minutes: float, say: Callable[[str], None],
    read: Callable[..., Reading] = reading, kept: Callable[[TrainConfig, Cluster], bool] = has_read,
) -> list[Candidate]:  # fmt: skip
    """Layouts that fit, the best first. The run's own and all near the best by the bound are compiled, as far as
    `minutes` go: none is begun that would last longer than what is left, by the longest so far.
    """
    found = [by_bound(each, on) for each in layouts(config, on)]
    fitting = sorted((c for c in found if c is not None), key=lambda c: c.seconds)
    say(f"{len(found)} layouts, {len(fitting)} of which fit by shapes")
    fitting = [
        dataclasses.replace(c, near=c.seconds <= NEAR * fitting[0].seconds or is_own(c.config, config)) for c in fitting
    ]
    if not can_compile():
        return fitting
    begun, longest = time.monotonic(), 0.0
    chosen = sorted(
        (at for at, c in enumerate(fitting) if c.near), key=lambda at: not is_own(fitting[at].config, config)
    )
    for count, at in enumerate(chosen, 1):
        before = time.monotonic()
        if not kept(fitting[at].config, on) and before + longest - begun > 60 * minutes:
            continue
        say(f"layout {count} of {len(chosen)}, {(before - begun) / 60:.1f} of {minutes:g} minutes")
        fitting[at] = by_program(fitting[at], on, lambda config: read(config, on, say=say))
        longest = max(longest, time.monotonic() - before)
    return sorted(fitting, key=lambda c: c.order)


def by_bound(config: TrainConfig, on: Cluster) -> Candidate | None:
    """With as few microbatches as fit: more have more to send and nothing less to compute. None if none do."""
    limit = FRACTION[on.count == 1] * (on.device.memory_bytes or 0)
    shards = batch_shards(parse_mesh(config.mesh))
    for count in (config.accumulate, *(n for n in MICROBATCHES if n > config.accumulate)):
        if config.batch % (shards * count) == 0:
            tried = dataclasses.replace(config, accumulate=count)
            read = by_hand(tried, on)
            if SPARE * read.bytes_needed <= limit:
                return Candidate(tried, outcome(tried, on, read))
    return None


def by_program(found: Candidate, on: Cluster, read: Callable[[TrainConfig], Reading]) -> Candidate:
    """What its program says, or why there is none: one layout that fails does not end a search."""
    try:
        return dataclasses.replace(found, compiled=outcome(found.config, on, read(found.config)))
    except (ValueError, jax.errors.JaxRuntimeError) as error:
        return dataclasses.replace(found, refused=f"refused: {str(error).splitlines()[0][:160]}")


def layouts(config: TrainConfig, on: Cluster) -> Iterator[TrainConfig]:
    """Every mesh of powers of two whose parts divide the model and the batch, with every remat and reduction; and the
    run's own.
    """
    racks, seen = on.count // on.rack, False
    for tensor in (1, 2, 4, 8):
        inner = on.rack // tensor
        if on.rack % tensor or config.model.kv_heads % tensor or config.batch % (racks * inner * config.accumulate):
            continue
        for across in ("data", "fsdp") if racks > 1 else ("data",):
            for data, expert in itertools.product((1, 2, 4, 8), EXPERT if config.model.experts else (1,)):
                if inner % (data * expert):
                    continue
                inside = {"data": data, "fsdp": inner // data // expert, "expert": expert, "tensor": tensor}
                shape = {f"{DCN}{across}": racks, **inside}
                for remat, reduced in itertools.product(REMAT, REDUCED):
                    precision = dataclasses.replace(config.precision, reduce_dtype=reduced)
                    each = dataclasses.replace(config, mesh=format_mesh(shape), remat=remat, precision=precision)
                    seen |= is_own(each, config)
                    yield each
    if not seen:
        yield config


def is_own(config: TrainConfig, own: TrainConfig) -> bool:
    """Whether `config` is laid out as `own`, microbatches aside."""
    mine, other = (dataclasses.replace(each, accumulate=1) for each in (config, own))
    return mine == other


def front(found: Sequence[Candidate]) -> list[Candidate]:
    """Those that no other beats in both speed and memory: programs if any was compiled, else bounds."""
    programs = [c for c in found if c.known_from == "compiled"] or found
    places = {(c.seconds, c.bytes_needed) for c in programs}
    beaten = {(s, b) for s, b in places if any(o <= s and m <= b and (o, m) != (s, b) for o, m in places)}
    return [c for c in programs if (c.seconds, c.bytes_needed) not in beaten]


def rank(config: TrainConfig, found: Sequence[Candidate]) -> int | None:
    """The place of the run's own layout, from 1; None if it does not fit."""
    return next((at for at, c in enumerate(found, 1) if is_own(c.config, config)), None)


def coverage(found: Sequence[Candidate]) -> dict[str, int]:
    """How much of `found` is known from programs, and how many others their bound does not rule out."""
    programs = [c.seconds for c in found if c.known_from == "compiled"]
    others = [c.seconds for c in found if c.compiled is None and not c.refused]
    return {
        "fitting": len(found),
        "near": sum(c.near for c in found),
        "compiled": sum(c.compiled is not None for c in found),
        "refused": sum(bool(c.refused) for c in found),
        "near_not_compiled": sum(c.near and c.compiled is None for c in found),
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


def pipelines(config: TrainConfig, on: Cluster) -> str:
    """Whether pipeline parallelism, which we do not have, would win."""
    tokens = config.batch * config.seq / on.count
    may = "might win" if tokens < PIPELINES_WIN else "would not win"
    limit = f"{PIPELINES_WIN:,}"
    return f"{tokens:,.0f} tokens a GPU: pipeline parallelism, which Halfbyte does not have, {may} (under {limit})"
