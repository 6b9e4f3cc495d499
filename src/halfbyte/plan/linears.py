"""The GEMMs of a run's linears as its precision manifest has them: which unit multiplies each, how large, how often.

A plan asks once: the analytic step is made of them, and a compiled step is held to them.
"""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

from halfbyte.bench.placement import AGAIN
from halfbyte.devices import Device
from halfbyte.ops.backends.block_scaled import TILE
from halfbyte.train import TrainConfig, phases
from halfbyte.train.precision_manifest import TILES, Site, build_manifest

UNITS = {"nvfp4": "fp4", "mxfp4": "fp4", "fp8": "fp8", "mxfp8": "fp8"}


@dataclass(frozen=True)
class LinearGemm:
    """One of the three GEMMs of a linear, over layers that have one recipe."""

    path: str
    gemm: str
    format: str
    """Of the unit that multiplies: fp4, fp8 or bf16 (the last also for what is emulated)."""
    native: bool
    """Whether block-scaled units read codes: calls of a library, and of experts our own kernel."""
    experts: bool
    sizes: tuple[int, int, int]
    """On a device: rows of the left operand and of the right one, and what is summed over."""
    layers: int
    microbatches: int
    forward: int
    backward: int
    """Calls of a layer and microbatch in each pass."""
    flops: float
    """Of one call for each layer and microbatch, all devices together."""

    @property
    def calls(self) -> int:
        """Of a step."""
        return self.layers * self.microbatches * (self.forward + self.backward)

    @property
    def filling(self) -> int:
        """FLOPs of a step and device that only fill tiles of a library's block-scaled GEMMs up."""
        if not self.native or self.experts:  # of experts `bench.load` says how full tiles are
            return 0
        left, right, summed = self.sizes
        whole = (left + -left % TILE) * (right + -right % TILE)
        return self.calls * 2 * (whole - left * right) * summed


def linear_gemms(config: TrainConfig, device: Device) -> tuple[LinearGemm, ...]:
    """Those of the first precision phase of `config` on `device`, the head's last. ValueError where a backend cannot
    serve a linear.
    """
    phase, meshed = phases(config)[0], dataclasses.replace(config, mesh=config.mesh or "fsdp=1")
    resolved = phase.resolved(config)
    manifest = build_manifest(meshed, resolved, phase.recipe, seq=config.seq, device=device)
    found = []
    for site in manifest.sites:
        layered = site.path.startswith("layers/")
        pieces = 2 if resolved.at(site.path, site.layers[0] if layered else None).remainder else 1
        found += _of_site(site, config, pieces)
    return tuple(found)


def _of_site(site: Site, config: TrainConfig, pieces: int) -> list[LinearGemm]:
    """`pieces`: in how many x is multiplied in fprop."""
    (first, last), (tokens, inputs, outputs) = site.layers, site.on_device
    again = pieces if site.path in AGAIN[config.remat] else 0
    sizes = {"fprop": (tokens, outputs, inputs), "dgrad": (tokens, inputs, outputs), "wgrad": (inputs, outputs, tokens)}
    return [
        LinearGemm(
            path=site.path,
            gemm=name,
            format=UNITS.get(gemm.runs_in, "bf16"),
            native=gemm.multiplied_by == "native",
            experts=site.backend == TILES,
            sizes=sizes[name],
            layers=last - first,
            microbatches=config.accumulate,
            forward=pieces if name == "fprop" else 0,
            backward=again if name == "fprop" else 1,
            flops=site.flops / 3,
        )
        for name, gemm in site.gemms.items()
    ]


def fp4_calls(found: Iterable[LinearGemm]) -> int:
    """How often a step calls native FP4 GEMMs."""
    return sum(each.calls for each in found if each.native and each.format == "fp4")
