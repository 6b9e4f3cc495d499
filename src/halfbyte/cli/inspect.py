"""Which tensors suffer: every GEMM operand of a run, layer by layer, on real batches.

halfbyte inspect RUN

Replays one step of the run on some of its training batches. For each operand of each linear: amax, crest factor, shares
that round to zero and that saturate, the block-scale codes in use, and the signal-to-noise ratio in nvfp4 (1D, 2D,
with and without Hadamard), mxfp4, mxfp8 and fp8; for each GEMM, its result against bf16. Prints a heat map and the
shortest list of layers or linears to keep in higher precision, as a ready --policy value; writes inspect.html and
inspect.json."""

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from halfbyte.cli.console import CommandResult, console, print_note, progress
from halfbyte.io import atomic_write, check_float, check_int, validated_output_path, write_json

if TYPE_CHECKING:
    from halfbyte.train.run_directory import RunDirectory


@dataclass(frozen=True)
class Args:
    run: Annotated[str, tyro.conf.Positional]
    """Run directory."""
    batches: int = 2
    """Batches to replay."""
    snr: float = 12.0
    """Wanted signal-to-noise ratio of every GEMM, in decibels."""
    step: int = 0
    """Checkpoint; 0: the newest."""
    recipe: str = ""
    """Look at this recipe instead of the run's; FILE.py:NAME where the run has one of your own."""
    policy: str = ""
    """Look at this policy instead of the run's (names, rules or @FILE)."""
    out: str = ""
    """Where to write inspect.html and inspect.json; default: the run directory."""


def run(args: Args) -> CommandResult:
    check_float("--snr", args.snr, holds=True, wanted="a number of decibels")
    print_note(f"reading {args.run}")
    from halfbyte.distributed import DEFAULT_RULES
    from halfbyte.evaluation.inspection import (
        fast_compile_options,
        inspect_step,
        inspection_html,
        inspection_table,
        snr_cell,
    )
    from halfbyte.hf.model_loading import recipe_at_step, restore_params
    from halfbyte.recipes import read_policy_text
    from halfbyte.train import resolve_policy
    from halfbyte.train.run_directory import open_run_directory

    check_int("--batches", args.batches, least=1)
    directory = Path(args.run)
    opened = open_run_directory(directory)
    config = opened.config
    out = validated_output_path(args.out, flag="--out") if args.out else directory
    out.mkdir(parents=True, exist_ok=True)
    restored = restore_params(opened, mesh=None, rules=DEFAULT_RULES, step=args.step or None)
    chosen = recipe_at_step(config, restored.step, args.recipe)
    text = read_policy_text(args.policy or config.policy)
    resolved = resolve_policy(config.model, text, chosen)
    batches = first_batches(opened, args.batches)
    with progress("linears") as watch, fast_compile_options(config.model):
        found = inspect_step(
            config, resolved, restored.items["params"], batches, step=restored.step, say=print_note, watch=watch
        )
    policy = found.policy(text, args.snr)
    screen = console()
    screen.print(inspection_table(found, args.snr))
    for row in found.worst()[:3]:
        layer, site, gemm, _ = row
        screen.print(f"layer {layer} {site} {gemm}: {snr_cell(found, row)} dB", markup=False)
    verdict = "every GEMM reaches" if policy == text else "to reach"
    screen.print(f"{verdict} {args.snr:g} dB: --policy {policy!r}", markup=False, soft_wrap=True)
    lines = [f"{directory}, step {restored.step}, recipe {chosen.name}, policy {text}, {found.batches} batches"]
    data = {"wanted": args.snr, **describe(found, policy)}
    atomic_write(
        out / "inspect.html",
        inspection_html(found, title=f"Inspect: {config.name}", lines=lines, policy=policy, wanted=args.snr),
    )
    write_json(out / "inspect.json", data)
    screen.print(f"report: {out / 'inspect.html'}", markup=False)
    return CommandResult(data)


def first_batches(opened: "RunDirectory", many: int) -> Any:
    """The first training batches of the run, as its first step saw them."""
    import jax.numpy as jnp
    from jax import ShapeDtypeStruct, local_devices
    from jax.sharding import SingleDeviceSharding

    from halfbyte.train import run_mesh
    from halfbyte.train.preflight import check_fits_memory

    source, here = opened.source(), SingleDeviceSharding(local_devices()[0])
    check_fits_memory(
        ShapeDtypeStruct((16, opened.config.batch, source.seq), jnp.int32, sharding=here)
    )  # four, prefetched
    loader = source.loader(run_mesh(opened.config))
    try:
        return [{n: jnp.asarray(v, jnp.int32) for n, v in rows.items()} for rows in itertools.islice(loader, many)]
    finally:
        loader.close()


def describe(found: Any, policy: str) -> dict[str, Any]:
    """An inspection as plain data."""
    gemms = [
        {"layer": layer, "site": site, "gemm": gemm, "snr_db": value, "quantized": (layer, site) in found.quantized}
        for layer, site, gemm, value in found.worst()
    ]
    return {"policy": policy, "step": found.step, "batches": found.batches, "gemms": gemms, "operands": found.operands}
