"""Plan of a study, plan.json: written before the first step and not changed afterwards.

It fixes the base run, the arms, the margin, the outcome and the interim looks. Adding seeds until the result is clear
would pass a bad candidate three times as often as the significance level states. A study that continues in the same
directory must have the same plan. Seeds added later are run and shown, but no verdict counts them. The exception is a
plan of one or two seeds: it may add the missing seeds of its only look, after three.
"""

import datetime
import fcntl
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from halfbyte.io import check_int, dataclass_json, open_no_follow, read_json, write_json
from halfbyte.io.trusted_programs import trust_only_named_programs
from halfbyte.study.arms import BASELINE, CANDIDATE, Arm, config_mismatches
from halfbyte.study.equivalence_test import MIN_SEEDS, EquivalenceMargin, alpha_spending, parse_margin
from halfbyte.train import LogConfig, TrainConfig, phases
from halfbyte.train.run_identity import text_sha256

PLAN_FILE, LOCK, SEAL = "plan.json", ".lock", "seal"
PLAN_VERSION, UNSEALED = 3, 2
SUPPORTED_VERSIONS = (1, UNSEALED, PLAN_VERSION)  # version 1 had no looks
OUTCOME_TEXT = "validation loss after the last step, nats a token, each arm under its own forward recipe"


@dataclass(frozen=True)
class StudyPlan:
    """Plan of a study: what is run and how it is judged.

    Args:
        looks: numbers of seeds after which the arms are judged, at least MIN_SEEDS; by default all seeds.
        sealed: False for a plan of a version that did not detect edits.
    """

    base: TrainConfig
    arms: tuple[Arm, ...]
    seeds: tuple[int, ...]
    margin: EquivalenceMargin
    written: str = ""
    command: str = ""
    looks: tuple[int, ...] = ()
    sealed: bool = True

    def __post_init__(self) -> None:
        names = [arm.name for arm in self.arms]
        if len(set(names)) < len(names):
            duplicate = next(name for name in names if names.count(name) > 1)
            if duplicate in [arm.name for arm in self.arms if arm.kind == BASELINE]:
                raise ValueError(f"{duplicate!r} is the baseline itself; leave it out, or name another --baseline")
            raise ValueError(f"two arms are called {duplicate!r}; give each candidate once")
        if [arm.kind for arm in self.arms].count(BASELINE) != 1:
            raise ValueError("a parity has exactly one baseline; give --baseline RECIPE")
        if not any(arm.kind == CANDIDATE for arm in self.arms):
            raise ValueError("there is no candidate to compare; give --candidates RECIPE,... or --arms ablation")
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds must be different numbers, at least one, got {list(self.seeds)}")
        if not self.looks:
            object.__setattr__(self, "looks", (max(MIN_SEEDS, len(self.seeds)),))
        max_look = max(MIN_SEEDS, len(self.seeds))
        if list(self.looks) != sorted(set(self.looks)) or self.looks[0] < MIN_SEEDS or self.looks[-1] > max_look:
            raise ValueError(
                f"looks must be rising numbers of seeds, from {MIN_SEEDS} to {max_look} (--seeds), got {self.looks}"
            )
        self._check_arms()

    def _check_arms(self) -> None:
        """Validate that every arm is a run, differs from the base only in precision, and differs from the other
        arms."""
        arm_by_config: dict[TrainConfig, str] = {}
        for arm in self.arms:
            config = arm.configure(self.base, self.seeds[0])
            phases(config)
            differences = config_mismatches(dataclass_json.to_dict(self.base), dataclass_json.to_dict(config))
            if differences:
                raise ValueError(f"arm {arm.name!r} differs in {differences[0][0]}, which is not precision")
            if config in arm_by_config:
                raise ValueError(f"arms {arm_by_config[config]!r} and {arm.name!r} are the same run; leave one out")
            arm_by_config[config] = arm.name

    @property
    def baseline(self) -> Arm:
        return next(arm for arm in self.arms if arm.kind == BASELINE)

    def of_kind(self, kind: str) -> list[Arm]:
        return [arm for arm in self.arms if arm.kind == kind]

    def seeds_of(self, arm: Arm) -> tuple[int, ...]:
        """Returns the seeds that an arm is run with: all, or its first `arm.seeds`."""
        return self.seeds[: arm.seeds]

    def jobs(self, seeds: int | None = None) -> list[tuple[Arm, int]]:
        """Returns every run of the first `seeds` seeds, ordered by seed, so that an interrupted study has complete
        pairs."""
        return [(arm, seed) for seed in self.seeds[:seeds] for arm in self.arms if seed in self.seeds_of(arm)]

    def to_json(self) -> dict[str, Any]:
        return {
            "version": PLAN_VERSION if self.sealed else UNSEALED,
            "written": self.written,
            "command": self.command,
            "outcome": OUTCOME_TEXT,
            "margin": str(self.margin),
            "seeds": list(self.seeds),
            "looks": list(self.looks),
            "levels": list(alpha_spending(self.looks)),
            "candidates": len(self.of_kind(CANDIDATE)),
            "arms": [asdict(arm) for arm in self.arms],
            "base": dataclass_json.to_dict(self.base),
        }


