"""Step time, TFLOP/s and memory of a model under several recipes, on this machine, in one table.

The step is the trainer's own (float32 master weights, AdamW) on synthetic tokens. Ratios are to bf16 in the same run,
and are given only if the operands of every backend equal the definition bit for bit on this device.

halfbyte bench llama3-8b --layers 16 --batch 16 --mesh fsdp=8 --unroll 1 --mock-gpus 8
halfbyte bench llama3-8b --layers 16 --batch 16 --recipes bf16 --flags none"""

import contextlib
import dataclasses
import os
import platform
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from halfbyte.cli.console import EXIT_FAILED, EXIT_NOT_PASSED, EXIT_OK, CommandResult, console, rich_table
from halfbyte.cli.terminal_signals import sigterm_as_interrupt
from halfbyte.io import check_int, validated_output_path, write_json

BENCH_COLUMNS = (
    "recipe", "remat", "batch", "ms", "tokens/s", "J a step", "tokens/J", "TFLOP/s", "MFU", "vs bf16", "temp GiB",
    "activations", "peak GiB", "GEMM FLOPs in", "linears",
)  # fmt: skip


@dataclass(frozen=True)
class Args:
    model: Annotated[str, tyro.conf.Positional] = "demo"
    """A model preset (demo, ..., llama3-8b), a config (.json), a run directory, or a Hugging Face folder."""
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
    mock_gpus: int = 0
    """Time one GPU's part of a step on N GPUs, on one GPU, without communication: compute only, results are garbage.
    0: the devices that are here."""
    flags: str = "recommended"
    """The set of XLA flags on GPUs: recommended, none, serial, four, ahead-serial, combined, combined-ahead, doubled or
    own-turn."""
    schedule_by: Literal["roofline", "xla"] = "roofline"
    """As in `halfbyte train`: how long things take when XLA orders a step on several GPUs."""
    out: Path | None = None
    """Write the rows, with device, versions and commit, to this JSON file, as they come."""


def run(args: Args) -> CommandResult:
    if args.out is not None:
        validated_output_path(args.out, flag="--out")
    mock, settings = prepare_environment(args)
    from halfbyte import distributed, ops
    from halfbyte.plan import step_timing
    from halfbyte.recipes import recipe

    say, mocked = make_printer(mock), mock is not None and mock.mocked
    ops.run_gemm_selftest_once(say)  # or `auto` would emulate on a card that trains natively
    chosen = [recipe(name) for name in args.recipes.split(",")]
    configs = checked_configs(args, [r.name for r in chosen])
    checks: dict[str, dict[str, bool]] = {}
    for r in chosen:
        if r.quantized:
            found = checks[r.name] = ops.backends_match_reference(r)
            say(f"bits of {r.name}: " + ", ".join(f"{b} {'equal' if ok else 'DIFFER'}" for b, ok in found.items()))
    passed = all(all(found.values()) for found in checks.values())
    data: dict[str, Any] = {"args": plain_args(args), "bits": checks, "rows": [], **bench_versions()}
    data |= {"measured": mock.label if mock else "whole steps", "settings": settings}
    data |= {"note": distributed.MOCK_NOTE} if mocked else {}
    rows: list[step_timing.StepMeasurement] = []
    with stop_gracefully(data, rows):
        for config in configs:
            say(f"measuring {config.recipe}, remat {config.remat} ...")
            if args.largest_batch:
                row = step_timing.measure_largest(config, seq=seq_of(args), limit=memory_limit(), say=say)
            else:
                row = step_timing.measure_step(config, seq=seq_of(args), steps=args.steps, repeats=args.repeats)
            say(f"{config.recipe}: {f'{row.milliseconds:.1f} ms a step' if row.milliseconds else row.note}")
            rows.append(step_timing.as_compute_only(row) if mocked else row)
            rows[:] = step_timing.with_speed_ratio(rows) if passed else rows
            data["rows"] = [dataclasses.asdict(each) for each in rows]
            write(args, data)
    console().print(rich_table(BENCH_COLUMNS, (bench_cells(row, mock) for row in rows), title=bench_title(args, mock)))
    if mocked:
        say(f"{distributed.MOCK_NOTE}; compare ratios, not milliseconds")
    if not passed:
        say("the operands differ from the definition: no ratio is given, because it would mean nothing")
    write(args, data)
    return CommandResult(data, EXIT_FAILED if "stopped" in data else EXIT_OK if passed else EXIT_NOT_PASSED)


@contextlib.contextmanager
def stop_gracefully(data: dict[str, Any], rows: Sequence[Any]) -> Iterator[None]:
    """Ctrl-C, SIGTERM and SIGHUP end the measuring, not the report of the rows that are there: `data` says so."""
    try:
        with sigterm_as_interrupt():
            yield
    except KeyboardInterrupt:
        if not rows:
            raise
        data["stopped"] = f"before its end, after {len(rows)} rows"
        console().print(f"stopped {data['stopped']}", soft_wrap=True)


