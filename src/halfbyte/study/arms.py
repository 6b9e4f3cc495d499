"""Arms of a study, and the pairing of runs whose losses may be subtracted.

An arm has a name, a kind, and changes of the base run that concern precision only. A candidate is written as RECIPE or
RECIPE@POLICY; a user recipe as mine.py:half. Two controls are added: a twin of the baseline with other rounding noise
(the noise floor), and a positive control, a recipe that is broken on purpose and must fail.

Two runs are a pair if they have the same seed, and so the same initialization, batches and schedule, and differ only in
precision: recipe, policy, or the step at which the recipe switches. A config has the path of the data, not its content.
Pairs are therefore also compared by the hashes of data and code in run.json, by tokenizer, and by the hashes of recipe
files. No gap is computed for runs that differ in one of these hashes.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from halfbyte.data.text_files import sha256_of
from halfbyte.evaluation.loss_curves import LossGap, MetricCurve, final_gap
from halfbyte.io import check_int, dataclass_json, read_json
from halfbyte.io.dataclass_json import field_differences, flatten_dotted
from halfbyte.recipes import recipe
from halfbyte.recipes.user_recipes import USER_FILE_PATTERN
from halfbyte.study.equivalence_test import ConfidenceInterval, paired_t_interval
from halfbyte.train import TrainConfig
from halfbyte.train.resume import fill_new_fields
from halfbyte.train.run_identity import load_identity
from halfbyte.train.train_config import RESUME_GUARDED_FIELDS, RESUME_IGNORED_FIELDS

ARM_FIELDS = (
    "recipe", "policy", "precision.switch_at", "precision.switch_to", "precision.switch_part", "precision.noise_seed",
)  # fmt: skip
OLD_ARM_FIELDS = {"precision.twin": "precision.noise_seed"}  # in plans and arm files of version 0.1
# `unroll` is not compared: it only changes the order of summation.
COMPARED_FIELDS = (*(name for name in RESUME_GUARDED_FIELDS if name != "unroll"), "steps")


BASELINE, CANDIDATE, TWIN, CONTROL = "baseline", "candidate", "twin", "control"
ARM_KINDS = (BASELINE, CANDIDATE, TWIN, CONTROL)
BROKEN_RECIPE = "fp4_one_scale"
ARM_NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+@-]*")
# A user recipe has its file hash after an @ as well: mine.py:half@0123456789abcdef@all_linear.
ARM_PATTERN = re.compile(r"(?P<recipe>[^@]+?(?:\.py:\w+(?:@[0-9a-f]{16})?)?)(?:@(?P<policy>.*))?")


@dataclass(frozen=True)
class Arm:
    """An arm of a study.

    Args:
        changes: dotted config field -> value; only ARM_FIELDS.
        seeds: how many of the plan's seeds it runs; None for all.
    """

    name: str
    kind: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""
    seeds: int | None = None

    def __post_init__(self) -> None:
        changes = {OLD_ARM_FIELDS.get(name, name): value for name, value in self.changes.items()}
        object.__setattr__(self, "changes", changes)
        if self.kind not in ARM_KINDS:
            raise ValueError(f"arm {self.name!r}: kind must be one of {', '.join(ARM_KINDS)}, got {self.kind!r}")
        if not ARM_NAME_PATTERN.fullmatch(self.name) or ".." in self.name:
            raise ValueError(f"arm {self.name!r}: a name is made of letters, digits and . _ + @ -; rename it")
        if self.seeds is not None and (not isinstance(self.seeds, int) or self.seeds < 0):
            raise ValueError(f"arm {self.name!r}: seeds must be 0 or more, or null for all, got {self.seeds!r}")
        other_fields = [name for name in self.changes if name not in ARM_FIELDS]
        if other_fields:
            raise ValueError(
                f"arm {self.name!r} changes {', '.join(other_fields)}: arms may differ in precision alone "
                f"({', '.join(ARM_FIELDS)}), or the gap would not be the recipe's; change it for all arms instead"
            )

    def configure(self, base: TrainConfig, seed: int) -> TrainConfig:
        """Returns the config of the arm's run with `seed`."""
        return dataclass_json.from_dict(TrainConfig, self.field_values(base, seed))

    def field_values(self, base: TrainConfig, seed: int) -> dict[str, Any]:
        """Returns the same config as nested dicts, without validation."""
        values = dataclass_json.to_dict(base)
        for name, value in {**self.changes, "seed": seed}.items():
            group, _, leaf = name.rpartition(".")
            target = values[group] if group else values
            target[leaf] = value
        return values


def parse_arm(text: str, kind: str) -> Arm:
    """Returns the arm that `text`, RECIPE or RECIPE@POLICY, describes. Its name is the text, with characters that a
    directory name must not have replaced."""
    text = text.strip()
    match = ARM_PATTERN.fullmatch(text)
    if match is None:
        raise ValueError(f"an arm is RECIPE or RECIPE@POLICY, got {text!r}")
    recipe_name, policy = match["recipe"], match["policy"]
    changes: dict[str, Any] = {"recipe": recipe(recipe_name).name}
    if policy is not None:
        changes["policy"] = policy
    parts = [
        recipe_name if ARM_NAME_PATTERN.fullmatch(recipe_name) else _slug(Path(recipe_name).name),
        *([_slug(policy)] if policy else []),
    ]
    return Arm(text if ARM_NAME_PATTERN.fullmatch(text) else "@".join(parts), kind, changes)


