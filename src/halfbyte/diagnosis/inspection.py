"""`halfbyte inspect`: every GEMM operand of a run, layer by layer, on real batches; of experts, the fullest's."""

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np

from halfbyte import models
from halfbyte.recipe import Resolved, recipe
from halfbyte.train import TrainConfig

from .definition import TENSORS
from .radar import looking_context, part_of, step_of
from .recommendation import recommend
from .replay import Replay
from .tensors import gemm_numbers, operand_numbers

SMALL = 20_000_000  # parameters, below which programs are compiled for longer than they run
SNRS = ("own", "nvfp4", "nvfp4 2d", "nvfp4 hadamard", "mxfp4", "mxfp8", "fp8")


@contextlib.contextmanager
def compiled_soon(model: models.LlamaConfig) -> Iterator[None]:
    """Where compiling is nearly all of the time (a small model on a CPU), without what only makes programs fast."""
    before = jax.config.read("jax_disable_most_optimizations")
    soon = jax.default_backend() == "cpu" and models.count_params(model) < SMALL
    jax.config.update("jax_disable_most_optimizations", before or soon)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)


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
        return recommend(self.snr, self.quantized, wanted=wanted, policy=text)


def inspect(
    config: TrainConfig, resolved: Resolved, params: Any, batches: Iterable[Any], *, step: int,
    say: Callable[[str], None] = lambda line: None, watch: Callable[[int, int], None] = lambda done, total: None,
) -> Inspection:  # fmt: skip
    """Replay one step on each batch and look at what its linears were given. `say` is told how far it is, `watch` gets
    (linears done, of)."""
    replay = Replay(config.model, looking_context(config, resolved, None))
    sums: dict[tuple[int, str, str], list[dict[str, Any]]] = {}
    noises: dict[tuple[int, str, str], list[float]] = {}
    shown, done = list(batches), itertools.count(1)
    say(f"replaying a step of {config.model.layers} layers on {len(shown)} batches; programs are compiled first")
    for place, batch in enumerate(shown, 1):
        for layer, linears in replay.layers(params, part_of(batch), step_of(config.rounding_seed, step)):
            for given in linears:
                own, site, plain = given.recipe, given.site, dataclasses.replace(given.fullest(), site="")
                tried = plain if own.quantized else dataclasses.replace(plain, recipe=recipe("nvfp4"))
                for gemm, numbers in gemm_numbers(tried, backend=config.precision.backend).items():
                    noises.setdefault((layer, site, gemm), []).append(float(numbers["snr_db"]))
                for role in TENSORS:
                    sums.setdefault((layer, site, role), []).append(operand_numbers(plain, role))
                watch(next(done), len(shown) * config.model.layers * len(linears))
                if place == 1 and layer == config.model.layers - 1:  # later layers and batches share its programs
                    say(f"batch 1, layer {layer}: {site}")
            say(f"batch {place} of {len(shown)}: layer {layer} seen, {layer} to go")
    if not shown:
        raise ValueError("inspect was given no batch; --batches must be 1 or more")
    operands = [summarise(layer, site, role, found) for (layer, site, role), found in sorted(sums.items())]
    gemms = {place: float(np.mean(values)) for place, values in noises.items()}
    quantized = frozenset(
        (layer, path.removeprefix("layers/"))
        for segment in resolved.segments
        for layer in range(segment.start, segment.stop)
        for path, chosen in segment.recipes.items()
        if chosen.quantized
    )
    return Inspection(operands, gemms, quantized, len(shown), step)


def summarise(layer: int, site: str, role: str, found: list[dict[str, Any]]) -> dict[str, Any]:
    """One operand's numbers as plain data, means over what was found in each batch."""
    means = [name for name in found[0] if name in ("crest", "zeros", "saturated")]
    numbers: dict[str, Any] = {name: float(np.mean([f[name] for f in found])) for name in means}
    snr = {way: float(np.mean([f["snr"][way] for f in found])) for way in found[0]["snr"]}
    codes = np.sum([f["scale_codes"] for f in found], axis=0) if "scale_codes" in found[0] else None
    return {
        "layer": layer,
        "site": site,
        "role": role,
        "tensor": TENSORS[role][0],
        "amax": float(max(f["amax"] for f in found)),
        **numbers,
        "snr": {way: None if math.isnan(value) else value for way, value in snr.items()},
        "scale_codes": None if codes is None else {int(code): int(codes[code]) for code in np.flatnonzero(codes)},
    }
