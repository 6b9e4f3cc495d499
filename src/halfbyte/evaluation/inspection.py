"""Inspect every GEMM operand of a run, recommend a policy, record telemetry, and render the results.

`inspect_step` (`halfbyte inspect`) replays a step layer by layer on real batches; of experts, the fullest.
`recommend_policy` finds the shortest list of layers or sites to keep in higher precision for a target SNR. `Telemetry`
writes the same statistics every N steps to telemetry.jsonl, from part of the step's own batch. `inspection_html` and
`inspection_table` show heat maps in a page and in a terminal.
"""

import contextlib
import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.table import Table
from rich.text import Text

from halfbyte import io, models
from halfbyte.evaluation.gemm_accuracy import gemm_error_stats
from halfbyte.evaluation.operand_stats import operand_stats, operand_stats_of_linear
from halfbyte.evaluation.radar import (
    JsonlObserver,
    has_quantized_gemms,
    microbatch_key,
    replay_context,
    subsample_batch,
)
from halfbyte.evaluation.reference_operands import ROLE_TENSOR_AXIS
from halfbyte.evaluation.step_replay import LinearCapture, StepReplay
from halfbyte.recipes import WEIGHT_ROLES, ResolvedPolicy, recipe
from halfbyte.train import TrainConfig
from halfbyte.train.train_state import StepSnapshot

LayerSite = tuple[int, str]
SMALL_MODEL_PARAMS = 20_000_000  # parameters, below which programs are compiled for longer than they run
SNR_FORMATS = ("own", "nvfp4", "nvfp4 2d", "nvfp4 hadamard", "mxfp4", "mxfp8", "fp8")
TELEMETRY_FILE = "telemetry.jsonl"
MAX_TELEMETRY_TOKENS = 512
WORST_ROWS = 12
BF16_NOTE = "in brackets: bf16 here, as nvfp4 would have it"
LOW, HIGH = 8.0, 22.0  # decibels between which cells are tinted
GemmSnr = Mapping[tuple[int, str, str], float]
RANGES = ("amax", "crest", "to zero", "saturated")
OPERANDS = ("layer", "linear", "operand", *RANGES, *(f"{way}, dB" for way in SNR_FORMATS), "scales")


@dataclasses.dataclass(frozen=True)
class Inspection:
    """Numbers by layer, site and operand, means over the batches; `gemms`: (layer, site, GEMM) -> signal to noise of
    its result in decibels, of those that are not among the `quantized` as nvfp4 would have it."""

    operands: list[dict[str, Any]]
    gemms: dict[tuple[int, str, str], float]
    quantized: frozenset[tuple[int, str]]
    batches: int
    step: int

    @property
    def snr(self) -> dict[tuple[int, str], float]:
        """(layer, site) -> decibels of its noisiest GEMM."""
        found: dict[tuple[int, str], float] = {}
        for (layer, site, _), value in self.gemms.items():
            found[layer, site] = min(value, found.get((layer, site), math.inf))
        return found

    def worst(self) -> list[tuple[int, str, str, float]]:
        """(layer, site, GEMM, decibels), the noisiest first."""
        return sorted(((*place, value) for place, value in self.gemms.items()), key=lambda row: row[3])

    def policy(self, text: str, wanted: float) -> str:
        """`text` with the shortest exceptions for `wanted` dB, as a --policy value."""
        return recommend_policy(self.snr, self.quantized, wanted=wanted, policy=text)


class Telemetry(JsonlObserver):
    """Writes telemetry.jsonl."""

    def __init__(self, every: int, directory: Path):
        super().__init__(every, directory / TELEMETRY_FILE)
        self.seconds = 0.0  # that it has taken

    def observe(self, moment: StepSnapshot) -> list[str]:
        """Write a line; say nothing, or why there is none."""
        if not has_quantized_gemms(moment.resolved):
            return []
        began = time.perf_counter()
        replay: StepReplay = self._program(moment, lambda run, *of: StepReplay(run.model, replay_context(run, *of)))
        batch = subsample_batch(moment.batch, MAX_TELEMETRY_TOKENS) if moment.mesh.size == 1 else moment.batch
        key = microbatch_key(moment.config.rounding_seed, moment.step - 1)
        try:
            operands = [
                summarise_operand(layer, given.site, role, [numbers])
                for layer, linears in replay.layers(moment.params, batch, key)
                for given in linears
                if given.recipe.quantized
                for role, numbers in jax.device_get(
                    operand_stats_of_linear(dataclasses.replace(given.for_fullest_expert(), site=""))
                ).items()
            ]
        except ValueError as reason:  # a recipe of which more than its GEMMs would have to be replayed
            return [f"telemetry before step {moment.step}: NOT SEEN, {reason}"]
        self._write({"step": moment.step, "operands": operands})
        self.seconds += time.perf_counter() - began
        return []