def standard_arms(baseline: str, candidates: Sequence[str], *, controls: bool = True) -> list[Arm]:
    """Returns the baseline and the candidates, with `controls` followed by the twin and the broken recipe."""
    baseline_arm = parse_arm(baseline, BASELINE)
    noise = {**baseline_arm.changes, "precision.noise_seed": 1}
    twin = Arm(f"{baseline_arm.name}-twin", TWIN, noise, "equal to the baseline but for rounding")
    policy = {"policy": baseline_arm.changes["policy"]} if "policy" in baseline_arm.changes else {}
    control = Arm(
        f"control-{BROKEN_RECIPE}", CONTROL, {"recipe": BROKEN_RECIPE, **policy}, recipe(BROKEN_RECIPE).description
    )
    return [baseline_arm, *(parse_arm(text, CANDIDATE) for text in candidates), *((twin, control) if controls else ())]


def ablation_arms(base: str = "nvfp4") -> list[Arm]:
    """Returns candidates: the full recipe, each ingredient left out, each misused, and the alternatives that an
    ablation table of a paper lists."""
    late = {"precision.switch_at": 0.82, "precision.switch_to": "bf16", "precision.switch_part": "forward"}
    rows: list[tuple[str, dict[str, Any], str]] = [
        (base, {"recipe": base}, "the full recipe"),
        ("no_rht", {"recipe": f"{base}_no_rht"}, "without the Hadamard transform"),
        ("no_sr", {"recipe": f"{base}_no_sr"}, "without stochastic rounding"),
        ("no_2d", {"recipe": f"{base}_no_2d"}, "without 2D weight blocks"),
        ("sr_everywhere", {"recipe": f"{base}_sr_everywhere"}, "misused: stochastic rounding on activations too"),
        ("rht_everywhere", {"recipe": f"{base}_rht_everywhere"}, "misused: Hadamard transform in all GEMMs"),
        ("mxfp4", {"recipe": "mxfp4"}, "blocks of 32 with E8M0 scales"),
        ("all_linear", {"recipe": base, "policy": "all_linear"}, "attention projections too"),
        (
            "last_blocks_bf16",
            {"recipe": base, "policy": "all_linear; layers[-0.25:]=bf16"},
            "all linears, the last quarter of the blocks in bf16",
        ),
        ("forward_only", {"recipe": f"{base}+bf16_backward"}, "backward GEMMs in bf16"),
        ("backward_only", {"recipe": f"{base}+bf16_forward"}, "forward GEMMs in bf16"),
        ("late_switch", {"recipe": base, **late}, "forward GEMMs in bf16 for the last 18%"),
    ]
    return [Arm(name, CANDIDATE, changes, note) for name, changes, note in rows]


def read_arms(path: Path) -> list[Arm]:
    """Returns the candidates in a JSON file: {name: {dotted field: value}}."""
    arms = read_json(path)
    if not isinstance(arms, dict) or not all(isinstance(changes, dict) for changes in arms.values()):
        raise ValueError(
            f"{path} must hold one object, name -> changes, such as {json.dumps({'a': {'recipe': 'nvfp4'}})}"
        )
    return [Arm(name, CANDIDATE, changes) for name, changes in arms.items()]


def arm_name(config: Mapping[str, Any]) -> str:
    """Returns recipe, policy and precision switch of a config, as text for a table."""
    flat = flatten_dotted(config)
    parts = [str(flat.get("recipe") or "?")]
    if flat.get("policy") not in (None, "mlp"):
        parts.append(f"({flat['policy']})")
    if flat.get("precision.switch_at"):
        switch_part = flat.get("precision.switch_part")
        parts.append(f"then {flat.get('precision.switch_to')}{'' if switch_part == 'both' else f' {switch_part}'}")
        parts.append(f"from {flat['precision.switch_at']:g}")
    if flat.get("precision.noise_seed"):
        parts.append(f"twin {flat['precision.noise_seed']}")
    return " ".join(parts)


@dataclass(frozen=True)
class ComparedRun:
    """A run to be compared: its curve, the config in its directory, and the hashes of data and code."""

    name: str
    folder: Path
    config: Mapping[str, Any]
    curve: MetricCurve = field(repr=False)
    provenance: Mapping[str, str] = field(default_factory=dict)

    @property
    def seed(self) -> int:
        seed = self.config.get("seed") or 0
        check_int(f"{self.folder}: seed", seed, most=2**63)
        return int(seed)

    def arm(self) -> tuple[Any, ...]:
        """Returns the values of ARM_FIELDS in the config, which identify the arm."""
        flat = flatten_dotted(self.config)
        return tuple(flat.get(name) for name in ARM_FIELDS)


