"""Records of the playbook's stages, and the decision computed from them.

OUT/records/NN-STAGE.json, one file per stage, written atomically:

    {"stage": "bench", "command": "halfbyte bench ...", "seconds": 41.2, "data": {...}}     the result of its --json
    {"stage": "eval", "command": "halfbyte eval", "seconds": 0.0, "missing": "why"}
    {"stage": "parity", "seconds": 309.2}                                                   interrupted: to be resumed

The error rate of the decision is that of `parity`: a study passes a candidate at the margin with a probability of at
most 5%, whatever the number of candidates. The radar compares values on the same operands. It has no error rate, and
one alarm is sufficient.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfbyte.checkpoint import LOCK_FILE
from halfbyte.io import atomic_write, read_json
from halfbyte.study.analysis import non_embedding_params
from halfbyte.study.arms import CANDIDATE
from halfbyte.study.equivalence_test import (
    MIN_SEEDS,
    SIGNIFICANCE_LEVEL,
    ConfidenceInterval,
    paired_t_interval,
    parse_margin,
    seeds_needed,
    where_text,
)
from halfbyte.study.study_plan import plan_from_json
from halfbyte.train import replace_nonfinite

SETTINGS, ABLATION = "settings", "ablation"  # ABLATION: a stage of earlier versions
FILES = (
    SETTINGS, "doctor", "preflight", "trace", "inspect", "bench", "plan", "parity", "eval", "compare", ABLATION,
    "cluster",
)  # fmt: skip
STAGES = tuple(name for name in FILES if name not in (SETTINGS, ABLATION))


MIN_TOKENS = 5.0  # per parameter; with fewer, the gaps of real runs are hardly visible yet (docs/parity.md)
MAX_DATA_WAIT_FRACTION = 0.1  # of a step; beyond it the step time is not a property of the recipe
LOSS_RATE = (
    "One that really is within the margin would get this answer in at most "
    f"{100 * SIGNIFICANCE_LEVEL:g}% of such studies."
)
RADAR_RATE = "The radar compares with what the recipe gives on the same operands: an alarm is no matter of chance."
Data = Mapping[str, Any]


@dataclass(frozen=True)
class StageRecords:
    """Records of the stages, one JSON file per stage in `directory`."""

    directory: Path

    def _path(self, stage: str) -> Path:
        return self.directory / f"{FILES.index(stage):02d}-{stage}.json"

    def get(self, stage: str) -> dict[str, Any]:
        """Returns the record of a stage, an empty one if there is none."""
        path = self._path(stage)
        record = read_json(path) if path.is_file() else {"stage": stage}
        if not isinstance(record, dict) or record.get("stage") != stage:
            raise ValueError(f"{path} is not a record of stage {stage!r}. Remove it to run the stage again")
        return record

    def data(self, stage: str) -> dict[str, Any]:
        """Returns the result of a stage, an empty one if it has none."""
        return self.get(stage).get("data", {})

    def is_over(self, stage: str, budget: float) -> bool:
        """Returns True if the stage has a record and was not ended by a budget smaller than `budget`. Earlier versions
        did not record that budget: their incomplete studies, and those that had no time, resume with any."""
        record, data = self.get(stage), self.data(stage)
        ended_by = record.get("ended_by", 0.0 if data.get("complete") is False or data.get("seeds") == 0 else None)
        return bool({"data", "missing"} & record.keys()) and (ended_by is None or budget <= ended_by)

    def seconds(self, *stages: str) -> float:
        """Returns the total seconds of these stages, by default of all, over all starts except those ended by
        SIGKILL."""
        return sum(self.get(stage).get("seconds", 0.0) for stage in stages or STAGES)

    def put(self, stage: str, **record: Any) -> None:
        """Write the record of a stage. The records of later stages, which depend on it, are deleted first."""
        self.directory.mkdir(parents=True, exist_ok=True)
        for later in STAGES if stage in STAGES else ():
            if FILES.index(later) > FILES.index(stage):
                self._path(later).unlink(missing_ok=True)
        atomic_write(
            self._path(stage), json.dumps(replace_nonfinite({"stage": stage, **record}), indent=1, default=str) + "\n"
        )

    def check_settings(self, settings: Mapping[str, Any]) -> None:
        """Write the settings. Raises ValueError if the directory has other contents or was started with other
        settings."""
        stored, values, out = self.data(SETTINGS), json.loads(json.dumps(settings)), self.directory.parent
        for name in values if stored else ():
            if stored.get(name) != values[name]:
                raise ValueError(
                    f"{out} was begun with {name} {stored.get(name)!r}, got {values[name]!r}; go on with what it was "
                    "begun with, or give another --out"
                )
        if not stored:
            folders = [folder for folder in (out, self.directory) if folder.is_dir()]
            names = {path.name for folder in folders for path in folder.iterdir() if path.suffix != ".tmp"}
            # Refused, because stages overwrite files and folders in `out` by name.
            if other_names := names - {LOCK_FILE, self.directory.name}:
                raise ValueError(f"{out} is not empty ({min(other_names)}) and holds no playbook; give another --out")
            self.put(SETTINGS, data=values)


SWITCH, DO_NOT, CANNOT_TELL = "SWITCH", "DO NOT SWITCH", "CANNOT TELL"
PASS, FAIL, BETTER = "PASS", "FAIL", "BETTER"


@dataclass(frozen=True)
class Decision:
    """The playbook's decision.

    Args:
        because: the evidence that the sentence depends on.
        speed: a sentence on the measured speed and whether it is representative.
        takes: seeds and budget that would decide.
        small: True if the runs are too short to represent a real one.
    """

    word: str
    sentence: str
    because: tuple[str, ...]
    speed: str
    takes: str = ""
    small: bool = False


def make_decision(records: StageRecords) -> Decision:
    """Returns the decision that the records support."""
    study, (speed, ratios) = records.data("parity"), speed_statement(records)
    if failed := [check["name"] for check in records.data("doctor").get("checks", ()) if not check["passed"]]:
        reason = f"a quantizer does not give its stored bits on this machine ({', '.join(failed)})"
        takes = "a machine on which `halfbyte doctor` passes"
        return Decision(CANNOT_TELL, f"{CANNOT_TELL}: {reason}, so nothing computed here counts.", (), speed, takes)
    if not study:
        reason = records.get("parity").get("missing", "the parity study is not over")
        takes = required_seeds(records, ())
        return Decision(CANNOT_TELL, f"{CANNOT_TELL}: {reason}. It would take {takes}.", (), speed, takes)
    arms = {arm["name"]: arm for arm in study["arms"] if arm["kind"] == CANDIDATE}
    base, words = study["arms"][0]["name"], {name: verdict_of(study, arm) for name, arm in arms.items()}
    because = tuple(line for arm in arms.values() for line in reasons(arm))
    verdicts = "; ".join(f"{name}: {why_of(arm)}" for name, arm in arms.items())
    passed = [name for name, word in words.items() if word in (PASS, BETTER)]
    slow = {name: ratios[name] for name in passed if words[name] == PASS and ratios.get(name, math.inf) <= 1}
    no_faster = ", ".join(f"{name} {ratio:.2f}x" for name, ratio in slow.items())
    if fast := [arms[name] for name in passed if name not in slow]:
        sentence, small = switch_sentence(study, fast, base)
        sentence += f" As good, and no faster here: {no_faster}." if slow else ""
        return Decision(SWITCH, sentence, because, speed, small=small)
    if slow:
        sentence = f"{DO_NOT}: as good as {base} and no faster here, in tokens a second: {no_faster}."
        return Decision(DO_NOT, f"{sentence} {error_rate(study)}", because, speed)
    if set(words.values()) == {FAIL}:
        rates = [RADAR_RATE if alarms(arm) else LOSS_RATE for arm in arms.values()]
        sentence = f"{DO_NOT}, stay with {base}. {verdicts}. {' '.join(sorted(set(rates)))}"
        return Decision(DO_NOT, sentence, because, speed)
    takes = required_seeds(records, [arms[name] for name, word in words.items() if word == CANNOT_TELL])
    interruption = "" if study["complete"] else "The time was over after {done} of {planned} runs of the study. "
    sentence = f"{CANNOT_TELL}, stay with {base} until then. {interruption.format(**study['runs'])}{verdicts}."
    return Decision(CANNOT_TELL, f"{sentence} It would take {takes}.", because, speed, takes)


def verdict_of(study: Data, arm: Data) -> str:
    """Returns the word of a candidate, FAIL if the radar has an alarm. A loss lower than the baseline's by more than
    the margin, which fails an equivalence test, is BETTER in a study in which the broken recipe failed, else CANNOT
    TELL."""
    word: str = arm["verdict"]["word"]
    if alarms(arm) or word != FAIL or len(arm["gaps"]) < len(study["plan"]["seeds"]):  # or diverged
        return FAIL if alarms(arm) else word
    margin, high = parse_margin(study["plan"]["margin"]).value, shared_interval(study, arm).high
    if arm["verdict"]["interval"]["high"] >= -margin:
        return FAIL
    return BETTER if high is not None and high < -margin and study["controls"]["sensitive"] else CANNOT_TELL


def shared_interval(study: Data, arm: Data) -> ConfidenceInterval:
    """Returns the interval of the gaps at the level that the first candidate to pass needs (Holm)."""
    return paired_t_interval(list(arm["gaps"].values()), 1 - 2 * SIGNIFICANCE_LEVEL / study["plan"]["candidates"])


def alarms(arm: Data) -> list[str]:
    """Returns the radar's alarms in all runs of an arm."""
    return [text for probe in arm["radar"] for text in probe["alarms"]]


