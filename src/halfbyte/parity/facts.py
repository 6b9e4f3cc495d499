"""Where the numbers of a report come from: data, versions, devices, precision."""

import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from halfbyte import report as page
from halfbyte.train import TrainConfig
from halfbyte.train.identity import Identity, load_identity, versions

from .cells import manifest_of, run_directory
from .plan import Plan


def environment(config: TrainConfig, run: Identity | None, device: str) -> dict[str, str]:
    """Data, device and versions of a run; its data by the hash of what they hold."""
    programs = versions() | {name: metadata.version(name) for name in ("numpy", "optax")}
    programs["Python"] = platform.python_version()
    return {
        "data": f"{config.data} ({run.data})" if run else config.data,
        "device": device or "nothing has run yet",
        "versions": ", ".join(f"{name} {version}" for name, version in programs.items()),
        "backend of this report": jax.default_backend(),
    }


def first_begun(plan: Plan, directory: Path) -> Identity | None:
    """The identity of the first run of a plan that has one: all runs have the same data."""
    known = (load_identity(run_directory(directory, arm, seed)) for arm, seed in plan.jobs())
    return next(filter(None, known), None)


def devices(plan: Plan, directory: Path) -> str:
    manifests = (manifest_of(run_directory(directory, arm, seed)) for arm, seed in plan.jobs())
    return ", ".join(sorted({manifest["device"] for manifest in manifests if manifest}))


def precision_table(plan: Plan, directory: Path) -> str:
    """What every quantized GEMM of every arm is, from the precision manifests."""
    rows = []
    for arm in plan.arms:
        manifest = next((m for seed in plan.seeds if (m := manifest_of(run_directory(directory, arm, seed)))), None)
        rows += manifest_rows(manifest, arm.name) if manifest else []
    return page.table(("arm", "linears", "recipe", "fprop", "dgrad", "wgrad", "runs", "FLOPs in 4 bits"), rows)


def manifest_rows(manifest: dict[str, Any], name: str) -> list[tuple[str, ...]]:
    """One row a recipe and phase of a manifest."""
    rows = []
    for phase in manifest.get("phases", [manifest]):
        groups: dict[tuple[str, ...], list[str]] = {}
        for site in phase["sites"]:
            gemms = [f"{g['left']} × {g['right']}" for g in site["gemms"].values()]
            runs = "/".join(sorted({g["execution"] for g in site["gemms"].values()}))
            path = site["path"].removeprefix("layers/")
            where = path if site["layers"][1] == 1 else f"{path} {site['layers'][0]}-{site['layers'][1] - 1}"
            groups.setdefault((site["recipe"], *gemms, f"{runs} ({site['backend']})"), []).append(where)
        share = f"{100 * phase['share_4bit']:.1f}%"
        rows += [(name, ", ".join(where), *key, share) for key, where in groups.items() if key[0] != "bf16"]
    return rows or [(name, "all", "bf16", "", "", "", "plain", "0.0%")]
