"""Entries of the precision manifest, and the table that a run prints before its first step."""

import io
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from halfbyte.devices import Device
from halfbyte.recipes import GEMM_ROLES
from halfbyte.train.metrics_log import Throughput, weighted_peak_flops

XLA_NAME = "xla"
XLA_BACKENDS = ("emulated", "reference")  # backends whose GEMMs XLA runs
TILES_NAME = "tiles"  # backend of experts: grouped GEMM over tiles of rows


@dataclass(frozen=True)
class GemmEntry:
    """One of the three GEMMs of a linear."""

    left: str
    right: str
    bits: int
    """Bits per element of the wider operand."""
    runs_in: str
    """Tensor-core format of the GEMM: nvfp4, fp8, bf16, ..."""
    execution: str
    """plain (bf16, not quantized), native or emulated."""
    multiplied_by: str
    """The backend that runs the GEMM; xla for backends that leave it to XLA."""
    made_by: tuple[str, ...]
    """The quantize passes of the left and the right operand."""


@dataclass(frozen=True)
class LinearEntry:
    """One linear over layers [first, last)."""

    path: str
    layers: tuple[int, int]
    tokens: int
    k: int
    n: int
    recipe: str
    backend: str
    gemms: dict[str, GemmEntry]
    flops: float
    """FLOPs per step of the three GEMMs in all layers of the segment."""
    passed_over: dict[str, str]
    """Faster backends that do not support this linear and kernels that cannot quantize its operands -> reason."""
    on_device: tuple[int, int, int] = (0, 0, 0)
    """(tokens, inputs, outputs) of the GEMM of one device."""


@dataclass(frozen=True)
class PrecisionManifest:
    """All linears and their totals. Shares are of all FLOPs of a step, including attention."""

    device: str
    recipe: str
    policy: str
    flops_formula: str
    sites: tuple[LinearEntry, ...]
    step_flops: float
    share_4bit: float
    share_by_multiplier: dict[str, float]
    norms: str
    """What computes the norms of a layer: "kernels", or "xla: " and the reason."""

    def to_json(self) -> dict[str, Any]:
        """Returns the manifest as written to manifest.json."""
        return asdict(self)

    def __str__(self) -> str:
        """Returns the table that `halfbyte train` prints, as text of at most 120 columns."""
        text = io.StringIO()
        Console(width=120, file=text, color_system=None).print(manifest_table(self))
        return "\n".join(line.rstrip() for line in text.getvalue().splitlines())

    def peak(self, device: Device) -> float | None:
        """Returns the dense peak in FLOP/s of this mix of formats on `device`; None if a peak is unknown."""
        return weighted_peak_flops(self.share_by_multiplier, device.peak)

    def meter(self, device: Device, *, tokens: int, devices: int) -> Throughput:
        """Returns the throughput meter of a step of `tokens` tokens on `devices` devices; MFU is relative to `peak`."""
        return Throughput(tokens, self.step_flops / tokens, devices, self.peak(device))


def manifest_table(manifest: PrecisionManifest) -> Table:
    """Returns the manifest as a table; manifest.json has every operand of every GEMM."""
    rows = Table(
        title=f"precision manifest: recipe {manifest.recipe}, policy {manifest.policy}, {manifest.device}",
        title_style="bold",
        title_justify="left",
        caption=manifest_caption(manifest),
        caption_justify="left",
        caption_style="",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
    )
    for name in ("linear", "layers", "k×n", "fprop", "dgrad", "wgrad", "runs", "FLOPs"):
        rows.add_column(name, justify="right" if name == "FLOPs" else "left", no_wrap=True)
    for site in manifest.sites:
        in_layers = site.path.startswith("layers/")
        executions = sorted({gemm.execution for gemm in site.gemms.values()} - {"plain"})
        rows.add_row(
            site.path.removeprefix("layers/"),
            f"{site.layers[0]}-{site.layers[1] - 1}" if in_layers else "-",
            f"{site.k}×{site.n}",
            *(_cell(site.gemms[gemm]) for gemm in GEMM_ROLES),
            _runs_cell(site, executions),
            f"{100 * site.flops / manifest.step_flops:.1f}%",
            style="" if executions else "dim",
        )
    return rows


def _runs_cell(site: LinearEntry, executions: list[str]) -> str:
    """Returns how the GEMMs of a linear run and by which backend, without the backend where it has the same name."""
    backend = backend_summary(site.backend, site.gemms)
    if not executions:
        return site.backend
    return backend if executions == [backend] else f"{', '.join(executions)} ({backend})"


def manifest_caption(manifest: PrecisionManifest) -> str:
    """Lists the operands of each quantized recipe with the passes that quantize them, and the totals."""
    lines = []
    quantized = (site for site in manifest.sites if any(gemm.execution != "plain" for gemm in site.gemms.values()))
    for site in {site.recipe: site for site in quantized}.values():
        for name, gemm in site.gemms.items():
            left, right = gemm.made_by
            lines.append(f"{site.recipe} {name}: {gemm.left} ({left})  ×  {gemm.right} ({right})")
    lines += sorted(
        {
            f"{backend} does not serve {site.path.removeprefix('layers/')}: {reason}"
            for site in manifest.sites
            for backend, reason in site.passed_over.items()
            if not manifest.device.startswith("cpu")
        }
    )
    multipliers = ", ".join(f"{name} {100 * share:.1f}%" for name, share in manifest.share_by_multiplier.items())
    lines += [] if manifest.device.startswith("cpu") else [f"norms of a layer: {manifest.norms}"]
    tokens, tiled = manifest.sites[0].tokens, any(site.backend == TILES_NAME for site in manifest.sites)
    return "\n".join(
        [
            *lines,
            *(["routers of experts are float32 and never quantized"] if tiled else []),
            f"{tokens:,} tokens a GEMM; the rest up to 100% of FLOPs is attention, in bf16",
            f"{100 * manifest.share_4bit:.1f}% of FLOPs in 4 bits; multiplied in {multipliers}",
        ]
    )


def backend_summary(backend: str, gemms: Mapping[str, GemmEntry]) -> str:
    """Returns the backend of a linear, and which of its GEMMs XLA multiplies instead."""
    by_xla = [name for name, gemm in gemms.items() if gemm.multiplied_by == XLA_NAME]
    is_uniform = backend in (*XLA_BACKENDS, XLA_NAME, TILES_NAME) or not by_xla
    return backend if is_uniform else f"{backend}; {' '.join(by_xla)} by xla"


def pass_summary(gemms: Mapping[str, GemmEntry]) -> str:
    """Returns the backends whose passes quantize the operands of a linear: one name, or the GEMMs of each."""
    backends: dict[str, list[str]] = {}
    for name, gemm in gemms.items():
        backends.setdefault("+".join(dict.fromkeys(gemm.made_by)), []).append(name)
    texts = [f"{' '.join(names)}: {by}" for by, names in backends.items()]
    return next(iter(backends)) if len(backends) == 1 else "; ".join(texts)


def _cell(gemm: GemmEntry) -> str:
    """Returns the formats of both operands; one name if they are the same."""
    left, right = gemm.left.split()[0], gemm.right.split()[0]
    return left if left == right else f"{left}×{right}"
