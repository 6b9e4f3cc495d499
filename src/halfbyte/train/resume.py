"""Going on where a run stopped: the same config or an answer to why not, the newest whole checkpoint, or an error.
Never step 0 in silence."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from halfbyte.checkpoint import Checkpoints

from .config import GUARDED, TrainConfig
from .jsonconfig import differences, to_dict
from .state import TrainState, abstract_state, create_state


class ChangedConfig(ValueError):
    """The run directory belongs to a run that computes something else."""


@dataclass(frozen=True)
class Start:
    """Where the loop begins."""

    state: TrainState
    step: int
    data_state: Mapping[str, Any] | None
    resumed: bool


def check_unchanged(stored: Mapping[str, Any], config: TrainConfig, *, allow: bool, say: Callable[[str], None]) -> None:
    """Raise ChangedConfig, field by field, when a guarded field differs from the run's own config; with `allow`, say
    it instead."""
    current = to_dict(config)
    changed = differences(stored, current)
    guarded = [(name, old, new) for name, old, new in changed if name.split(".")[0] in GUARDED and not _cosmetic(name)]
    lines = [f"{name}: {_show(old)} -> {_show(new)}" for name, old, new in guarded]
    if lines and not allow:
        listing = "\n  ".join(lines)
        raise ChangedConfig(
            f"this run directory was started with another configuration:\n  {listing}\n"
            "give --allow-change to go on with the new values, or another --run-dir"
        )
    for line in lines:
        say(f"changed, as allowed: {line}")
    for name, old, new in changed:
        if name == "steps":
            say(f"steps {old} -> {new}: the learning-rate schedule now ends at step {new}")


def _cosmetic(name: str) -> bool:
    return name in ("model.name", "precision.backend")


def _show(value: Any) -> str:
    return "nothing" if value is None else str(value)


def begin(config: TrainConfig, mesh: Mesh, store: Checkpoints, *, say: Callable[[str], None]) -> Start:
    """The newest whole checkpoint of the run, or a fresh state if it never had one."""
    if not store.steps():
        return Start(create_state(config, mesh), 0, None, resumed=False)
    restored = store.restore_latest(abstract_state(config, mesh).items())
    assert restored is not None
    store.set_aside(restored.refused)
    if restored.refused:
        say(f"GOING BACK to the checkpoint of step {restored.step}; later steps are computed again")
    return Start(TrainState.from_items(restored.items), restored.step, restored.extra["data"], resumed=True)


def refuse_foreign_directory(directory: Path) -> None:
    """Raise ValueError if `directory` holds files but no run: nothing of somebody else's is overwritten."""
    if not directory.exists():
        return
    names = sorted(path.name for path in directory.iterdir() if path.name != ".lock")
    if names and "config.json" not in names:
        raise ValueError(
            f"run directory {directory} is not empty and holds no run (found {', '.join(names[:4])}); "
            "give another --run-dir"
        )