def why_of(arm: Data) -> str:
    if texts := alarms(arm):
        return f"the radar found that it is not what its recipe says ({texts[0]})"
    return str(arm["verdict"]["reason"])


def error_rate(study: Data) -> str:
    margin, num_candidates, seeds = (study["plan"][name] for name in ("margin", "candidates", "seeds"))
    return (
        f"A recipe that really is {margin} off would get this answer in at most {100 * SIGNIFICANCE_LEVEL:g}% of "
        f"such studies ({num_candidates} candidate{'s' * (num_candidates > 1)}, {len(seeds)} seeds)."
    )


def reasons(arm: Data) -> list[str]:
    """Returns the evidence of one candidate: verdict, token overhead and radar."""
    name, verdict, overhead = arm["name"], arm["verdict"], arm["token_overhead"] or {"mean": None}
    summary = f"{name}: {verdict['word']}, {verdict['reason']}"
    if texts := alarms(arm):
        return [summary, *(f"{name}: RADAR ALARM, {text}" for text in texts[:3])]
    if overhead["mean"] is not None:
        summary += f"; the baseline's last loss took it {overhead['mean']:+.1f}% tokens"
    probed = sum(len(probe["gemms"]) for probe in arm["radar"])
    radar = f"radar, {probed} GEMMs beside what the recipe gives, no alarm" if probed else "no radar was run"
    return [summary, f"{name}: {radar}"]


