"""The precision manifest for people: a table, a caption, and who serves a linear in a few words."""

from collections.abc import Mapping

from rich import box
from rich.table import Table

from halfbyte.recipe import GEMMS

from .precision_manifest import BY_XLA, TILES, XLA, Gemm, Manifest


def _cell(gemm: Gemm) -> str:
    """The formats of both operands; one name if they are the same."""
    left, right = gemm.left.split()[0], gemm.right.split()[0]
    return left if left == right else f"{left}×{right}"


def served(backend: str, gemms: Mapping[str, Gemm]) -> str:
    """The backend of a linear, and which of its GEMMs XLA multiplies although that backend serves it."""
    left = [name for name, gemm in gemms.items() if gemm.multiplied_by == XLA]
    return backend if backend in (*BY_XLA, XLA, TILES) or not left else f"{backend}; {' '.join(left)} by xla"


def makers(gemms: Mapping[str, Gemm]) -> str:
    """Whose passes make the operands of a linear: one name, or the GEMMs of each."""
    made: dict[str, list[str]] = {}
    for name, gemm in gemms.items():
        made.setdefault("+".join(dict.fromkeys(gemm.made_by)), []).append(name)
    return next(iter(made)) if len(made) == 1 else "; ".join(f"{' '.join(names)}: {by}" for by, names in made.items())


def table(manifest: Manifest) -> Table:
    """The manifest for people; manifest.json has every operand of every GEMM in full."""
    rows = Table(
        title=f"precision manifest: recipe {manifest.recipe}, policy {manifest.policy}, {manifest.device}",
        title_style="bold",
        title_justify="left",
        caption=caption(manifest),
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
            *(_cell(site.gemms[gemm]) for gemm in GEMMS),
            f"{', '.join(executions)} ({served(site.backend, site.gemms)})" if executions else site.backend,
            f"{100 * site.flops / manifest.step_flops:.1f}%",
            style="" if executions else "dim",
        )
    return rows


def caption(manifest: Manifest) -> str:
    """The operands of each quantized recipe with the passes that make them, and the totals."""
    lines = []
    quantized = (site for site in manifest.sites if any(gemm.execution != "plain" for gemm in site.gemms.values()))
    for site in {site.recipe: site for site in quantized}.values():
        for gemm, found in site.gemms.items():
            left, right = found.made_by
            lines.append(f"{site.recipe} {gemm}: {found.left} ({left})  ×  {found.right} ({right})")
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
    tokens, tiled = manifest.sites[0].tokens, any(site.backend == TILES for site in manifest.sites)
    return "\n".join(
        [
            *lines,
            *(["routers of experts are float32 and never quantized"] if tiled else []),
            f"{tokens:,} tokens a GEMM; the rest up to 100% of FLOPs is attention, in bf16",
            f"{100 * manifest.share_4bit:.1f}% of FLOPs in 4 bits; multiplied in {multipliers}",
        ]
    )
