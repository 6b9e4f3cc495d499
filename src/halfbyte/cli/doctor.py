"""What runs native here, what emulated, and a self-test of every quantizer.

Exits with 3 if a quantizer does not give the stored bits inside jit on this machine: then no result computed here in
that format means anything. `--accept` also answers every line of docs/unverified.md that this machine can, writes the
answers to a file to send, and exits with 3 if one is missed."""

import contextlib
import os
import platform
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import halfbyte
from halfbyte.cli.console import EXIT_NOT_PASSED, EXIT_OK, CommandResult, console, rich_table
from halfbyte.devices.compile_target import unused_gpu_hint
from halfbyte.io import validated_output_path, write_json

PACKAGES = (
    "jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "numpy", "ml_dtypes", "optax",
    "orbax-checkpoint", "grain", "tokenizers",
)  # fmt: skip
GIB = 2**30
LARGE_GEMM_SIZE = 4096  # tokens, inputs and outputs of the GEMM that backends are asked for


@dataclass(frozen=True)
class Args:
    accept: bool = False
    """Check what no hardware of ours could show: on GPUs whole steps are run, which takes minutes."""
    out: Path = Path("halfbyte-acceptance.json")
    """Where --accept writes its answers."""


def run(args: Args) -> CommandResult:
    from halfbyte.ops import run_gemm_selftest_once

    if args.accept:
        out = validated_output_path(args.out, flag="--out")
    lines = run_acceptance_command() if args.accept else []
    devices = find_devices()
    warning = unused_gpu_hint(os.environ, devices[0]["platform"])
    if warning:
        console().print(f"WARNING: {warning}", style="bold yellow")
    run_gemm_selftest_once(print)
    formats = [row for device in devices for row in format_rows(device)]
    print_device_tables(devices, formats, package_versions())
    checks = run_self_test()
    passed = all(check["passed"] for check in checks) and not any(line["outcome"] == "missed" for line in lines)
    data: dict[str, Any] = {
        "versions": package_versions(),
        "devices": [{key: value for key, value in each.items() if key != "table"} for each in devices],
        "warning": warning,
        "formats": formats,
        "checks": checks,
        "passed": passed,
    }
    if args.accept:
        data["acceptance"] = lines
        write_json(out, data)
        console().print(f"answers: {out}     please send this file with what you think of it")
    return CommandResult(data, EXIT_OK if passed else EXIT_NOT_PASSED)


def run_acceptance_command() -> list[dict[str, Any]]:
    """Answers every line, prints them as they come and then in one table, and gives them as plain data."""
    from halfbyte.cli.hardware_acceptance import ACCEPTANCE_ITEMS, gpus_here, run_acceptance

    out, answered = console(), []
    for line, found, seconds in run_acceptance(gpus_here()):
        answered.append((line, found, seconds))
        out.print(f"[{len(answered)}/{len(ACCEPTANCE_ITEMS)}] {line.name}: {found.outcome} ({seconds:.0f} s)")
    rows = [(line.name, found.outcome, line.claim, found.figure) for line, found, _ in answered]
    out.print(
        rich_table(["line", "outcome", "claim", "figure, reason or command"], rows, title="docs/unverified.md, here")
    )
    return [
        {"name": line.name, "claim": line.claim, **asdict(found), "seconds": round(seconds, 1)}
        for line, found, seconds in answered
    ]


def package_versions() -> dict[str, str]:
    """Version of Python and of every package that numbers depend on; packages that are not installed are left out."""
    found = {"python": platform.python_version(), "halfbyte": halfbyte.__version__}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def find_devices() -> list[dict[str, Any]]:
    """One entry for each kind of device JAX sees, with how many there are and what the device table says of it."""
    import jax

    from halfbyte.devices import lookup

    kinds: dict[tuple[str, str], list[Any]] = {}
    for found in jax.devices():
        kinds.setdefault((found.platform, found.device_kind), []).append(found)
    rows = []
    for (platform_name, kind), members in kinds.items():
        entry = lookup(members[0])
        memory = (members[0].memory_stats() or {}).get("bytes_limit")  # a CPU does not say
        row = {"kind": kind, "platform": platform_name, "count": len(members), "memory_bytes": memory, "table": entry}
        rows.append({**row, "name": entry.name, "capability": entry.capability})
    return rows


