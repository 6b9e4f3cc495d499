"""Plan of a study, plan.json: written before the first step and not changed afterwards.

It fixes the base run, the arms, the margin, the outcome and the looks. Adding seeds until the result is clear would
pass a bad candidate three times as often as promised. A study that continues in the same directory must have the same
plan. Seeds added later are run and shown, and no verdict counts them. The exception is a plan of one or two seeds: it
may add what it lacks for its only look, after three.
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
    """What is run and how it is judged: after each number of seeds in `looks`; by default once after all of them, and
    never before MIN_SEEDS. `sealed` is False for a plan of a version that did not detect edits."""

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
            twice = next(name for name in names if names.count(name) > 1)
            if twice in [arm.name for arm in self.arms if arm.kind == BASELINE]:
                raise ValueError(f"{twice!r} is the baseline itself; leave it out, or name another --baseline")
            raise ValueError(f"two arms are called {twice!r}; give each candidate once")
        if [arm.kind for arm in self.arms].count(BASELINE) != 1:
            raise ValueError("a parity has exactly one baseline; give --baseline RECIPE")
        if not any(arm.kind == CANDIDATE for arm in self.arms):
            raise ValueError("there is no candidate to compare; give --candidates RECIPE,... or --arms ablation")
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds must be different numbers, at least one, got {list(self.seeds)}")
        if not self.looks:
            object.__setattr__(self, "looks", (max(MIN_SEEDS, len(self.seeds)),))
        many = max(MIN_SEEDS, len(self.seeds))
        if list(self.looks) != sorted(set(self.looks)) or self.looks[0] < MIN_SEEDS or self.looks[-1] > many:
            raise ValueError(
                f"looks must be rising numbers of seeds, from {MIN_SEEDS} to {many} (--seeds), got {self.looks}"
            )
        self._check_arms()

    def _check_arms(self) -> None:
        """Arms must be runs, differ in precision alone, and from each other."""
        seen: dict[TrainConfig, str] = {}
        for arm in self.arms:
            config = arm.configure(self.base, self.seeds[0])
            phases(config)
            differ = config_mismatches(dataclass_json.to_dict(self.base), dataclass_json.to_dict(config))
            if differ:
                raise ValueError(f"arm {arm.name!r} differs in {differ[0][0]}, which is not precision")
            if config in seen:
                raise ValueError(f"arms {seen[config]!r} and {arm.name!r} are the same run; leave one out")
            seen[config] = arm.name

    @property
    def baseline(self) -> Arm:
        return next(arm for arm in self.arms if arm.kind == BASELINE)

    def of_kind(self, kind: str) -> list[Arm]:
        return [arm for arm in self.arms if arm.kind == kind]

    def seeds_of(self, arm: Arm) -> tuple[int, ...]:
        """The seeds that an arm is run in: all, or its first few."""
        return self.seeds[: arm.seeds]

    def jobs(self, seeds: int | None = None) -> list[tuple[Arm, int]]:
        """Every run of the first `seeds`, one seed after another, so that whatever is done is done in pairs."""
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


def plan_from_json(found: Any, where: str) -> StudyPlan:
    """The plan in a JSON value; ValueError when it is none."""
    if not isinstance(found, dict) or found.get("version") not in SUPPORTED_VERSIONS:
        raise ValueError(f"{where} is not a parity plan of version {' or '.join(map(str, SUPPORTED_VERSIONS))}")
    if found.get("screen"):
        raise ValueError(
            f"{where} has a screening round, which this version does not run; begin anew in another directory and "
            "name the recipes with --recipes"
        )
    try:
        arms = tuple(Arm(a["name"], a["kind"], a["changes"], a.get("note", ""), a.get("seeds")) for a in found["arms"])
        base = dataclass_json.from_dict(TrainConfig, found["base"])
        seeds = tuple(int(seed) for seed in found["seeds"])
        margin = parse_margin(found["margin"])
        # Version 1 let seeds be added until it was clear: of its seeds the fewest are known to be planned.
        looks = tuple(map(int, found.get("looks", (MIN_SEEDS,))))
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"{where} is damaged: {type(error).__name__} {error}; begin anew in another directory"
        ) from None
    words, sealed = (found.get("written", ""), found.get("command", "")), found["version"] > UNSEALED
    return StudyPlan(base, arms, seeds, margin, *words, looks, sealed)


def load_plan(directory: Path) -> StudyPlan | None:
    """The plan of a parity directory, None if it has none. ValueError if it is not as it was written."""
    path = directory / PLAN_FILE
    if not path.is_file():
        return None
    found = read_json(path)
    if isinstance(found, dict) and (found.get("version") == PLAN_VERSION or SEAL in found):
        _check_seal(found, path)
    with trust_only_named_programs():
        return plan_from_json(found, str(path))


def write_or_check_plan(directory: Path, plan: StudyPlan) -> StudyPlan:
    """The plan that holds in `directory`: written now, or the one that was, which `plan` must agree with. More seeds
    are added to it; its looks stay. Of several hosts that begin at once one writes, and the others agree or are
    refused."""
    directory.mkdir(parents=True, exist_ok=True)
    names = {path.name for path in directory.iterdir() if path.name != LOCK and path.suffix != ".tmp"}
    if names and PLAN_FILE not in names:
        raise ValueError(f"{directory} is not empty and holds no {PLAN_FILE}; give another --out")
    with open(directory / LOCK, "a", encoding="utf-8", opener=open_no_follow) as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        stored = load_plan(directory)
        if stored is None:
            now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            return _write(directory, replace(plan, written=plan.written or now))
        refuse_changes(directory, stored, plan)
        more = tuple(seed for seed in plan.seeds if seed not in stored.seeds)
        return _write(directory, replace(stored, seeds=(*stored.seeds, *more))) if more else stored


def _write(directory: Path, plan: StudyPlan) -> StudyPlan:
    made = plan.to_json()
    write_json(directory / PLAN_FILE, made | {SEAL: _seal(made)} if plan.sealed else made)
    return plan


def _check_seal(found: Mapping[str, Any], path: Path) -> None:
    if found.get(SEAL) != _seal(found):
        raise ValueError(
            f"{path} was changed after it was written: it does not match its seal, and nobody knows what was planned "
            "before the first step. Restore it from a copy, or begin anew with another --out"
        )


def _seal(made: Mapping[str, Any]) -> str:
    """Over all else that a plan says, however it is indented."""
    return text_sha256(json.dumps({name: value for name, value in made.items() if name != SEAL}, sort_keys=True))


def refuse_changes(directory: Path, stored: StudyPlan, plan: StudyPlan) -> None:
    """ValueError, saying what, if `plan` is not the stored one."""
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
        was, now = (", ".join(name for name, *_ in arms) for arms in (old, new))
        raise ValueError(f"{directory} was planned with the arms {was}; got {now}. Give the same, or another --out")
    changed = dataclass_json.field_differences(dataclass_json.to_dict(stored.base), dataclass_json.to_dict(plan.base))
    if changed:
        listing = "\n  ".join(f"{name}: {before} -> {after}" for name, before, after in changed)
        raise ValueError(
            f"{directory} was planned with another base run:\n  {listing}\ngive the same, or another --out"
        )


def _looks_text(looks: Sequence[int]) -> str:
    return ", ".join(map(str, looks))


def with_steps(base: TrainConfig, steps: int) -> TrainConfig:
    """The base run at another length: what a comparison reads of it, and no more."""
    return replace(
        base,
        steps=steps,
        log=LogConfig(every=max(1, steps // 40), tensorboard=False),
        validation=replace(base.validation, every=max(1, steps // 6)),
        checkpoint=replace(base.checkpoint, every=max(1, steps // 4), keep_last=1),
    )


MAX_SEEDS = 1000
"""Of a study: each is a run per arm."""


def seed_range(count: int, start: int = 0) -> tuple[int, ...]:
    """`count` seeds from `start` on."""
    check_int("seeds", count, least=1, most=MAX_SEEDS)
    return tuple(range(start, start + count))


def host_share(jobs: Sequence[tuple[Arm, int]], text: str) -> list[tuple[Arm, int]]:
    """The jobs of host INDEX/HOSTS (from 0): every HOSTS-th one."""
    index, slash, hosts = text.partition("/")
    if not (slash and index.isdigit() and hosts.isdigit() and int(index) < int(hosts)):
        raise ValueError(f"host must be INDEX/HOSTS with INDEX from 0, such as 0/4, got {text!r}")
    return list(jobs)[int(index) :: int(hosts)]