def recommend_policy(snr: Mapping[LayerSite, float], quantized: Set[LayerSite], *, wanted: float, policy: str) -> str:
    """A `--policy` value; the run's own if every linear reaches `wanted` decibels. `snr`: (layer, "mlp/down") -> dB of
    all linears, of which `quantized` are."""
    short = {site for site in quantized if not snr[site] >= wanted}
    if short and short == set(quantized):
        return "*=bf16"
    return "; ".join(
        [policy, *(f"{rule}=bf16" for rule in minimal_rules(short, set(snr), free=set(snr) - set(quantized)))]
    )


def minimal_rules(short: Set[LayerSite], everything: Set[LayerSite], free: Set[LayerSite] = frozenset()) -> list[str]:
    """Rules that name every site of `short`, and of the others only those in `free`; the rule that names most first."""
    left, rules = set(short), []
    fits = {rule: sites & short for rule, sites in _candidate_rules(everything) if sites <= short | free}
    while left:
        best = max(fits, key=lambda rule: (len(fits[rule] & left), -len(rule)))
        rules.append(best)
        left -= fits[best]
    return rules


def _candidate_rules(everything: Set[LayerSite]) -> Iterator[tuple[str, set[LayerSite]]]:
    """Every rule that could be written, and what it names."""
    layers = sorted({layer for layer, _ in everything})
    kinds = sorted({kind for _, kind in everything})
    groups = sorted({kind.split("/")[0] for kind in kinds})
    globs = {kind: {kind} for kind in kinds} | {f"{g}/*": {k for k in kinds if k.startswith(f"{g}/")} for g in groups}
    for first in layers:
        for last in layers[layers.index(first) :]:
            span = f"layers[{first}]" if first == last else f"layers[{first}:{last + 1}]"
            inside = {site for site in everything if first <= site[0] <= last}
            yield span, inside
            for glob, named in globs.items():
                yield f"{span}/{glob}", {site for site in inside if site[1] in named}
    for glob, named in globs.items():
        yield glob, {site for site in everything if site[1] in named}


@contextlib.contextmanager
def fast_compile_options(model: models.LlamaConfig) -> Iterator[None]:
    """Where compiling is nearly all of the time (a small model on a CPU), without what only makes programs fast."""
    before = jax.config.read("jax_disable_most_optimizations")
    soon = jax.default_backend() == "cpu" and models.count_params(model) < SMALL_MODEL_PARAMS
    jax.config.update("jax_disable_most_optimizations", before or soon)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)


