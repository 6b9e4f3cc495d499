"""Going on where a run stopped: the same config or an answer to why not, the newest whole checkpoint, or an error.
Never step 0 in silence."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from halfbyte.checkpoint import CheckpointMismatch, Checkpoints, DamagedCheckpoint, Restored
from halfbyte.inputs.programs import only_named
from halfbyte.recipe.own import same_program

from . import delayed
from .changed import OTHER_CONFIG, OTHER_DATA, data_changes, refuse_or_say
from .config import COSMETIC, GUARDED, TrainConfig
from .guard import Return
from .identity import versions
from .jsonconfig import differences, flatten, from_dict, to_dict
from .state import TrainState, abstract_state, create_state, seed_of

Initial = Callable[[Mesh], Any]  # makes the weights that a run begins with, on its mesh


@dataclass(frozen=True)
class Start:
    """Where the loop begins."""

    state: TrainState
    step: int
    data_state: Mapping[str, Any] | None
    resumed: bool
    goodput: Mapping[str, float] | None = None
    returns: tuple[Return, ...] = ()


def guarded_changes(stored: Mapping[str, Any], config: TrainConfig, *, ignore: Sequence[str] = ()) -> list[str]:
    """`field: old -> new` for every field that decides what is computed."""
    return [
        f"{name}: {_show(old)} -> {_show(new)}"
        for name, old, new in differences(completed(stored), to_dict(config))
        if name.split(".")[0] in GUARDED and name not in (*COSMETIC, *ignore) and not same_program(str(old), str(new))
    ]


def stored_config(restored: Restored) -> Mapping[str, Any]:
    """Returns the config that a checkpoint carries; ValueError if it carries none."""
    stored = restored.extra.get("config")
    if not isinstance(stored, Mapping):
        raise ValueError(f"the checkpoint of step {restored.step} does not say of which config it is; use another one")
    return stored


def completed(stored: Mapping[str, Any]) -> Mapping[str, Any]:
    """A stored config with the fields that later versions have added, at their defaults: a run does not become another
    because the program has learned something new. One that cannot be read as a config is compared as it is."""
    try:
        with only_named():
            return to_dict(from_dict(TrainConfig, stored))
    except ValueError:
        return stored


def _show(value: Any) -> str:
    return "nothing" if value is None else str(value)


def begin(
    config: TrainConfig, mesh: Mesh, store: Checkpoints, *, content: str, allow: bool, say: Callable[[str], None],
    initial: Initial | None = None,
) -> Start:  # fmt: skip
    """The newest whole checkpoint of the run, or a fresh state if it never had one. `content` says what the data set
    holds. Raises ChangedRun when the checkpoint was made under another config or on other data."""
    if not store.steps():
        params = None
        if config.init_from:
            if initial is None:
                raise ValueError(f"init_from is {config.init_from!r}, but nothing was given to read it (initial=...)")
            say(f"weights from {config.init_from}")
            params = initial(mesh)
        return Start(create_state(config, mesh, params), 0, None, resumed=False)
    wanted = abstract_state(config, mesh)
    try:
        restored = store.restore_latest((_as_stored(wanted, store) if allow else wanted).items())
    except CheckpointMismatch as error:
        raise CheckpointMismatch(
            f"{error}\nbegin anew with another --run-dir; --init-from with this directory takes its weights along"
        ) from error
    assert restored is not None
    _check_belongs(restored, config, content=content, allow=allow, say=say)
    if restored.step > config.steps:  # its config and manifest would tell of a shorter run than there was
        raise ValueError(
            f"the run has a checkpoint of step {restored.step}, beyond the last step that is asked for (--steps "
            f"{config.steps}); give --steps {restored.step} or more, or begin anew with another --run-dir"
        )
    store.set_aside(restored.refused)
    if restored.refused:
        say(f"GOING BACK to the checkpoint of step {restored.step}; later steps are computed again")
    return _start(config, mesh, restored)


def _as_stored(wanted: TrainState, store: Checkpoints) -> TrainState:
    """`wanted`, with the history of maxima (`delayed`) that the newest checkpoint holds, wanted or not."""
    try:
        leaves = store.record(store.steps()[-1]).leaves["progress"]
    except DamagedCheckpoint:  # restoring says so
        return wanted
    maxima = delayed.as_stored(leaves, wanted.step.sharding)
    return replace(wanted, delayed=maxima)


def _start(config: TrainConfig, mesh: Mesh, restored: Restored) -> Start:
    state = TrainState.from_items(restored.items, seed=seed_of(config, mesh))
    maxima = delayed.as_wanted(config, state.delayed, NamedSharding(mesh, PartitionSpec()))
    state = replace(state, delayed=maxima)
    extra = restored.extra
    returns = tuple(_return(back) for back in extra.get("returns", ()))
    _check_position(restored.step, extra.get("data"), sum(back.skipped for back in returns))
    return Start(state, restored.step, extra["data"], True, extra.get("goodput"), returns)


def _return(values: Any) -> Return:
    """A return as the record has it: into a precision that a run can fall back to, and nothing else."""
    back = from_dict(Return, values if isinstance(values, Mapping) else {})
    if back.recipe not in ("", "fp8", "bf16") or back.skipped < 0:
        raise ValueError(f"the checkpoint tells of a return that no run makes: {values}; use another checkpoint")
    return back


def _check_position(step: int, data_state: Any, skipped: int) -> None:
    """A step takes one batch; a return may have left some out."""
    at = data_state.get("next_index") if isinstance(data_state, Mapping) else None
    if type(at) is not int or not step <= at <= step + skipped:
        raise ValueError(
            f"the checkpoint of step {step} says that {at} batches have been taken, which cannot be; it was not "
            "written by this run as it is: use another checkpoint"
        )


def _check_belongs(
    restored: Restored, config: TrainConfig, *, content: str, allow: bool, say: Callable[[str], None]
) -> None:
    """The config that the checkpoint itself carries is the run's; config.json may have been damaged or replaced."""
    stored = restored.extra.get("data_set")
    made, ignore = f"the checkpoint of step {restored.step} was made", ("data",) if stored is not None else ()
    what = f"{made} with another configuration than this run asks for"
    changes = guarded_changes(stored_config(restored), config, ignore=ignore)
    refuse_or_say(changes, what=what, remedy=OTHER_CONFIG, allow=allow, say=say)
    changes, what = data_changes(stored, content), f"{made} on other data"
    refuse_or_say(changes, what=what, remedy=OTHER_DATA, allow=allow, say=say)


def common_facts(config: TrainConfig, directory: Path, *, allow_change: bool) -> dict[str, Any]:
    """What every process of a run must have in common before anything is opened: config, place and program."""
    where = {"run_dir": str(directory.absolute()), "allow_change": allow_change}
    return {**flatten(to_dict(config)), **where, **versions()}