def switch_sentence(study: Data, passed: Sequence[Data], base: str) -> tuple[str, bool]:
    """Returns the sentence about the best candidate, and True if the runs are too short to represent a real one, which
    the sentence then states at its start."""
    best = min(passed, key=lambda arm: arm["verdict"]["interval"]["high"])
    margin = parse_margin(study["plan"]["margin"])
    parameters = non_embedding_params(plan_from_json(study["plan"], "the study's plan").base.model)
    tokens = study["arms"][0]["curves"][0]["tokens"][-1] / parameters
    size = f"{parameters / 1e6:,.1f}M parameters (without embeddings) and {tokens:.2g} tokens a parameter"
    small = tokens < MIN_TOKENS
    caveat = f", for runs of this size alone ({size}, far too few to speak for a real one)" if small else ""
    evidence = f"its loss is within ±{margin} of {base}'s: {best['verdict']['reason']}"
    if best["verdict"]["word"] == FAIL:
        interval = where_text(shared_interval(study, best), margin)
        evidence = f"its loss is lower than {base}'s by more than {margin}: {interval}"
    chosen = f" Of {len(passed)} that pass it is the one whose interval ends lowest." if len(passed) > 1 else ""
    scope = "" if small else f" It holds for {size}."
    return f"{SWITCH} to {best['name']}{caveat}: {evidence}.{chosen} {error_rate(study)}{scope}", small


