"""Resumes a run from its newest intact checkpoint, under the same config and data or with an error; and goodput.

A run with a checkpoint never restarts at step 0 silently.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from halfbyte.checkpoint import CheckpointManager, CheckpointStructureError, CorruptCheckpointError, RestoredCheckpoint
from halfbyte.io.dataclass_json import field_differences, flatten_dotted, from_dict, to_dict
from halfbyte.io.trusted_programs import trust_only_named_programs
from halfbyte.recipes.user_recipes import is_same_program
from halfbyte.train import dynamic_scaling
from halfbyte.train.metrics_log import parse_metric
from halfbyte.train.nan_guard import Rollback
from halfbyte.train.run_identity import OTHER_CONFIG, OTHER_DATA, data_changes, refuse_or_say, software_versions
from halfbyte.train.train_config import RESUME_GUARDED_FIELDS, RESUME_IGNORED_FIELDS, TrainConfig
from halfbyte.train.train_state import TrainState, abstract_state, create_state, rounding_seed_array

InitialParamsFn = Callable[[Mesh], Any]  # returns the initial weights of a run, on its mesh


@dataclass(frozen=True)
class ResumePoint:
    """State and position with which the loop starts."""

    state: TrainState
    step: int
    data_state: Mapping[str, Any] | None
    resumed: bool
    goodput: Mapping[str, float] | None = None
    rollbacks: tuple[Rollback, ...] = ()


@dataclass
class Goodput:
    """Seconds since the first start of a run (wall-clock time `began`), by use.

        productive   steps that are part of the run now, without the wait for their data
        lost         steps that were computed and discarded: after a kill, a rollback, a corrupt checkpoint
        waiting      all other time: start, compile, data, saves, validation, and the time between processes

    The three add up to the wall-clock time. The sums are stored in checkpoints; what a crash discarded is read from the
    rows that the resumed run drops.
    """

    began: float
    productive: float = 0.0
    lost: float = 0.0
    clock: Callable[[], float] = time.time

    @classmethod
    def resumed(cls, stored: Mapping[str, float] | None, dropped: Iterable[Mapping[str, Any]]) -> "Goodput":
        """Continues from the sums in a checkpoint; starts at zero if they are None or invalid.

        The time of `dropped` rows counts as lost.
        """
        stored = stored if isinstance(stored, Mapping) else {}
        began, productive, lost = (parse_metric(stored.get(name)) for name in ("began", "productive", "lost"))
        goodput = cls(began, productive, lost) if math.isfinite(began + productive + lost) else cls(time.time())
        goodput.lost += sum(productive_seconds(row) for row in dropped)
        return goodput

    def step(self, row: Mapping[str, Any]) -> dict[str, float]:
        """Counts a step; returns the goodput of the run so far for its row."""
        self.productive += productive_seconds(row)
        return {"goodput": self.productive / max(self.total, 1e-9)}

    def discard_since(self, since: float) -> None:
        """Counts the steps after a checkpoint as lost, because the run rolled back to it.

        `since` are the productive seconds at that checkpoint.
        """
        self.lost += self.productive - since
        self.productive = since

    @property
    def total(self) -> float:
        """Seconds since the run first began."""
        return max(self.clock() - self.began, self.productive + self.lost)

    @property
    def overhead(self) -> float:
        """Seconds that were neither productive nor lost."""
        return self.total - self.productive - self.lost

    def to_json(self) -> dict[str, float]:
        """Returns the sums that a checkpoint stores."""
        return {"began": self.began, "productive": self.productive, "lost": self.lost}

    def __str__(self) -> str:
        parts = {"productive": self.productive, "lost": self.lost, "waiting": self.overhead}
        shares = ", ".join(
            f"{name} {100 * seconds / self.total:.1f}% ({seconds:.1f} s)" for name, seconds in parts.items()
        )
        return f"goodput of {self.total:.1f} s: {shares}"


def resume_or_initialize(
    config: TrainConfig, mesh: Mesh, store: CheckpointManager, *, content: str, allow: bool, say: Callable[[str], None],
    initial: InitialParamsFn | None = None,
) -> ResumePoint:  # fmt: skip
    """Restores the newest intact checkpoint of the run, or initializes a state if the run has none.

    `content` is the fingerprint of the data set. Raises ChangedRun if the checkpoint was written under another config
    or on other data.
    """
    if not store.steps():
        params = None
        if config.init_from:
            if initial is None:
                raise ValueError(f"init_from is {config.init_from!r}, but nothing was given to read it (initial=...)")
            say(f"weights from {config.init_from}")
            params = initial(mesh)
        return ResumePoint(create_state(config, mesh, params), 0, None, resumed=False)
    template = abstract_state(config, mesh)
    try:
        restored = store.restore_latest((_checkpoint_template(template, store) if allow else template).items())
    except CheckpointStructureError as error:
        raise CheckpointStructureError(
            f"{error}\nbegin anew with another --run-dir; --init-from with this directory takes its weights along"
        ) from error
    assert restored is not None
    _check_belongs(restored, config, content=content, allow=allow, say=say)
    if restored.step > config.steps:  # its config and manifest would describe a shorter run
        raise ValueError(
            f"the run has a checkpoint of step {restored.step}, beyond the last step that is asked for (--steps "
            f"{config.steps}); give --steps {restored.step} or more, or begin anew with another --run-dir"
        )
    store.quarantine(restored.skipped)
    if restored.skipped:
        say(f"GOING BACK to the checkpoint of step {restored.step}; later steps are computed again")
    return _resume_from(config, mesh, restored)


def facts_equal_on_all_ranks(config: TrainConfig, directory: Path, *, allow_change: bool) -> dict[str, Any]:
    """Returns what must be equal on all processes before anything is opened: config, run directory and versions."""
    where = {"run_dir": str(directory.absolute()), "allow_change": allow_change}
    return {**flatten_dotted(to_dict(config)), **where, **software_versions()}


def guarded_changes(stored: Mapping[str, Any], config: TrainConfig, *, ignore: Sequence[str] = ()) -> list[str]:
    """Returns `field: old -> new` for every changed field that decides what is computed."""
    return [
        f"{name}: {_show(old)} -> {_show(new)}"
        for name, old, new in field_differences(fill_new_fields(stored), to_dict(config))
        if name.split(".")[0] in RESUME_GUARDED_FIELDS
        and name not in (*RESUME_IGNORED_FIELDS, *ignore)
        and not is_same_program(str(old), str(new))
    ]


def stored_config(restored: RestoredCheckpoint) -> Mapping[str, Any]:
    """Returns the config in a checkpoint; raises ValueError if it has none."""
    stored = restored.extra.get("config")
    if not isinstance(stored, Mapping):
        raise ValueError(f"the checkpoint of step {restored.step} does not say of which config it is; use another one")
    return stored


def fill_new_fields(stored: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a stored config with defaults for the fields of later versions, which do not count as changes.

    A config that cannot be parsed is returned unchanged.
    """
    try:
        with trust_only_named_programs():
            return to_dict(from_dict(TrainConfig, stored))
    except ValueError:
        return stored


