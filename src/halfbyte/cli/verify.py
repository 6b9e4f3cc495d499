"""Read everything that a run has written, and say of each part whether it is whole.

halfbyte verify runs/demo

Every checkpoint is read in full: its files against their list, each array against its checksum, every value for being
finite, its step and run against where it lies, its config against config.json. Then run.json, config.json,
metrics.jsonl, and the data set if it can be reached. Nothing is changed or moved. Exit code 3 if something is not
whole; a run that trains meanwhile may be verified, and its newest checkpoint may then be missing from the list."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from halfbyte.cli.result import DONE, NOT_PASSED, Result

if TYPE_CHECKING:
    from halfbyte.train import TrainConfig

GOOD, BAD, UNKNOWN = "whole", "NOT WHOLE", "not checked"


@dataclass(frozen=True)
class Args:
    """What to read."""

    run: Annotated[str, tyro.conf.Positional]
    """Run directory."""


@dataclass(frozen=True)
class Finding:
    """One part of a run."""

    part: str
    state: str
    detail: str


def run(args: Args) -> Result:
    """Verify every part and show a table."""
    from halfbyte.cli.screen import console, table

    directory = Path(args.run)
    if not (directory / "config.json").exists():
        raise ValueError(f"{directory} holds no run: there is no config.json")
    findings = [
        *check_config(directory),
        *check_checkpoints(directory),
        check_metrics(directory),
        check_data(directory),
    ]
    rows = [(finding.part, finding.state, finding.detail) for finding in findings]
    console().print(table(("part", "state", "detail"), rows, title=f"verify {directory}"))
    bad = [finding for finding in findings if finding.state == BAD]
    good = [finding.part for finding in findings if finding.state == GOOD and finding.part.startswith("checkpoint")]
    print(f"{len(bad)} parts are not whole; the run goes on from: {good[-1] if good else 'no checkpoint'}")
    data = {"run_dir": str(directory), "parts": [vars(finding) for finding in findings], "not_whole": len(bad)}
    return Result(data, NOT_PASSED if bad else DONE)


def check_config(directory: Path) -> list[Finding]:
    """config.json against the hash in run.json."""
    from halfbyte.train.identity import hash_of, load_identity

    try:
        load_config(directory)
        identity = load_identity(directory)
    except ValueError as error:
        return [Finding("config.json, run.json", BAD, str(error))]
    if identity is None:
        return [Finding("config.json", UNKNOWN, "the run has no run.json (an earlier version)")]
    same = hash_of(directory / "config.json") in identity.config_sha256.split()
    words = f"run {identity.run}" if same else "it is not what the run wrote: edited, or changed by the disk"
    return [Finding("config.json", GOOD if same else BAD, words)]


def load_config(directory: Path) -> "TrainConfig":
    """The run's own config."""
    from halfbyte.train import TrainConfig, jsonconfig

    return jsonconfig.load(TrainConfig, directory / "config.json")


def check_checkpoints(directory: Path) -> list[Finding]:
    """Every committed checkpoint, read in full."""
    from halfbyte.checkpoint import Checkpoints
    from halfbyte.train.identity import load_identity

    folder = directory / "checkpoints"
    if not folder.is_dir():
        return [Finding("checkpoints", UNKNOWN, "there are none")]
    try:
        identity = load_identity(directory)
    except ValueError:
        identity = None
    store = Checkpoints(folder, run=identity.run if identity else None)
    found = [_check_one(store, step, directory) for step in store.steps()]
    store.close()
    return found or [Finding("checkpoints", UNKNOWN, "there are none")]


def _check_one(store: Any, step: int, directory: Path) -> Finding:
    from halfbyte.checkpoint import CheckpointMismatch, DamagedCheckpoint, UnreadableCheckpoint
    from halfbyte.train.resume import guarded_changes

    part = f"checkpoint {step}"
    try:
        record = store.record(step)
        restored = store.restore(step, abstract_of(record))
        changed = guarded_changes(restored.extra["config"], load_config(directory), ignore=("data",))
    except (DamagedCheckpoint, UnreadableCheckpoint, CheckpointMismatch, ValueError) as error:
        return Finding(part, BAD, str(error))
    if changed:
        return Finding(part, BAD, f"made with another config: {'; '.join(changed[:3])}")
    arrays = sum(map(len, record.leaves.values()))
    return Finding(part, GOOD, f"{arrays} arrays, checksums and values verified")


def abstract_of(record: Any) -> dict[str, Any]:
    """What a checkpoint says it holds, to be read onto one device."""
    import jax

    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return {
        item: {
            name: jax.ShapeDtypeStruct(tuple(leaf["shape"]), leaf["dtype"], sharding=here)
            for name, leaf in leaves.items()
        }
        for item, leaves in record.leaves.items()
    }


def check_metrics(directory: Path) -> Finding:
    """metrics.jsonl: one row a step, in order."""
    from halfbyte.metrics import read_rows

    path = directory / "metrics.jsonl"
    if not path.exists():
        return Finding("metrics.jsonl", UNKNOWN, "there is none")
    lines = len([line for line in path.read_bytes().split(b"\n") if line])
    steps = [row.get("step") for row in read_rows(path)]
    if steps == list(range(1, len(steps) + 1)) and lines - len(steps) <= 1:
        return Finding("metrics.jsonl", GOOD, f"{len(steps)} rows")
    missing = sorted(set(range(1, max(filter(None, steps), default=0) + 1)) - set(steps))
    return Finding(
        "metrics.jsonl", BAD, f"{lines - len(steps)} lines unreadable, steps missing: {missing[:5] or 'none'}"
    )


def check_data(directory: Path) -> Finding:
    """The data set against the content that the run began with."""
    from halfbyte.train import open_source
    from halfbyte.train.identity import fingerprint, load_identity

    try:
        identity, config = load_identity(directory), load_config(directory)
        content = fingerprint(open_source(config).dataset)
    except (ValueError, OSError) as error:
        return Finding("data set", UNKNOWN, " ".join(str(error).split()))
    if identity is None:
        return Finding("data set", UNKNOWN, "the run has no run.json (an earlier version)")
    same = identity.data == content
    return Finding("data set", GOOD if same else BAD, content if same else f"{config.data} holds something else now")
