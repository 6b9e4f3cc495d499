"""Which layout of a run is best on a cluster: all that fit by the analytic model, the best of them compiled.

A layout is a mesh, what remat keeps, and the type that gradients are summed in; the global batch stays. The analytic
step is the bound: no program of ours is faster than one that is placed well.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence

from halfbyte.sharding import format_mesh
from halfbyte.sharding.hybrid import DCN
from halfbyte.train import TrainConfig

from .cluster import Cluster
from .outcome import FRACTION, Outcome, outcome
from .reading import Reading, by_hand, can_compile, reading

REMAT = ("quantized", "full", "none")
REDUCED = ("float32", "bfloat16")
NEAR = 1.10  # of the best by the bound: these are worth compiling
PIPELINES_WIN = 2_000  # tokens a GPU under which they might; we have none
SPARE = 1.15  # programs need more than shapes say


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A layout, by the bound and, if it was compiled, by its program."""

    config: TrainConfig
    bound: Outcome
    compiled: Outcome | None = None

    @property
    def seconds(self) -> float:
        """Of a step, by the better knowledge."""
        return (self.compiled or self.bound).shared.seconds

    @property
    def bytes_needed(self) -> float:
        """Of a device, by the better knowledge."""
        return (self.compiled or self.bound).reading.bytes_needed


def search(
    config: TrainConfig, on: Cluster, *, most: int, say: Callable[[str], None], read: Callable[..., Reading] = reading
) -> list[Candidate]:
    """Layouts that fit, the fastest first. Of those near the best by the bound, `most` are compiled, and the run's own
    layout always.
    """
    found = [Candidate(each, outcome(each, on, by_hand(each, on))) for each in layouts(config, on)]
    limit = FRACTION[on.count == 1] * (on.device.memory_bytes or 0)
    fitting = sorted((c for c in found if SPARE * c.bytes_needed <= limit), key=lambda c: c.seconds)
    say(f"{len(found)} layouts, {len(fitting)} of which fit by shapes")
    if not fitting:
        return []
    near = [c for c in fitting if c.seconds <= NEAR * fitting[0].seconds][:most]
    own = [c for c in fitting if _layout(c.config) == _layout(config) and all(c is not each for each in near)]
    chosen = [*near, *own] if can_compile() else []
    done = {id(c): dataclasses.replace(c, compiled=outcome(c.config, on, read(c.config, on, say=say))) for c in chosen}
    ready = [done.get(id(c), c) for c in fitting]
    return sorted(ready, key=lambda c: (c.compiled is None and bool(done), c.seconds))


def layouts(config: TrainConfig, on: Cluster) -> Iterator[TrainConfig]:
    """Every mesh of powers of two whose parts divide the model and the batch, with every remat and reduction."""
    racks = on.count // on.rack
    for tensor in (1, 2, 4, 8):
        if on.rack % tensor or config.model.kv_heads % tensor:
            continue
        inner = on.rack // tensor
        for across in ("data", "fsdp") if racks > 1 else ("data",):
            for data in (size for size in (1, 2, 4, 8) if inner % size == 0):
                shape = {f"{DCN}{across}": racks, "data": data, "fsdp": inner // data, "tensor": tensor}
                if config.batch % (racks * inner * config.accumulate):
                    continue
                yield from _with_choices(dataclasses.replace(config, mesh=format_mesh(shape)))


def _with_choices(config: TrainConfig) -> Iterator[TrainConfig]:
    for remat, reduced in itertools.product(REMAT, REDUCED):
        precision = dataclasses.replace(config.precision, reduce_dtype=reduced)  # type: ignore[arg-type]
        yield dataclasses.replace(config, remat=remat, precision=precision)  # type: ignore[arg-type]


def _layout(config: TrainConfig) -> tuple[str, str, str]:
    return config.mesh, config.remat, str(config.precision.reduce_dtype)


def front(found: Sequence[Candidate]) -> list[Candidate]:
    """Those that no other beats in both speed and memory."""
    return [
        c for c in found
        if not any(o.seconds <= c.seconds and o.bytes_needed < c.bytes_needed for o in found if o is not c)
    ]  # fmt: skip


def rank(config: TrainConfig, found: Sequence[Candidate]) -> int | None:
    """The place of the run's own layout, from 1; None if it does not fit."""
    return next((at for at, c in enumerate(found, 1) if _layout(c.config) == _layout(config)), None)


def command(config: TrainConfig) -> str:
    """The layout as one would train it."""
    return (
        f"halfbyte train {config.name} --recipe {config.recipe} --policy {config.policy} --mesh {config.mesh} --batch "
        f"{config.batch} --remat {config.remat} --precision.reduce-dtype {config.precision.reduce_dtype}"
    )


def pipelines(config: TrainConfig, on: Cluster) -> str:
    """Whether pipeline parallelism, which we do not have, would win."""
    tokens = config.batch * config.seq / on.count
    may = "might win" if tokens < PIPELINES_WIN else "would not win"
    limit = f"{PIPELINES_WIN:,}"
    return f"{tokens:,.0f} tokens a GPU: pipeline parallelism, which Halfbyte does not have, {may} (under {limit})"
