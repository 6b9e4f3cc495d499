"""Write a run's model in the formats that other people's programs load.

halfbyte export RUN --format hf --out DIR                    bf16 safetensors: transformers, vLLM, llama.cpp's converter
halfbyte export RUN --format compressed-tensors --out DIR    NVFP4, the very codes of training: vLLM, transformers
halfbyte export RUN --format modelopt --out DIR              the same in ModelOpt's layout: TensorRT-LLM, vLLM, SGLang

RUN may be a Hugging Face folder too. The NVFP4 formats hold weights as the forward pass multiplied them (W4A16).
`--calibrate FILE` adds a scale for each linear's input, from the largest magnitudes seen on that text (W4A4). The
directory appears whole or not at all."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from halfbyte.cli.console import CommandResult, print_line, progress
from halfbyte.cli.terminal_signals import sigterm_as_interrupt
from halfbyte.io import check_int, validated_output_path

if TYPE_CHECKING:
    from halfbyte.hf import ExportResult


@dataclass(frozen=True)
class Args:
    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Run directory or Hugging Face folder."""
    out: str
    """Directory to make."""
    format: Literal["hf", "compressed-tensors", "modelopt"] = "hf"
    """hf: plain floats; the others: NVFP4."""
    dtype: Literal["", "bfloat16", "float16", "float32"] = ""
    """Of what is not quantized; empty: as it was imported, else bfloat16."""
    recipe: str = ""
    """Whose weight codes the NVFP4 formats hold; empty: the recipe that the run trained with."""
    policy: str = ""
    """Which linears are quantized; empty: the run's own policy."""
    calibrate: str = ""
    """Text to find activation scales on (W4A4); empty: none (W4A16)."""
    batches: int = 8
    """Batches of 8 rows that --calibrate reads."""
    step: int | None = None
    """Checkpoint to use; without it, the newest."""
    max_shard_gb: float = 5.0
    """Bytes of a safetensors file, in 10^9."""
    overwrite: bool = False
    """Replace DIR if it holds an earlier export."""
    mesh: str = ""
    """AXIS=SIZE,... for a model that one device cannot hold; empty: one device."""


def run(args: Args) -> CommandResult:
    from halfbyte.hf import export_model, open_export_source
    from halfbyte.hf.exporter import GB, check_output_directory

    out = validated_output_path(args.out, flag="--out")
    check_output_directory(out, replace=args.overwrite)
    if not args.max_shard_gb > 0:
        raise ValueError(f"--max-shard-gb must be above 0, got {args.max_shard_gb}")
    source = open_export_source(Path(args.run), mesh=args.mesh, step=args.step)
    resolved = None if args.format == "hf" else source.resolve(args.recipe, args.policy)
    scales = calibrated_input_amaxes(args, source, resolved) if args.calibrate else None
    with sigterm_as_interrupt(), progress("tensors") as watch:
        made = export_model(
            source.model, out, to=args.format, dtype=args.dtype or source.dtype, resolved=resolved, input_amax=scales,
            shard_bytes=int(args.max_shard_gb * GB), replace=args.overwrite, watch=watch,
        )  # fmt: skip
    kind = "hf" if args.format == "hf" else f"{args.format}, {made.quantized} linears in NVFP4"
    print_line(f"{out}: {kind}, {made.nbytes / 1e6:,.1f} MB of tensors")
    for line in warnings(made):
        print_line(line)
    worst = max((m.ratio for m in made.mismatches), default=1.0)
    return CommandResult(
        {"out": str(out), "format": args.format, "bytes": made.nbytes, "quantized_linears": made.quantized,
         "activation_scales": scales is not None, "fused_groups_that_differ": len(made.mismatches),
         "largest_ratio": worst}
    )  # fmt: skip


def calibrated_input_amaxes(args: Args, source: Any, resolved: Any) -> dict[str, float]:
    """The largest magnitude of each linear's input on --calibrate's text."""
    from halfbyte.hf import calibrate_input_amax

    if args.format == "hf":
        raise ValueError("--calibrate is for the NVFP4 formats; --format hf has no activation scales")
    check_int("--batches", args.batches, least=1)
    return calibrate_input_amax(source, Path(args.calibrate), resolved, batches=args.batches)


def warnings(made: "ExportResult") -> list[str]:
    """One line a fused group whose tensor scales differ, with by how much."""
    lines = []
    for group in dict.fromkeys(m.group for m in made.mismatches):
        of_group = [m for m in made.mismatches if m.group == group]
        worst = max(of_group, key=lambda m: m.ratio)
        lines.append(
            f"WARNING: the tensor scales of {group} differ in {len(of_group)} layers, by up to {worst.ratio:.3f}x "
            f"(layer {worst.layer}); an engine that fuses them takes one for all, "
            "and then multiplies weights that are off by that much"
        )
    if lines:
        lines.append(
            "train with --recipe nvfp4_shared_scales, whose fused weights share one tensor scale; of a trained run, "
            "export with --recipe nvfp4_shared_scales"
        )
    return lines