def plan_from_json(data: Any, where: str) -> StudyPlan:
    """Returns the plan in a JSON value. Raises ValueError if it is not one."""
    if not isinstance(data, dict) or data.get("version") not in SUPPORTED_VERSIONS:
        raise ValueError(f"{where} is not a parity plan of version {' or '.join(map(str, SUPPORTED_VERSIONS))}")
    if data.get("screen"):
        raise ValueError(
            f"{where} has a screening round, which this version does not run; begin anew in another directory and "
            "name the recipes with --recipes"
        )
    try:
        arms = tuple(Arm(a["name"], a["kind"], a["changes"], a.get("note", ""), a.get("seeds")) for a in data["arms"])
        base = dataclass_json.from_dict(TrainConfig, data["base"])
        seeds = tuple(int(seed) for seed in data["seeds"])
        margin = parse_margin(data["margin"])
        # Version 1 had no looks: seeds could be added until the result was clear, so only MIN_SEEDS count as planned.
        looks = tuple(map(int, data.get("looks", (MIN_SEEDS,))))
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"{where} is damaged: {type(error).__name__} {error}; begin anew in another directory"
        ) from None
    metadata, sealed = (data.get("written", ""), data.get("command", "")), data["version"] > UNSEALED
    return StudyPlan(base, arms, seeds, margin, *metadata, looks, sealed)


def load_plan(directory: Path) -> StudyPlan | None:
    """Returns the plan of a study directory, None if it has none. Raises ValueError if it was changed after it was
    written."""
    path = directory / PLAN_FILE
    if not path.is_file():
        return None
    data = read_json(path)
    if isinstance(data, dict) and (data.get("version") == PLAN_VERSION or SEAL in data):
        _check_seal(data, path)
    with trust_only_named_programs():
        return plan_from_json(data, str(path))


def write_or_check_plan(directory: Path, plan: StudyPlan) -> StudyPlan:
    """Returns the plan of `directory`: `plan`, written now, or the stored one, which `plan` must match. Further seeds
    are added to the stored plan and its looks are unchanged. If several hosts start at once, one writes the plan and
    the others must match it."""
    directory.mkdir(parents=True, exist_ok=True)
    names = {path.name for path in directory.iterdir() if path.name != LOCK and path.suffix != ".tmp"}
    if names and PLAN_FILE not in names:
        raise ValueError(f"{directory} is not empty and holds no {PLAN_FILE}; give another --out")
    # Hosts that start at once must not both find no plan: the first one to have the lock writes it.
    with open(directory / LOCK, "a", encoding="utf-8", opener=open_no_follow) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        stored = load_plan(directory)
        if stored is None:
            now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            return _write(directory, replace(plan, written=plan.written or now))
        refuse_changes(directory, stored, plan)
        new_seeds = tuple(seed for seed in plan.seeds if seed not in stored.seeds)
        return _write(directory, replace(stored, seeds=(*stored.seeds, *new_seeds))) if new_seeds else stored