def inspect_step(
    config: TrainConfig, resolved: ResolvedPolicy, params: Any, batches: Iterable[Any], *, step: int,
    say: Callable[[str], None] = lambda line: None, watch: Callable[[int, int], None] = lambda done, total: None,
) -> Inspection:  # fmt: skip
    """Replay one step on each batch and look at what its linears were given. `say` gets a line per layer, `watch` the
    number of linears done and of all."""
    replay = StepReplay(config.model, replay_context(config, resolved, None))
    sums: dict[tuple[int, str, str], list[dict[str, Any]]] = {}
    noises: dict[tuple[int, str, str], list[float]] = {}
    quantized: set[LayerSite] = set()
    shown, done = list(batches), itertools.count(1)
    visits = len(shown) * config.model.layers
    say(f"replaying a step of {config.model.layers} layers on {len(shown)} batches; programs are compiled first")
    begun = None  # after the first layer, which compiles what the others run
    for place, batch in enumerate(shown, 1):
        for layer, linears in replay.layers(params, subsample_batch(batch), microbatch_key(config.rounding_seed, step)):
            for given in linears:
                site, plain = given.site, dataclasses.replace(given.for_fullest_expert(), site="")
                quantized |= {(layer, site)} if given.recipe.quantized else set()
                tried = plain if given.recipe.quantized else dataclasses.replace(plain, recipe=recipe("nvfp4"))
                for gemm, numbers in gemm_error_stats(tried, backend=config.precision.backend).items():
                    noises.setdefault((layer, site, gemm), []).append(float(numbers["snr_db"]))
                for role, stats in _operand_stats_of_batch(given, plain, sums, layer).items():
                    sums.setdefault((layer, site, role), []).append(stats)
                watch(next(done), visits * len(linears))
                if begun is None:
                    say(f"batch 1, layer {layer}: {site}")
            layers_done = place * config.model.layers - layer
            begun = begun or (time.monotonic(), layers_done)
            left = _time_left(begun, layers_done, visits)
            say(f"batch {place} of {len(shown)}: layer {layer} seen, {layer} to go{left}")
    if not shown:
        raise ValueError("inspect was given no batch; --batches must be 1 or more")
    operands = [summarise_operand(layer, site, role, found) for (layer, site, role), found in sorted(sums.items())]
    gemms = {place: float(np.mean(values)) for place, values in noises.items()}
    return Inspection(operands, gemms, frozenset(quantized), len(shown), step)


def _operand_stats_of_batch(
    given: LinearCapture, plain: LinearCapture, sums: Mapping[tuple[int, str, str], list[dict[str, Any]]], layer: int
) -> dict[str, dict[str, Any]]:
    """Returns the statistics of each operand of a linear; those of weights from an earlier batch, which has the same
    (of experts, another one may be the fullest)."""
    earlier = {} if given.tiles is not None else {role: sums.get((layer, given.site, role)) for role in WEIGHT_ROLES}
    known = {role: stats[0] for role, stats in earlier.items() if stats}
    return operand_stats(plain, [role for role in ROLE_TENSOR_AXIS if role not in known]) | known


def _time_left(begun: tuple[float, int], done: int, total: int) -> str:
    """Returns ", about 40 s left" at the pace since `begun`: (clock, layers done by then)."""
    clock, first = begun
    if done in (first, total):
        return ""
    return f", about {(time.monotonic() - clock) / (done - first) * (total - done):.0f} s left"


def summarise_operand(layer: int, site: str, role: str, found: list[dict[str, Any]]) -> dict[str, Any]:
    """One operand's numbers as plain data, means over what was found in each batch."""
    means = [name for name in found[0] if name in ("crest", "zeros", "saturated")]
    numbers: dict[str, Any] = {name: float(np.mean([f[name] for f in found])) for name in means}
    snr = {way: float(np.mean([f["snr"][way] for f in found])) for way in found[0]["snr"]}
    codes = np.sum([f["scale_codes"] for f in found], axis=0) if "scale_codes" in found[0] else None
    return {
        "layer": layer,
        "site": site,
        "role": role,
        "tensor": ROLE_TENSOR_AXIS[role][0],
        "amax": float(max(f["amax"] for f in found)),
        **numbers,
        "snr": {way: None if math.isnan(value) else value for way, value in snr.items()},
        "scale_codes": None if codes is None else {int(code): int(codes[code]) for code in np.flatnonzero(codes)},
    }


def noise_shade(decibels: float | None) -> float:
    """1 for much noise, 0 for little."""
    return 0.0 if decibels is None else min(1.0, max(0.0, (HIGH - decibels) / (HIGH - LOW)))


def gemm_rows(gemms: GemmSnr) -> tuple[list[str], list[int], list[list[float | None]]]:
    """(site and GEMM, layers, decibels)."""
    layers = sorted({layer for layer, _, _ in gemms})
    rows = list(dict.fromkeys(f"{site} {gemm}" for _, site, gemm in sorted(gemms, key=lambda p: p[1:])))
    names = {(f"{site} {gemm}", layer): value for (layer, site, gemm), value in gemms.items()}
    return rows, layers, [[names.get((row, layer)) for layer in layers] for row in rows]


