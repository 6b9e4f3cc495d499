"""What a plan says of one recipe: does it fit, what does it multiply and send, how long does it take, and how sure."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from halfbyte import models
from halfbyte.bench.load import even_load
from halfbyte.recipe import recipe
from halfbyte.sharding import parse_mesh
from halfbyte.train import TrainConfig

from .calibration import BAND, FITTED, ZEROS, is_blackwell, residual
from .cluster import Cluster, batch_shards
from .rates import GROUPED, Rates
from .reading import Reading
from .schedule import Event, walk
from .simulate import Timeline, seconds_of, simulate

GIB = 2**30
EXCESS = 1.02  # FLOPs multiplied for each that is needed: more is an error
FRACTION = {True: 0.97, False: 0.92}  # of a device's memory that `train` lets XLA have: alone, and with others
MOST_SHOWN = 10


@dataclass(frozen=True)
class Outcome:
    """One recipe on one cluster."""

    config: TrainConfig
    on: Cluster
    reading: Reading
    rates: Rates
    shared: Timeline
    queued: Timeline
    assumed: tuple[str, ...] = ()

    @property
    def limit(self) -> float:
        """Bytes that a step may take."""
        return FRACTION[self.on.count == 1] * (self.on.device.memory_bytes or 0)

    @property
    def fits(self) -> bool:
        return self.reading.bytes_needed <= self.limit

    @property
    def compute(self) -> float:
        """Seconds of a step that waits for nothing."""
        return self.shared.seconds - self.shared.exposed

    @property
    def mocked(self) -> float | None:
        """What `bench --mock-gpus` would measure: nothing is waited for, and GEMMs multiply zeros. None where nobody
        has measured how much faster those are.
        """
        if is_blackwell(self.on.device):
            return None
        alone = simulate(self.reading.events, replace(self.rates, gains=ZEROS), queued=False)
        return alone.seconds - alone.exposed

    def tflops(self, seconds: float) -> float:
        """TFLOP/s of a device, as MaxText counts FLOPs."""
        return self.tokens * models.flops_per_token(self.config.model, self.config.seq) / seconds / 1e12

    @property
    def tokens(self) -> float:
        """Tokens of a step and device."""
        return self.config.batch * self.config.seq / self.on.count

    @property
    def mfu(self) -> float:
        """Of the dense peaks of the formats that multiply, each for its FLOPs."""
        peaks = self.on.device.gemm_peaks
        ideal = sum(
            times * each.flops / peaks.get(each.format.removeprefix(GROUPED), peaks["bf16"])
            for each, times in walk(self.reading.events)
            if each.what in ("gemm", "attention")
        )
        return ideal / self.shared.seconds


def outcome(config: TrainConfig, on: Cluster, found: Reading, *, assumed: Sequence[str] = ()) -> Outcome:
    """The step of `found`, simulated."""
    rates = FITTED.rates(on.device)
    shared, queued = (simulate(found.events, rates, queued=way) for way in (False, True))
    return Outcome(config, on, found, rates, shared, queued, tuple(assumed))


def problems(found: Outcome) -> Iterator[str]:
    """What is wrong with the program, or does not fit."""
    read = found.reading
    if not found.fits:
        yield does_not_fit(found)
    remade = read.remade_flops / read.needed_flops
    multiplied = (read.gemm_flops - read.filling_flops) / read.needed_flops - remade
    if found.fits and remade > EXCESS - 1:
        knob = "" if found.config.remat == "full" else "--remat full, or "
        yield f"for want of memory XLA multiplies {remade:.0%} of the FLOPs again; take {knob}a smaller --batch"
    if multiplied > EXCESS:
        where = found.config.mesh or "one device"
        yield (
            f"GEMMs multiply {multiplied:.3f}x of the FLOPs that are needed: it is misplaced on {where}; take another "
            "--mesh or --batch"
        )
    if read.native != read.native_expected:
        yield f"{read.native} FP4 GEMMs a step run natively, and the manifest says {read.native_expected}"


def does_not_fit(found: Outcome) -> str:
    """By how much, and which knob helps most."""
    memory, over = found.reading.memory, found.reading.bytes_needed - found.limit
    config = found.config
    halves = config.batch % (2 * batch_shards(parse_mesh(config.mesh)) * config.accumulate) == 0
    knobs = {
        "--remat full": memory["residuals"] * (0.7 if config.remat != "full" else 0.0),
        f"--batch {config.batch // 2}": (memory["residuals"] + memory["activations"]) / 2 if halves else 0.0,
        "--optimizer.mu-dtype bfloat16 --optimizer.nu-dtype bfloat16": memory["optimizer"] / 2,
        f"--count {2 * found.on.count}": (memory["weights"] + memory["optimizer"] + memory["gradients"]) / 2,
    }
    enough = [knob for knob, saved in knobs.items() if saved >= over]
    best = enough[0] if enough else max(knobs, key=lambda knob: knobs[knob])
    partly = "" if enough else ", which is not enough alone"
    return (
        f"does not fit: {found.reading.bytes_needed / GIB:.1f} GiB a device of {found.limit / GIB:.1f} that there are, "
        f"{over / GIB:.1f} GiB too much; {best} saves about {knobs[best] / GIB:.0f} GiB{partly}"
    )


def remarks(found: Outcome) -> Iterator[str]:
    """What a reader must know beside the figures."""
    if not found.reading.compiled:
        yield "not compiled, for want of the compiler plugin (pip install 'halfbyte[plan]'): an analytic model answers"
    if found.config.model.experts:
        yield from of_experts(found)
    elif emulated(found.config, found.reading):
        yield f"{found.config.recipe} on {found.on.device.name} is emulated: no speed-up is predicted; fp8 is"
    elif (more := found.reading.filling_flops / found.reading.needed_flops) > EXCESS - 1:
        yield (
            f"block-scaled GEMMs multiply whole tiles of 128 rows: sizes of this model that are no multiple of 128 "
            f"make {more:.0%} more FLOPs than it needs"
        )
    yield from found.assumed


def of_experts(found: Outcome) -> Iterator[str]:
    """What a plan of experts is counted from."""
    more = even_load(found.config, found.on.count).filled - 1
    yield f"an even load of all experts is assumed; tiles that are not full make their rows {more:.1%} more"
    if any(each.format == f"{GROUPED}fp4" for each, _ in walk(found.reading.events)):
        rate = found.rates.reached(f"{GROUPED}fp4") / 1e12
        yield (
            f"experts are multiplied in FP4 by a kernel that no card has run; it is counted at {rate:,.0f} TFLOP/s, "
            "the rate of dense FP4 GEMMs"
        )
        return
    yield "experts are multiplied in bfloat16, in which codes of every recipe are exact: no GEMM is faster"
    if is_blackwell(found.on.device):
        yield "experts' tiles are multiplied one after another, each by a GEMM of XLA's: a step is not faster than this"


def emulated(config: TrainConfig, read: Reading) -> bool:
    """Whether the recipe asks for 4-bit GEMMs, and the device has none of them."""
    found = [policy.format.element for policy in recipe(config.recipe).operands().values()]
    return any(element and element.bits == 4 for element in found) and not read.native_expected


def as_json(found: Outcome, others: Sequence[Outcome]) -> dict[str, Any]:
    """The entry of one recipe."""
    read, seconds = found.reading, found.shared.seconds
    tflops = found.tflops(seconds)
    return {
        "fits": found.fits,
        "memory": {**read.memory, "total": read.bytes_needed, "limit": found.limit},
        "native_fp4_gemms": read.native,
        "native_fp4_gemms_expected": read.native_expected,
        "gemm_flops": read.gemm_flops,
        "gemm_flops_needed": read.needed_flops,
        "gemms": gemm_sites(read),
        "collectives": collectives(found),
        "operand_bytes": read.operand_bytes,
        "operand_bytes_compulsory": read.compulsory,
        "bytes_by_purpose": bytes_by_purpose(read),
        "step_time_s": seconds,
        "step_time_queued_s": found.queued.seconds,
        "compute_time_s": found.compute,
        "mocked_time_s": found.mocked,
        "tflops_per_device": tflops,
        "tflops_per_device_queued": found.tflops(found.queued.seconds),
        "tokens_per_s_per_device": found.tokens / seconds,
        "mfu": found.mfu,
        "exposed_communication_s": found.shared.exposed,
        "exposed_communication_queued_s": found.queued.exposed,
        "speedup_vs": {other.config.recipe: other.shared.seconds / seconds for other in others if other is not found},
        "band": {"relative": BAND, "tflops_per_device": [tflops * (1 - BAND), tflops * (1 + BAND)]},
        "calibration_residual": residual(found.on.device),
        "most_expensive": most_expensive(found),
        "compiled": read.compiled,
        "mesh": found.config.mesh,
        "batch": found.config.batch,
        "remat": found.config.remat,
        "policy": found.config.policy,
        "problems": list(problems(found)),
        "remarks": list(remarks(found)),
    }


def gemm_sites(read: Reading) -> list[dict[str, Any]]:
    """FLOPs of a step by linears and format."""
    total: Counter[tuple[str, str]] = Counter()
    calls: Counter[tuple[str, str]] = Counter()
    for each, times in walk(read.events):
        if each.what == "gemm":
            total[each.purpose, each.format] += int(times * each.flops)
            calls[each.purpose, each.format] += times
    return [
        {"site": name, "format": format, "calls": calls[name, format], "flops": flops}
        for (name, format), flops in total.most_common()
    ]


def bytes_by_purpose(read: Reading) -> dict[str, float]:
    """Bytes of a step that no GEMM, attention or collective moves."""
    total: Counter[str] = Counter()
    for each, times in walk(read.events):
        if each.what == "pass":
            total[each.purpose] += int(times * each.moved)
    return dict(total.most_common())


def collectives(found: Outcome) -> list[dict[str, Any]]:
    """What travels in a step, the longest first; equal ones together."""
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for each, times, beside in _sends(found.reading.events, 1):
        seconds, link = found.rates.send(each.format, each.moved, each.inner, each.outer)
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
            row["hidden_by"][event.purpose] += times * seconds_of(event, found.rates)
    for row in rows.values():
        row["hidden_by"] = [name for name, _ in row["hidden_by"].most_common(3)]
    return sorted(rows.values(), key=lambda row: -row["seconds"])


def _sends(events: Sequence[Event], times: int) -> Iterator[tuple[Event, int, list[Event]]]:
    """(collective, how often, what computes between its start and its end)."""
    for at, each in enumerate(events):
        if each.what == "loop":
            yield from _sends(each.body, times * each.times)
        elif each.what == "send":
            end = next(
                (i for i in range(at, len(events)) if (events[i].what, events[i].name) == ("wait", each.name)), at
            )
            inside = [e for e, _ in walk(events[at + 1 : end]) if e.what in ("gemm", "attention", "pass")]
            yield each, times, inside


def most_expensive(found: Outcome) -> list[dict[str, Any]]:
    """The ten things that take longest, by what they are for and the line that they came from."""
    total: defaultdict[tuple[str, str, str], float] = defaultdict(float)
    for each, times in walk(found.reading.events):
        if each.what in ("gemm", "attention", "pass"):
            name = f"{each.what} {each.format}".strip()
            total[name, each.purpose, each.source] += times * seconds_of(each, found.rates)
    total["exposed communication", "communication", ""] = found.shared.exposed
    ranked = sorted(total.items(), key=lambda item: item[1], reverse=True)
    return [
        {"what": what, "purpose": purpose, "source": source, "seconds": seconds}
        for (what, purpose, source), seconds in ranked[:MOST_SHOWN]
    ]