def _write(directory: Path, plan: StudyPlan) -> StudyPlan:
    data = plan.to_json()
    write_json(directory / PLAN_FILE, data | {SEAL: _seal(data)} if plan.sealed else data)
    return plan


def _check_seal(data: Mapping[str, Any], path: Path) -> None:
    if data.get(SEAL) != _seal(data):
        raise ValueError(
            f"{path} was changed after it was written: it does not match its seal, and nobody knows what was planned "
            "before the first step. Restore it from a copy, or begin anew with another --out"
        )


def _seal(data: Mapping[str, Any]) -> str:
    """Returns the sha256 of the plan's values without the seal, independent of indentation."""
    return text_sha256(json.dumps({name: value for name, value in data.items() if name != SEAL}, sort_keys=True))


def refuse_changes(directory: Path, stored: StudyPlan, plan: StudyPlan) -> None:
    """Raise ValueError, with the difference, if `plan` is not the stored one."""
    if stored.margin != plan.margin:
        raise ValueError(
            f"{directory} was planned with margin {stored.margin} on {stored.written}; a margin is not changed after "
            f"runs "
            f"have begun (got {plan.margin}). Go on with --margin {stored.margin}, or begin anew with another --out"
        )
    if len(plan.looks) > 1 and stored.looks != plan.looks:
        raise ValueError(
            f"{directory} was planned to be looked at after {_looks_text(stored.looks)} seeds; looks are "
            f"not changed after runs have begun (got {_looks_text(plan.looks)}). Give the same --seeds and --looks, "
            "or another --out"
        )
    old, new = ([(arm.name, arm.kind, dict(arm.changes)) for arm in p.arms] for p in (stored, plan))
    if old != new:
        old_names, new_names = (", ".join(name for name, *_ in arms) for arms in (old, new))
        raise ValueError(
            f"{directory} was planned with the arms {old_names}; got {new_names}. Give the same, or another --out"
        )
    changed = dataclass_json.field_differences(dataclass_json.to_dict(stored.base), dataclass_json.to_dict(plan.base))
    if changed:
        changes = "\n  ".join(f"{name}: {before} -> {after}" for name, before, after in changed)
        raise ValueError(
            f"{directory} was planned with another base run:\n  {changes}\ngive the same, or another --out"
        )


def _looks_text(looks: Sequence[int]) -> str:
    return ", ".join(map(str, looks))


def with_steps(base: TrainConfig, steps: int) -> TrainConfig:
    """Returns the base run with another number of steps, and with intervals of logging, validation and checkpoints that
    fit it."""
    return replace(
        base,
        steps=steps,
        log=LogConfig(every=max(1, steps // 40), tensorboard=False),
        validation=replace(base.validation, every=max(1, steps // 6)),
        checkpoint=replace(base.checkpoint, every=max(1, steps // 4), keep_last=1),
    )


MAX_SEEDS = 1000
"""Limit of a study: every seed costs one run per arm."""


def seed_range(count: int, start: int = 0) -> tuple[int, ...]:
    """Returns `count` seeds, from `start` on."""
    check_int("seeds", count, least=1, most=MAX_SEEDS)
    return tuple(range(start, start + count))


def host_share(jobs: Sequence[tuple[Arm, int]], text: str) -> list[tuple[Arm, int]]:
    """Returns the jobs of host INDEX/HOSTS (from 0): every HOSTS-th one."""
    index, slash, hosts = text.partition("/")
    if not (slash and index.isdigit() and hosts.isdigit() and int(index) < int(hosts)):
        raise ValueError(f"host must be INDEX/HOSTS with INDEX from 0, such as 0/4, got {text!r}")
    return list(jobs)[int(index) :: int(hosts)]
