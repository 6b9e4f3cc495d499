"""Which runs may be subtracted from each other.

Two runs are a pair if they have the same seed, and so the same initialisation, batches and schedule, and differ in
nothing but precision: recipe, policy, or when the recipe changes. Anything else that differs would be counted as the
recipe's doing, so such pairs are not averaged.

A config says where the data lies, not what it holds: runs are held against each other by what run.json has sealed of
data and code, by their tokenizers, and by the hashes of the files that their recipes are from. Runs that differ there
have no gap at all.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from halfbyte.data.files import sha256_of
from halfbyte.evaluation.curves import Curve, Gap, gap
from halfbyte.inputs import check_whole
from halfbyte.recipe.own import FILE
from halfbyte.train.config import COSMETIC, GUARDED
from halfbyte.train.identity import load_identity
from halfbyte.train.jsonconfig import differences, flatten
from halfbyte.train.resume import completed

from .statistics import Interval, over_seeds

ARM_FIELDS = (
    "recipe", "policy", "precision.switch_at", "precision.switch_to", "precision.switch_part", "precision.twin",
)  # fmt: skip
COMPUTED = (*(name for name in GUARDED if name != "unroll"), "steps")  # another order of sums is no other run


@dataclass(frozen=True)
class Run:
    """One run: its curve, its config as written beside it, and the hashes of what it was made from."""

    name: str
    folder: Path
    config: Mapping[str, Any]
    curve: Curve = field(repr=False)
    facts: Mapping[str, str] = field(default_factory=dict)

    @property
    def seed(self) -> int:
        found = self.config.get("seed") or 0
        check_whole(f"{self.folder}: seed", found, most=2**63)
        return int(found)

    def arm(self) -> tuple[Any, ...]:
        """What of its config is precision."""
        flat = flatten(self.config)
        return tuple(flat.get(name) for name in ARM_FIELDS)


def unlike(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """(field, of a, of b) for everything beside precision and seed in which two configs compute something else."""
    ignored = {*ARM_FIELDS, *COSMETIC, "seed"}
    differ = differences(completed(a), completed(b))
    return [each for each in differ if each[0].split(".")[0] in COMPUTED and each[0] not in ignored]


def facts_of(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """What a run was made from, as hashes; a run of an earlier version has fewer of them."""
    identity = load_identity(folder)
    facts = {} if identity is None else {"data": identity.data, **identity.made_with}
    if (folder / "tokenizer.json").is_file():
        facts["tokenizer"] = sha256_of(folder / "tokenizer.json")[:16]
    files = [found for value in flatten(config).values() if isinstance(value, str) and (found := FILE.match(value))]
    return facts | {f"file {found['path']}": found["hash"] for found in files if found["hash"]}


def contradictions(a: Mapping[str, str], b: Mapping[str, str]) -> list[str]:
    """`field: of a against of b` for every hash that both runs have and that differs."""
    return [f"{name}: {a[name]} against {b[name]}" for name in a if name in b and a[name] != b[name]]


@dataclass(frozen=True)
class Pair:
    """A run beside the baseline of its seed, or the reason why there is none to subtract. `foreign`: their data, code,
    tokenizer or recipe files differ."""

    run: Run
    baseline: Run | None
    gap: Gap | None
    refusal: str = ""
    foreign: bool = False


@dataclass(frozen=True)
class Arm:
    """Runs that differ in their seed alone, paired; `interval` is over seeds, None if a pair is not one."""

    name: str
    pairs: tuple[Pair, ...]
    interval: Interval | None
    relative: Interval | None
    refusal: str = ""


def group(runs: Sequence[Run]) -> list[list[Run]]:
    """Runs by arm, the first run's first; the same arm and seed once more begins an arm of its own."""
    arms: list[list[Run]] = []
    for run in runs:
        fits = (arm for arm in arms if arm[0].arm() == run.arm() and run.seed not in {other.seed for other in arm})
        same = (a for a in fits if not unlike(a[0].config, run.config) and not contradictions(a[0].facts, run.facts))
        home = next(same, None)
        if home is None:
            arms.append([run])
        else:
            home.append(run)
    return arms


def pair_up(runs: Sequence[Run], *, last: int | None = None) -> list[Arm]:
    """Every arm but the first, each run with the first arm's run of the same seed."""
    arms = group(runs)
    baselines = {run.seed: run for run in arms[0]}
    return [_arm(arm, baselines, last) for arm in arms[1:]]


def _arm(arm: Sequence[Run], baselines: Mapping[int, Run], last: int | None) -> Arm:
    pairs = tuple(_pair(run, baselines, last) for run in arm)
    name = arm[0].name if len(arm) == 1 else arm_name(arm[0].config)
    refused = [pair for pair in pairs if pair.refusal]
    counted = [pair.gap for pair in pairs if pair.gap is not None and not pair.refusal]
    if refused or not counted:
        why = "; ".join(f"{pair.run.name}: {pair.refusal}" for pair in refused) or "no pair has a step in common"
        return Arm(name, pairs, None, None, why)
    interval = over_seeds([found.value for found in counted])
    return Arm(name, pairs, interval, over_seeds([100 * found.relative for found in counted]))


def _pair(run: Run, baselines: Mapping[int, Run], last: int | None) -> Pair:
    baseline = baselines.get(run.seed)
    beside = baseline or next(iter(baselines.values()))
    other = contradictions(beside.facts, run.facts)
    if other:
        return Pair(run, None, None, f"made from something else than {beside.name}: {'; '.join(other)}", True)
    if baseline is None:
        seeds = ", ".join(map(str, sorted(baselines)))
        return Pair(run, None, None, f"no baseline run has its seed {run.seed} (they have {seeds})")
    found = gap(run.curve, baseline.curve, last=last)
    differ = unlike(baseline.config, run.config)
    if differ:
        listed = ", ".join(f"{name} {old} against {new}" for name, old, new in differ[:4])
        more = f" and {len(differ) - 4} more" if len(differ) > 4 else ""
        return Pair(run, baseline, found, f"differs in more than precision: {listed}{more}")
    return Pair(run, baseline, found, "" if found else "no step in common")


def arm_name(config: Mapping[str, Any]) -> str:
    """Recipe, policy, and the switch if there is one."""
    flat = flatten(config)
    words = [str(flat.get("recipe") or "?")]
    if flat.get("policy") not in (None, "mlp"):
        words.append(f"({flat['policy']})")
    if flat.get("precision.switch_at"):
        part = flat.get("precision.switch_part")
        words.append(f"then {flat.get('precision.switch_to')}{'' if part == 'both' else f' {part}'}")
        words.append(f"from {flat['precision.switch_at']:g}")
    if flat.get("precision.twin"):
        words.append(f"twin {flat['precision.twin']}")
    return " ".join(words)
