"""The arms of a comparison: a name, a kind, and what each changes in the base run, which is precision and nothing else.

Candidates are typed as RECIPE or RECIPE@POLICY, a recipe of one's own as mine.py:half. Two controls come by
themselves: a twin of the baseline (equal but for rounding: the noise floor), and a recipe that is broken on purpose and
must be seen to fail.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from halfbyte.inputs import read_json
from halfbyte.recipe import recipe
from halfbyte.train import TrainConfig, jsonconfig

from .pairing import ARM_FIELDS

BASELINE, CANDIDATE, TWIN, CONTROL = "baseline", "candidate", "twin", "control"
KINDS = (BASELINE, CANDIDATE, TWIN, CONTROL)
BROKEN = "fp4_one_scale"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+@-]*")
# Of a file's recipe the hash stands behind an @ too: mine.py:half@0123456789abcdef@all_linear.
TYPED = re.compile(r"(?P<recipe>[^@]+?(?:\.py:\w+(?:@[0-9a-f]{16})?)?)(?:@(?P<policy>.*))?")


@dataclass(frozen=True)
class Arm:
    """`changes`: dotted field of the config -> value; precision alone. `seeds`: how many of the plan's it is run in,
    None for all."""

    name: str
    kind: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""
    seeds: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"arm {self.name!r}: kind must be one of {', '.join(KINDS)}, got {self.kind!r}")
        if not NAME.fullmatch(self.name) or ".." in self.name:
            raise ValueError(f"arm {self.name!r}: a name is made of letters, digits and . _ + @ -; rename it")
        if self.seeds is not None and (not isinstance(self.seeds, int) or self.seeds < 0):
            raise ValueError(f"arm {self.name!r}: seeds must be 0 or more, or null for all, got {self.seeds!r}")
        foreign = [name for name in self.changes if name not in ARM_FIELDS]
        if foreign:
            raise ValueError(
                f"arm {self.name!r} changes {', '.join(foreign)}: arms may differ in precision alone "
                f"({', '.join(ARM_FIELDS)}), or the gap would not be the recipe's; change it for all arms instead"
            )

    def configure(self, base: TrainConfig, seed: int) -> TrainConfig:
        """The arm's run of one seed."""
        return jsonconfig.from_dict(TrainConfig, self.values(base, seed))

    def values(self, base: TrainConfig, seed: int) -> dict[str, Any]:
        """The fields of its config."""
        values = jsonconfig.to_dict(base)
        for name, value in {**self.changes, "seed": seed}.items():
            group, _, leaf = name.rpartition(".")
            target = values[group] if group else values
            target[leaf] = value
        return values


def arm_of(text: str, kind: str) -> Arm:
    """RECIPE or RECIPE@POLICY; its name is what was typed, made fit for a folder's."""
    text = text.strip()
    typed = TYPED.fullmatch(text)
    if typed is None:
        raise ValueError(f"an arm is RECIPE or RECIPE@POLICY, got {text!r}")
    found, policy = typed["recipe"], typed["policy"]
    changes: dict[str, Any] = {"recipe": recipe(found).name}
    if policy is not None:
        changes["policy"] = policy
    parts = [found if NAME.fullmatch(found) else _slug(Path(found).name), *([_slug(policy)] if policy else [])]
    return Arm(text if NAME.fullmatch(text) else "@".join(parts), kind, changes)


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-")


def standard_arms(baseline: str, candidates: Sequence[str], *, controls: bool = True) -> list[Arm]:
    """Baseline and candidates; with controls, the twin and the broken one behind them."""
    first = arm_of(baseline, BASELINE)
    twin = Arm(
        f"{first.name}-twin", TWIN, {**first.changes, "precision.twin": 1}, "equal to the baseline but for rounding"
    )
    policy = {"policy": first.changes["policy"]} if "policy" in first.changes else {}
    control = Arm(f"control-{BROKEN}", CONTROL, {"recipe": BROKEN, **policy}, recipe(BROKEN).description)
    return [first, *(arm_of(text, CANDIDATE) for text in candidates), *((twin, control) if controls else ())]


def ablation(base: str = "nvfp4") -> list[Arm]:
    """The recipe in full, each ingredient left out, each misused, and the neighbours that a paper would show."""
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
    """Candidates from a JSON file: {name: {dotted field: value}}."""
    found = read_json(path)
    if not isinstance(found, dict) or not all(isinstance(changes, dict) for changes in found.values()):
        raise ValueError(
            f"{path} must hold one object, name -> changes, such as {json.dumps({'a': {'recipe': 'nvfp4'}})}"
        )
    return [Arm(name, CANDIDATE, changes) for name, changes in found.items()]