def noise_figure(gemms: GemmSnr, wanted: float) -> str:
    """The heat map."""
    rows, layers, values = gemm_rows(gemms)
    shade = [[noise_shade(value) for value in row] for row in values]
    alarms = [[value is not None and value < wanted for value in row] for row in values]
    drawn = io.heat_map(rows, [str(at) for at in layers], values, label="signal to noise by layer", shade=shade,
                          alarms=alarms, form="{:.1f}")  # fmt: skip
    note = (
        f"decibels, quantized result against bf16, of linears that stay in bf16 as nvfp4 would have it; red: below the "
        f"wanted {wanted:g} dB; columns are layers"
    )
    return io.figure("Signal to noise", drawn, note)


def noise_section(data: Mapping[str, Any]) -> str:
    """Returns the section that another page shows of the JSON of `halfbyte inspect`, empty if there is none."""
    gemms = {(gemm["layer"], gemm["site"], gemm["gemm"]): gemm["snr_db"] for gemm in data.get("gemms", ())}
    if not gemms:
        return ""
    return io.section(
        "Noise of every GEMM", noise_figure(gemms, data["wanted"]), io.code_block(f"--policy {data['policy']!r}")
    )


def inspection_html(found: Inspection, *, title: str, lines: list[str], policy: str, wanted: float) -> str:
    """The io."""
    worst = [(*row[:3], snr_cell(found, row)) for row in found.worst()[:WORST_ROWS]]
    body = [
        *(io.paragraph(line, soft=True) for line in lines),
        io.section("Recommendation", io.code_block(f"--policy {policy!r}")),
        io.section("Noise of every GEMM", noise_figure(found.gemms, wanted)),
        io.section("Noisiest first", io.html_table(("layer", "linear", "GEMM", f"dB ({BF16_NOTE})"), worst)),
        io.section("Operands", io.html_table(OPERANDS, [operand_row(o) for o in found.operands])),
    ]
    return io.html_page(title, body)


def operand_row(o: dict[str, Any]) -> tuple[Any, ...]:
    shares = (f"{100 * o[name]:.2f}%" if name in o else "" for name in ("zeros", "saturated"))
    snr = (f"{value:.1f}" if (value := o["snr"].get(way)) is not None else "" for way in SNR_FORMATS)
    return (o["layer"], o["site"], o["role"], f"{o['amax']:.3g}", f"{o['crest']:.1f}", *shares, *snr, scale_range(o))


def scale_range(o: dict[str, Any]) -> str:
    """The block-scale codes in use, and how many are zero."""
    codes = o["scale_codes"]
    if not codes:
        return ""
    total = sum(codes.values())
    return f"{len(codes)} codes {min(codes)}..{max(codes)}, {100 * codes.get(0, 0) / total:.1f}% zero"


def snr_cell(found: Inspection, row: tuple[int, str, str, float]) -> str:
    """The number of one GEMM, in brackets where its linear is not quantized."""
    layer, site, _, value = row
    return f"{value:.1f}" if (layer, site) in found.quantized else f"({value:.1f})"


def inspection_table(found: Inspection, wanted: float) -> Table:
    """The heat map as a table of coloured numbers."""
    rows, layers, values = gemm_rows(found.gemms)
    title = f"signal to noise, dB, of every GEMM against bf16; red: below {wanted:g}; {BF16_NOTE}"
    made = Table(title=title, title_justify="left")
    made.add_column("linear, GEMM")
    for layer in layers:
        made.add_column(str(layer), justify="right")
    for name, line in zip(rows, values, strict=True):
        site, gemm = name.rsplit(" ", 1)
        cells = zip(layers, line, strict=True)
        made.add_row(
            name, *(_cell(found, (at, site, gemm, value), wanted) if value is not None else "" for at, value in cells)
        )
    return made


def _cell(found: Inspection, row: tuple[int, str, str, float], wanted: float) -> Text:
    value = row[3]
    styles = {"bold white on red": value < wanted, "green": value > HIGH, "yellow": noise_shade(value) > 0.4}
    return Text(snr_cell(found, row), style=next((name for name, applies in styles.items() if applies), ""))