def speed_statement(records: StageRecords) -> tuple[str, dict[str, float]]:
    """Returns a sentence on the measured speed, and arm -> tokens per second relative to the baseline's. The mapping is
    empty if the measurement does not represent the recipe."""
    speeds = {run["arm"]: run["speed"] for run in records.data("compare").get("runs", ())}
    wait_by_arm = {name: speed["input_wait"] or 0.0 for name, speed in speeds.items()}
    worst = max(wait_by_arm, key=lambda name: wait_by_arm[name], default="")
    if wait_by_arm.get(worst, 0.0) > MAX_DATA_WAIT_FRACTION:
        return (
            f"The speed of these runs is not the recipe's: of a step of {worst} {wait_by_arm[worst]:.0%} was spent "
            "waiting for data. Mend the input pipeline first; the bench's figures, on synthetic tokens, do not have "
            "that wait."
        ), {}
    rates = {row["arm"]: row["tokens_per_s"] for row in records.data("bench").get("rows", ()) if row["tokens_per_s"]}
    base = records.data("bench").get("baseline")
    ratios = {name: rate / rates[base] for name, rate in rates.items() if base in rates and name != base}
    if not ratios:
        return "The speed was not measured.", {}
    steps = {name: speed["step_time_s"] for name, speed in speeds.items() if speed["step_time_s"]}
    training_text = {name: f" ({steps[base] / step:.2f}x in training)" for name, step in steps.items() if base in steps}
    texts = ", ".join(f"{name} {ratio:.2f}x{training_text.get(name, '')}" for name, ratio in ratios.items())
    if any("emulated" in arm["execution"] for arm in records.data("preflight").get("arms", {}).values()):
        return (
            f"The speed of this machine says nothing about 4-bit units, which it has not: {texts} of the baseline's "
            "tokens a second, emulated."
        ), {}
    return f"Tokens a second over the baseline's, measured alone on this device: {texts}.", ratios


def required_seeds(records: StageRecords, candidates: Sequence[Data]) -> str:
    """Returns the seeds that would probably decide, and the budget that they need on this machine."""
    plan, study = records.data("plan"), records.data("parity")
    if not plan:
        return "a study: the same command goes on"
    steps, count, slowdown = plan["steps"] or plan["fewest_steps"], max(MIN_SEEDS, plan["seeds"]), 1.0
    if study:  # the study may have been slower than planned
        runs, seconds = study["runs"], records.seconds("parity")
        slowdown = max(1.0, seconds * runs["planned"] / max(1, runs["done"]) / plan["seconds"])
    for arm in candidates if study and study["complete"] else ():
        if arm["interval"] is None or arm["interval"]["low"] is None:
            continue
        margin, alpha = parse_margin(study["plan"]["margin"]).value, SIGNIFICANCE_LEVEL / study["plan"]["candidates"]
        seeds = seeds_needed(ConfidenceInterval(**arm["interval"]), margin, alpha=alpha)
        if seeds is None:
            remedy = "longer runs, or a margin that says what a gap costs"
            return f"more than 64 seeds for {arm['name']}, whose gap is about the margin itself: {remedy}"
        withheld = ", but " in arm["verdict"]["reason"]  # withheld by a control, not undecided by its interval
        count = max(count, 2 * len(study["plan"]["seeds"]) if withheld else seeds)
    costs = plan["costs"]
    seconds = costs["first_s"] + count * (costs["again_s"] + steps * costs["step_s"])
    budget = f"--budget {math.ceil((plan['before_s'] + slowdown * seconds) / (1 - plan['reserve']) / 60)}m"
    if not study or not study["complete"]:  # the same directory resumes with the runs it has
        return f"about {count} seeds of {steps} steps: the same command with {budget}"
    return f"about {count} seeds of {steps} steps in a new directory: {budget} --seeds {count}"