def productive_seconds(row: Mapping[str, Any]) -> float:
    """Returns the seconds of a step without the wait for its data."""
    return max(0.0, parse_metric(row.get("step_time_s", 0.0)) - parse_metric(row.get("input_wait_s", 0.0)))


def _show(value: Any) -> str:
    return "nothing" if value is None else str(value)


def _checkpoint_template(template: TrainState, store: CheckpointManager) -> TrainState:
    """Returns `template` with the amax history (`delayed`) of the newest checkpoint."""
    try:
        leaves = store.record(store.steps()[-1]).leaves["progress"]
    except CorruptCheckpointError:  # restoring raises the error
        return template
    history = dynamic_scaling.history_template_of_checkpoint(leaves, template.step.sharding)
    return replace(template, delayed=history)


def _resume_from(config: TrainConfig, mesh: Mesh, restored: RestoredCheckpoint) -> ResumePoint:
    state = TrainState.from_items(restored.items, seed=rounding_seed_array(config, mesh))
    history = dynamic_scaling.adapt_history(config, state.delayed, NamedSharding(mesh, PartitionSpec()))
    state = replace(state, delayed=history)
    extra = restored.extra
    rollbacks = tuple(_parse_rollback(values) for values in extra.get("returns", ()))
    _check_position(restored.step, extra.get("data"), sum(rollback.skipped for rollback in rollbacks))
    return ResumePoint(state, restored.step, extra["data"], True, extra.get("goodput"), rollbacks)


def _parse_rollback(values: Any) -> Rollback:
    """Parses a rollback of a checkpoint. Raises ValueError unless its recipe is one that a run can fall back to."""
    rollback = from_dict(Rollback, values if isinstance(values, Mapping) else {})
    if rollback.recipe not in ("", "fp8", "bf16") or rollback.skipped < 0:
        raise ValueError(f"the checkpoint tells of a return that no run makes: {values}; use another checkpoint")
    return rollback


def _check_position(step: int, data_state: Any, skipped: int) -> None:
    """Raises ValueError unless the data position is `step` plus at most the batches that rollbacks have skipped."""
    index = data_state.get("next_index") if isinstance(data_state, Mapping) else None
    if type(index) is not int or not step <= index <= step + skipped:
        raise ValueError(
            f"the checkpoint of step {step} says that {index} batches have been taken, which cannot be; it was not "
            "written by this run as it is: use another checkpoint"
        )


def _check_belongs(
    restored: RestoredCheckpoint, config: TrainConfig, *, content: str, allow: bool, say: Callable[[str], None]
) -> None:
    """Compares config and data of the checkpoint with those of the run: config.json may have been replaced."""
    stored = restored.extra.get("data_set")
    subject, ignore = f"the checkpoint of step {restored.step} was made", ("data",) if stored is not None else ()
    what = f"{subject} with another configuration than this run asks for"
    changes = guarded_changes(stored_config(restored), config, ignore=ignore)
    refuse_or_say(changes, what=what, remedy=OTHER_CONFIG, allow=allow, say=say)
    changes, what = data_changes(stored, content), f"{subject} on other data"
    refuse_or_say(changes, what=what, remedy=OTHER_DATA, allow=allow, say=say)
