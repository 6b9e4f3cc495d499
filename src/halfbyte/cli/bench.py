"""Step time, TFLOP/s and memory of a model under several recipes, on this machine, in one table.

The step is the trainer's own (float32 master weights, AdamW) on synthetic tokens. Ratios are to bf16 in the same run,
and are given only if the operands of every backend equal the definition bit for bit on this device."""

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from halfbyte.cli.result import DONE, NOT_PASSED, BadInput, Result
from halfbyte.cli.screen import console, table
from halfbyte.inputs import check_output

COLUMNS = (
    "recipe",
    "remat",
    "batch",
    "ms",
    "tokens/s",
    "TFLOP/s",
    "MFU",
    "vs bf16",
    "temp GiB",
    "activations",
    "peak GiB",
    "GEMMs compiled",
    "linears",
)


@dataclass(frozen=True)
class Args:
    model: Annotated[str, tyro.conf.Positional] = "demo"
    """A model preset (demo, llama-60m, ..., llama3-8b)."""
    recipes: str = "bf16,fp8,nvfp4"
    """Recipes to measure, in this order; name bf16 to get ratios."""
    policy: str = "mlp"
    """Which linears are quantized: mlp, all_linear or paper."""
    batch: int = 0
    """Sequences a step; 0: the preset's."""
    seq: int = 0
    """Tokens a sequence; 0: the preset's, at most 8192."""
    layers: int = 0
    """Layers of the model, for shapes that do not fit whole; 0: all."""
    remat: str = "none"
    """Remat policies to measure each recipe under, comma-separated (none, dots, full, quantized)."""
    unroll: int = 0
    """Layers a loop iteration; 0: all, no loop."""
    mesh: str = ""
    """As in `halfbyte train`; empty: fsdp over all devices."""
    steps: int = 10
    repeats: int = 3
    largest_batch: bool = False
    """Instead of one batch for all: find for each recipe and remat the largest that fits, and run it for two steps
    (--batch, --steps and --repeats do not count)."""
    memory_gib: float = 0.0
    """What --largest-batch may fill on a device; 0: what the allocator of this one has."""
    synthetic: bool = True
    """Random tokens; the only source there is for a speed run."""
    state: Literal["float32", "bfloat16"] = "float32"
    """Type of Adam's moments."""
    out: Path | None = None
    """Write the rows, with device, versions and commit, to this JSON file."""


def run(args: Args) -> Result:
    from halfbyte import launch

    if args.out is not None:
        check_output(args.out, flag="--out")
    gpus = launch.visible_gpus()
    for line in launch.apply(
        launch.recommended(gpus[0], several=len(gpus) > 1) if gpus else (), os.environ, known=launch.known_to_xla
    ):
        console().print(line)
    launch.start(launch.DistributedConfig(), say=console().print)
    from halfbyte import bench, conformance
    from halfbyte.recipe import recipe

    chosen = [recipe(name) for name in args.recipes.split(",")]
    checks = {r.name: conformance.operands_agree(r) for r in chosen if r.quantized}
    passed = all(all(found.values()) for found in checks.values())
    rows: list[bench.Measured] = []
    for remat in args.remat.split(","):
        for r in chosen:
            console().print(f"measuring {r.name}, remat {remat} ...")
            rows.append(measured(args, config_of(args, r.name, remat)))
    rows = bench.compare(rows) if passed else rows
    console().print(table(COLUMNS, map(cells, rows), title=title(args)))
    for name, found in checks.items():
        console().print(
            f"bits of {name}: " + ", ".join(f"{b} {'equal' if ok else 'DIFFER'}" for b, ok in found.items())
        )
    if not passed:
        console().print("the operands differ from the definition: no ratio is given, because it would mean nothing")
    flags = {name: value for name, value in dataclasses.asdict(args).items() if name != "out"}
    data: dict[str, Any] = {"args": flags, "bits": checks, "rows": [dataclasses.asdict(r) for r in rows], **versions()}
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    return Result(data, DONE if passed else NOT_PASSED)


def measured(args: Args, config: Any) -> Any:
    """The row of one recipe under one remat: at the batch that was asked for, or at the largest that fits."""
    from halfbyte import bench

    if not args.largest_batch:
        return bench.measure(config, seq=seq_of(args), steps=args.steps, repeats=args.repeats)
    limit = memory_limit(args)
    return bench.measure_largest(config, seq=seq_of(args), limit=limit, say=console().print)


def memory_limit(args: Args) -> int:
    """Bytes of a device that a step may fill."""
    import jax

    from halfbyte.train.preflight import memory_of

    if args.memory_gib < 0:
        raise BadInput(f"memory-gib must be 0 (as the device has) or more, got {args.memory_gib}")
    limit = int(args.memory_gib * 2**30) or memory_of(jax.local_devices()[0])
    if limit is None:
        raise BadInput("this device does not say how much memory its allocator has; give --memory-gib")
    return limit


def seq_of(args: Args) -> int:
    from halfbyte import runs

    preset = runs.run_config(args.model)
    return args.seq or preset.seq or min(preset.model.max_seq, 8192 if preset.model.layers > 4 else 128)


def config_of(args: Args, recipe_name: str, remat: Any) -> Any:
    """The preset's run with the flags of this command."""
    from halfbyte import runs

    preset = runs.run_config(args.model)
    if args.layers < 0:
        raise BadInput(f"layers must be 0 (all) or more, got {args.layers}")
    model = dataclasses.replace(preset.model, layers=args.layers or preset.model.layers)
    optimizer = dataclasses.replace(preset.optimizer, mu_dtype=args.state, nu_dtype=args.state)
    return dataclasses.replace(
        preset, model=model, recipe=recipe_name, policy=args.policy, remat=remat, unroll=args.unroll, mesh=args.mesh,
        data="synthetic", batch=args.batch or preset.batch, seq=seq_of(args), optimizer=optimizer, accumulate=1,
    )  # fmt: skip


def cells(row: Any) -> tuple[str, ...]:
    def number(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    gemms = ", ".join(f"{count} {name}" for name, count in row.gemms.items() if count)
    return (
        row.recipe, row.remat, str(row.batch), number(row.milliseconds, ".1f"), number(row.tokens_per_s, ",.0f"),
        number(row.tflops, ".1f"), number(row.mfu, ".1%"), number(row.ratio, ".3f"),
        number(row.temporaries_gib, ".2f"), number(row.activations_gib, ".2f"), number(row.peak_gib, ".2f"),
        gemms, row.note or row.backends,
    )  # fmt: skip


def title(args: Args) -> str:
    import jax

    from halfbyte.devices import lookup

    layers = f", {args.layers} layers" if args.layers else ""
    batch = "the largest batch" if args.largest_batch else f"batch {config_of(args, 'bf16', 'none').batch}"
    size = f"{batch}, seq {seq_of(args)}, policy {args.policy}"
    return f"{args.model}{layers}, {size}, on {len(jax.devices())} x {lookup(jax.devices()[0]).name}"


def versions() -> dict[str, str]:
    """Device, versions and commit: what a figure is worth without its circumstances."""
    import platform
    import subprocess

    import jax
    import jaxlib

    here = Path(__file__).parent
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True, check=False)
    return {
        "device": jax.devices()[0].device_kind, "jax": jax.__version__, "jaxlib": jaxlib.__version__,
        "python": platform.python_version(), "commit": git.stdout.strip() or "unknown",
    }  # fmt: skip