def format_rows(device: dict[str, Any]) -> list[dict[str, Any]]:
    """For each unit, and the simplest recipe for it: which backend a large GEMM gets here, whether that is native, and
    what the hardware has.
    """
    from halfbyte.devices import TENSOR_CORE_FORMATS, native_inference, native_training
    from halfbyte.ops import LinearProblem, choose_backend
    from halfbyte.recipes import recipe, recipe_names
    from halfbyte.train.manifest_entries import backend_summary, pass_summary
    from halfbyte.train.precision_manifest import gemm_entries

    entry, rows = device["table"], []
    for name in TENSOR_CORE_FORMATS:
        simplest = next(made for made in map(recipe, recipe_names()) if made.fprop_w.format.hardware_unit == name)
        problem = LinearProblem(simplest, LARGE_GEMM_SIZE, LARGE_GEMM_SIZE, LARGE_GEMM_SIZE, device=entry)
        choice = choose_backend("auto", problem)
        backend, gemms = choice.name, gemm_entries(problem, choice)
        units = native_training(entry, name)
        # Formats with one scale a tensor go into their unit under every backend, block-scaled ones only under `native`.
        native = units and (backend == "native" or simplest.fprop_w.format.block is None)
        hardware = "training" if units else "inference only" if native_inference(entry, name) else "none"
        rows.append(
            {
                "device": entry.name,
                "format": name,
                "training": "native" if native else "emulated, exact",
                "backend": backend_summary(backend, gemms),
                "operands": pass_summary(gemms),
                "gemms": {name: asdict(gemm) for name, gemm in gemms.items()},
                "hardware": hardware,
                "peak_flops": entry.peak.get(name),
            }
        )
    return rows


def print_device_tables(devices: list[dict[str, Any]], formats: list[dict[str, Any]], packages: dict[str, str]) -> None:
    out = console()
    out.print("versions  " + "  ".join(f"{name} {number}" for name, number in packages.items()))
    rows = [(d["table"].name, d["count"], d["kind"], *_geometry(d)) for d in devices]
    out.print(rich_table(["device", "count", "kind", "capability", "memory", "bandwidth"], rows, title="Devices"))
    columns = ["format", "device", "training here", "multiplied by", "operands by", "hardware units", "dense peak"]
    fields = ("format", "device", "training", "backend", "operands", "hardware")
    support = [(*(row[field] for field in fields), _tflops(row["peak_flops"])) for row in formats]
    out.print(rich_table(columns, support, title="Formats"))


def run_self_test() -> list[dict[str, Any]]:
    """Runs and prints the checks; each as plain data."""
    from halfbyte.formats.selftest import VECTORS, self_test

    checks = self_test(VECTORS)
    results = ["pass" if c.passed else f"FAIL: {c.mismatches} differ; first {c.first_mismatch}" for c in checks]
    rows = [(c.name, c.what, c.tensors, c.num_compared, result) for c, result in zip(checks, results, strict=True)]
    title = "Self-test: stored vectors, inside jit, on the default device"
    console().print(rich_table(["quantizer", "what", "tensors", "numbers", "result"], rows, title=title))
    failed = [check.name for check in checks if not check.passed]
    if failed:
        console().print(f"{len(failed)} of {len(checks)} did not pass: {', '.join(failed)}", style="bold red")
    else:
        console().print(f"all {len(checks)} quantizers give the stored bits here")
    return [
        {
            "name": check.name, "what": check.what, "tensors": check.tensors, "compared": check.num_compared,
            "wrong": check.mismatches, "first_wrong": check.first_mismatch, "passed": check.passed,
        }
        for check in checks
    ]  # fmt: skip


def _geometry(device: dict[str, Any]) -> tuple[str, str, str]:
    entry, memory = device["table"], device["memory_bytes"] or device["table"].memory_bytes
    capability = ".".join(map(str, entry.capability)) if entry.capability else "n/a"
    bandwidth = f"{entry.bandwidth / 1e12:.2f} TB/s" if entry.bandwidth else "n/a"
    return capability, f"{memory / GIB:.0f} GiB" if memory else "n/a", bandwidth


def _tflops(flops: float | None) -> str:
    return f"{flops / 1e12:,.0f} TFLOP/s" if flops else "n/a"
