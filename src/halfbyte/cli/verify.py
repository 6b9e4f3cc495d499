"""Read everything that a run has written, and say of each part whether it is whole.

halfbyte verify runs/demo

Every checkpoint is read in full: its files against their list, each array against its checksum, every value for being
finite, its step and run against where it lies, its config against config.json. Then every file that run.json seals
(config.json, tokenizer.json, data.json, imported weights), metrics.jsonl, and the data set if it can be reached. A
checkpoint from before a change by --allow-change is whole, of an earlier config: the run goes on from it with that flag
alone; the newest one must be of config.json. Nothing is changed or moved. Exit code 3 if something is not whole; a run
that trains meanwhile may be verified, and its newest checkpoint may then be missing from the list."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from halfbyte.cli.console import EXIT_NOT_PASSED, EXIT_OK, CommandResult, console, rich_table

if TYPE_CHECKING:
    from halfbyte.train.run_directory import RunDirectory

GOOD, EARLIER, BAD, UNKNOWN = "whole", "whole, of an earlier config", "NOT WHOLE", "not checked"


@dataclass(frozen=True)
class Args:
    """What to read."""

    run: Annotated[str, tyro.conf.Positional]
    """Run directory."""


@dataclass(frozen=True)
class VerifyFinding:
    """One part of a run."""

    part: str
    state: str
    detail: str


def run(args: Args) -> CommandResult:
    """Verify every part and show a table."""
    directory = Path(args.run)
    if not (directory / "config.json").exists():
        raise ValueError(f"{directory} holds no run: there is no config.json")
    opened, sealed = open_run_parts(directory)
    checkpoints = verify_checkpoints(directory, opened)
    findings = [*sealed, *checkpoints, verify_metrics(directory), verify_data(opened)]
    rows = [(finding.part, finding.state, finding.detail) for finding in findings]
    console().print(rich_table(("part", "state", "detail"), rows, title=f"verify {directory}"))
    bad = [finding for finding in findings if finding.state == BAD]
    good = [finding.part for finding in findings if finding.state == GOOD and finding.part.startswith("checkpoint")]
    first = ", ".join(finding.part for finding in sealed if finding.state == BAD)
    after = f", once {first} is as it was" if first and good else ""
    print(f"{len(bad)} parts are not whole; the run goes on from: {good[-1] if good else 'no checkpoint'}{after}")
    data = {"run_dir": str(directory), "parts": [vars(finding) for finding in findings], "not_whole": len(bad)}
    return CommandResult(data, EXIT_NOT_PASSED if bad else EXIT_OK)


def open_run_parts(directory: Path) -> "tuple[RunDirectory | None, list[VerifyFinding]]":
    """The run, None if its config or identity cannot be read, and every file that its seal covers."""
    from halfbyte.io.trusted_programs import UntrustedProgramError
    from halfbyte.train.run_directory import check_run_files_regular, open_run_directory

    check_run_files_regular(directory)
    try:
        opened = open_run_directory(directory, check=False, say=lambda text: None)
        opened.config  # noqa: B018 (read here, so that what is wrong with it is said)
    except UntrustedProgramError:
        raise
    except ValueError as error:
        return None, [VerifyFinding("config.json, run.json", BAD, str(error))]
    changed = {*opened.modified_files(), *opened.modified_files(origin=True)}
    facts = dict.fromkeys(opened.seal, (GOOD, f"run {opened.identity.run}" if opened.identity else ""))
    facts |= dict.fromkeys(changed, (BAD, "it is not what the run wrote: edited, or changed by the disk"))
    unsealed = "no seal covers it (run.json is gone, or of an earlier version)"
    facts |= dict.fromkeys(opened.unsealed_files(), (UNKNOWN, unsealed))
    return opened, [VerifyFinding(name, *fact) for name, fact in facts.items()]


def verify_checkpoints(directory: Path, opened: "RunDirectory | None") -> list[VerifyFinding]:
    """Every committed checkpoint, read in full."""
    from halfbyte.checkpoint import CheckpointManager

    folder = directory / "checkpoints"
    if not folder.is_dir():
        return [VerifyFinding("checkpoints", UNKNOWN, "there are none")]
    try:
        store = CheckpointManager(folder, run=opened.identity.run if opened and opened.identity else None)
    except ValueError as error:  # a pipe, which nobody waits for
        return [VerifyFinding("checkpoints", BAD, str(error))]
    found = [_check_one(store, step, opened) for step in store.steps()]
    if found and all(finding.state == UNKNOWN for finding in found):  # a run that trains has others by now
        store.reload()
        found = [_check_one(store, step, opened) for step in store.steps()]
    store.close()
    agrees = bool(found) and found[-1].state == GOOD  # the newest, with config.json; else that one is the stranger
    found = [replace(each, state=BAD) if each.state == EARLIER and not agrees else each for each in found]
    return found or [VerifyFinding("checkpoints", UNKNOWN, "there are none")]


def _check_one(store: Any, step: int, opened: "RunDirectory | None") -> VerifyFinding:
    from halfbyte.checkpoint import (
        CheckpointDeletedError,
        CheckpointReadError,
        CheckpointStructureError,
        CorruptCheckpointError,
        hold_for_reading,
    )
    from halfbyte.train.preflight import OutOfMemoryEstimateError, check_fits_memory
    from halfbyte.train.resume import guarded_changes, stored_config

    part = f"checkpoint {step}"
    try:
        with hold_for_reading(store.directory / str(step)):
            record = store.record(step)
            wanted = abstract_of(record)
            check_fits_memory(wanted)
            restored = store.restore(step, wanted)
        stored = stored_config(restored)
        changed = guarded_changes(stored, opened.config, ignore=("data",)) if opened else []
    except CheckpointDeletedError:
        return VerifyFinding(part, UNKNOWN, "the run trains, and has deleted it meanwhile")
    except OutOfMemoryEstimateError as error:
        return VerifyFinding(part, UNKNOWN, str(error))
    except (CorruptCheckpointError, CheckpointReadError, CheckpointStructureError, ValueError) as error:
        return VerifyFinding(part, BAD, str(error))
    if changed:
        return VerifyFinding(part, EARLIER, f"made with another config: {'; '.join(changed[:3])}")
    arrays = sum(map(len, record.leaves.values()))
    return VerifyFinding(part, GOOD, f"{arrays} arrays, checksums and values verified")


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


def verify_metrics(directory: Path) -> VerifyFinding:
    """metrics.jsonl: one row a step, in order."""
    from halfbyte.train import missing_steps, read_rows, read_rows_until

    path = directory / "metrics.jsonl"
    if not path.exists():
        return VerifyFinding("metrics.jsonl", UNKNOWN, "there is none")
    # Before the rows: a run that trains writes a step's row, then its checkpoint.
    newest = max((int(name) for path in directory.glob("checkpoints/*") if (name := path.name).isdigit()), default=0)
    try:
        rows, damaged = read_rows(path), len(read_rows_until(path, 0).damaged)
    except ValueError as error:
        return VerifyFinding("metrics.jsonl", BAD, str(error))
    steps = [row.get("step") for row in rows]
    if steps == list(range(1, len(steps) + 1)) and damaged <= 1:
        if newest > len(steps):
            return VerifyFinding(
                "metrics.jsonl", BAD, f"it ends at step {len(steps)}, the newest checkpoint is {newest}"
            )
        return VerifyFinding("metrics.jsonl", GOOD, f"{len(steps)} rows")
    missing, first, last = missing_steps(rows, max(filter(None, steps), default=0))
    gaps = f"{missing} of {first} to {last}" if missing else "none"
    return VerifyFinding("metrics.jsonl", BAD, f"{damaged} lines unreadable, steps missing: {gaps}")


def verify_data(opened: "RunDirectory | None") -> VerifyFinding:
    """The data set against the content that the run began with."""
    from halfbyte.train.run_identity import ChangedRun

    if opened is None or opened.identity is None:
        return VerifyFinding("data set", UNKNOWN, "the run has no run.json, or none that can be read")
    try:
        opened.source()
    except ChangedRun as change:
        return VerifyFinding("data set", BAD, str(change))
    except (ValueError, OSError) as error:
        return VerifyFinding("data set", UNKNOWN, " ".join(str(error).split()))
    return VerifyFinding("data set", GOOD, opened.identity.data)