def prepare_environment(args: Args) -> tuple[Any, list[dict[str, Any]]]:
    """Set what must be set before JAX touches a device: (what --mock-gpus set up or None, what became of settings)."""
    from halfbyte import distributed
    from halfbyte.devices import xla_flags

    if args.flags not in xla_flags.FLAG_SETS:
        raise ValueError(
            f"flags: no set of XLA flags is called {args.flags!r}. Choose one of {', '.join(xla_flags.FLAG_SETS)}; to "
            "compare several, run the command once per set, each with its --out."
        )
    gpus = xla_flags.visible_gpus()
    several = len(gpus) > 1 or args.mock_gpus > 0
    settings = xla_flags.recommended_flags(gpus[0], several=several, flags=args.flags) if gpus else ()
    mock = distributed.mock_gpu_topology(args.mock_gpus, os.environ, gpu=bool(gpus)) if args.mock_gpus else None
    say = make_printer(mock)
    applied = xla_flags.apply_flags(settings, os.environ)
    for each in applied:
        say(str(each))
    distributed.initialize_distributed(distributed.DistributedConfig(), say=say)
    if mock:
        distributed.check_mock(mock)
    return mock, [each.to_json() for each in applied]


def make_printer(mock: Any) -> Callable[[str], None]:
    """What prints a line, with the label of a mocked measurement in front of it."""
    return lambda text: console().print(f"{mock.label}: {text}" if mock else text, soft_wrap=True)


def plain_args(args: Args) -> dict[str, Any]:
    return {name: value for name, value in dataclasses.asdict(args).items() if name != "out"}


def write(args: Args, data: dict[str, Any]) -> None:
    if args.out is not None:
        path = validated_output_path(args.out, flag="--out")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, data)


def memory_limit() -> int:
    """Bytes of a device that a step may fill."""
    import jax

    from halfbyte.train.preflight import device_memory_bytes

    device = jax.local_devices()[0]
    limit = device_memory_bytes(device)
    if limit is None:
        raise ValueError(f"largest-batch: {device} does not report the memory of its allocator. Use --batch.")
    return limit


def seq_of(args: Args) -> int:
    from halfbyte.cli.flag_parsing import config_for_name

    preset = config_for_name(args.model)
    return args.seq or preset.seq or min(preset.model.max_seq, 8192 if preset.model.layers > 4 else 128)


def checked_configs(args: Args, recipes: Sequence[str]) -> list[Any]:
    """What is measured, in order. What cannot be is refused before anything takes long."""
    from halfbyte.train import run_mesh

    for name in ("steps", "repeats"):
        check_int(name, getattr(args, name), least=1)
    if args.largest_batch:
        memory_limit()
    configs = [bench_config(args, name, remat) for remat in args.remat.split(",") for name in recipes]
    for config in configs:
        run_mesh(config)
    return configs


def bench_config(args: Args, recipe_name: str, remat: Any) -> Any:
    """The preset's run with the flags of this command."""
    from halfbyte.cli.flag_parsing import config_for_name

    preset = config_for_name(args.model)
    check_int("layers", args.layers, zero="all")
    model = dataclasses.replace(preset.model, layers=args.layers or preset.model.layers)
    return dataclasses.replace(
        preset, model=model, recipe=recipe_name, policy=args.policy, remat=remat, unroll=args.unroll, mesh=args.mesh,
        data="synthetic", batch=args.batch or preset.batch, seq=seq_of(args), accumulate=1,
        schedule_by=args.schedule_by,
    )  # fmt: skip


def format_number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def bench_cells(row: Any, mock: Any = None) -> tuple[str, ...]:
    name = f"{row.recipe}, {mock.label}" if mock else row.recipe
    return (
        name, row.remat, str(row.batch),
        format_number(row.milliseconds, ".1f"), format_number(row.tokens_per_s, ",.0f"),
        format_number(row.joules, ".1f"), format_number(row.tokens_per_joule, ".1f"),
        format_number(row.tflops, ".1f"), format_number(row.mfu, ".1%"), format_number(row.ratio, ".3f"),
        format_number(row.temporaries_gib, ".2f"), format_number(row.activations_gib, ".2f"),
        format_number(row.peak_gib, ".2f"),
        gemm_shares(row.gemms), row.note or row.backends,
    )  # fmt: skip


def gemm_shares(gemms: Mapping[str, Mapping[str, int]]) -> str:
    """Of the linears' GEMM FLOPs in the compiled program, the part that is multiplied in each format."""
    total = sum(work["flops"] for work in gemms.values())
    return ", ".join(f"{name} {work['flops'] / total:.1%}" for name, work in gemms.items())


def bench_title(args: Args, mock: Any = None) -> str:
    import jax

    from halfbyte.devices import lookup

    layers = f", {args.layers} layers" if args.layers else ""
    batch = "the largest batch" if args.largest_batch else f"batch {bench_config(args, 'bf16', 'none').batch}"
    size = f"{batch}, seq {seq_of(args)}, policy {args.policy}"
    where = f"{len(jax.devices())} x {lookup(jax.devices()[0]).name}"
    return f"{mock.label + ': ' if mock else ''}{args.model}{layers}, {size}, on {where}"


def bench_versions() -> dict[str, str]:
    """Device, versions and commit: what a figure is worth without its circumstances."""
    import jax
    import jaxlib

    here = Path(__file__).parent
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True, check=False)
    return {
        "device": jax.devices()[0].device_kind, "jax": jax.__version__, "jaxlib": jaxlib.__version__,
        "python": platform.python_version(), "commit": git.stdout.strip() or "unknown",
    }  # fmt: skip