def config_mismatches(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Returns (field, value of a, value of b) for every difference in what is computed, except precision and seed."""
    ignored = {*ARM_FIELDS, *RESUME_IGNORED_FIELDS, "seed"}
    differences = field_differences(fill_new_fields(a), fill_new_fields(b))
    return [
        difference
        for difference in differences
        if difference[0].split(".")[0] in COMPARED_FIELDS and difference[0] not in ignored
    ]


def read_provenance(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Returns the hashes of the data, code, tokenizer and recipe files that a run used. A run of an earlier version has
    fewer."""
    identity = load_identity(folder)
    provenance = {} if identity is None else {"data": identity.data, **identity.made_with}
    if (folder / "tokenizer.json").is_file():
        provenance["tokenizer"] = sha256_of(folder / "tokenizer.json")[:16]
    files = [
        match
        for value in flatten_dotted(config).values()
        if isinstance(value, str) and (match := USER_FILE_PATTERN.match(value))
    ]
    return provenance | {f"file {match['path']}": match["hash"] for match in files if match["hash"]}


def provenance_mismatches(a: Mapping[str, str], b: Mapping[str, str]) -> list[str]:
    """Returns `field: A against B` for every hash that both runs have and that differs."""
    return [f"{name}: {a[name]} against {b[name]}" for name in a if name in b and a[name] != b[name]]


@dataclass(frozen=True)
class SeedPair:
    """A run and the baseline of the same seed, or the reason why no gap is computed. `has_other_provenance`: data,
    code, tokenizer or recipe files differ."""

    run: ComparedRun
    baseline: ComparedRun | None
    gap: LossGap | None
    unpaired_reason: str = ""
    has_other_provenance: bool = False


@dataclass(frozen=True)
class PairedArm:
    """Runs that differ only in seed, paired with the baseline. `interval` is over seeds; None, with a `refusal`, if any
    run has no valid pair."""

    name: str
    pairs: tuple[SeedPair, ...]
    interval: ConfidenceInterval | None
    relative: ConfidenceInterval | None
    refusal: str = ""


def group_by_arm(runs: Sequence[ComparedRun]) -> list[list[ComparedRun]]:
    """Returns the runs grouped by arm, in the order of the first run of each arm. A repeated seed of the same arm
    starts another group."""
    arms: list[list[ComparedRun]] = []
    for run in runs:
        candidates = (
            arm for arm in arms if arm[0].arm() == run.arm() and run.seed not in {other.seed for other in arm}
        )
        matching = (
            candidate
            for candidate in candidates
            if not config_mismatches(candidate[0].config, run.config)
            and not provenance_mismatches(candidate[0].provenance, run.provenance)
        )
        group = next(matching, None)
        if group is None:
            arms.append([run])
        else:
            group.append(run)
    return arms


def pair_up(runs: Sequence[ComparedRun], *, last: int | None = None) -> list[PairedArm]:
    """Pair the runs of every arm but the first with the first arm's run of the same seed. `last`: number of steps that
    the gap averages over."""
    arms = group_by_arm(runs)
    baselines = {run.seed: run for run in arms[0]}
    return [_arm(arm, baselines, last) for arm in arms[1:]]


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-")


def _arm(arm: Sequence[ComparedRun], baselines: Mapping[int, ComparedRun], last: int | None) -> PairedArm:
    pairs = tuple(_pair(run, baselines, last) for run in arm)
    name = arm[0].name if len(arm) == 1 else arm_name(arm[0].config)
    unpaired = [pair for pair in pairs if pair.unpaired_reason]
    gaps = [pair.gap for pair in pairs if pair.gap is not None and not pair.unpaired_reason]
    if unpaired or not gaps:
        refusal = (
            "; ".join(f"{pair.run.name}: {pair.unpaired_reason}" for pair in unpaired) or "no pair has a step in common"
        )
        return PairedArm(name, pairs, None, None, refusal)
    interval = paired_t_interval([gap.value for gap in gaps])
    return PairedArm(name, pairs, interval, paired_t_interval([100 * gap.relative for gap in gaps]))


def _pair(run: ComparedRun, baselines: Mapping[int, ComparedRun], last: int | None) -> SeedPair:
    baseline = baselines.get(run.seed)
    reference = baseline or next(iter(baselines.values()))
    mismatches = provenance_mismatches(reference.provenance, run.provenance)
    if mismatches:
        return SeedPair(
            run, None, None, f"made from something else than {reference.name}: {'; '.join(mismatches)}", True
        )
    if baseline is None:
        seeds = ", ".join(map(str, sorted(baselines)))
        return SeedPair(run, None, None, f"no baseline run has its seed {run.seed} (they have {seeds})")
    gap = final_gap(run.curve, baseline.curve, last=last)
    differences = config_mismatches(baseline.config, run.config)
    if differences:
        listed = ", ".join(f"{name} {old} against {new}" for name, old, new in differences[:4])
        more = f" and {len(differences) - 4} more" if len(differences) > 4 else ""
        return SeedPair(run, baseline, gap, f"differs in more than precision: {listed}{more}")
    return SeedPair(run, baseline, gap, "" if gap else "no step in common")
