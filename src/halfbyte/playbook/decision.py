"""The one sentence: switch, do not switch, or cannot tell and what it would take.

    SWITCH          a candidate's interval over seeds lies inside the margin, or wholly below it (its loss is the lower
                    one), and the radar found nothing
    DO NOT SWITCH   every candidate's lies wholly above it, or the radar found one that is not what its recipe says;
                    or those that are as good are no faster on units of their own
    CANNOT TELL     everything else: too few seeds, intervals across the margin, a machine whose self-test failed

The error rate is the parity's: a candidate at the margin passes in 5% of studies at most, however many there are. The
radar compares numbers with what the recipe gives on the same operands: it has no error rate, and one alarm is enough.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from halfbyte.parity.analysis import body_size
from halfbyte.parity.arms import BASELINE, CANDIDATE
from halfbyte.parity.margin import parse_margin
from halfbyte.parity.plan import plan_from_json
from halfbyte.parity.statistics import ALPHA, FEWEST_SEEDS, Interval, over_seeds, seeds_needed

from .budget import study_seconds
from .records import Records

SWITCH, DO_NOT, CANNOT_TELL = "SWITCH", "DO NOT SWITCH", "CANNOT TELL"
PASS, FAIL, BETTER = "PASS", "FAIL", "BETTER"
REAL = 5.0  # tokens a parameter, below which gaps of real runs have hardly begun to show (docs/parity.md)
STALLED = 0.1  # of a step's time, waiting for data: beyond it a step time is not the recipe's
Data = Mapping[str, Any]


@dataclass(frozen=True)
class Decision:
    """`sentence` begins with `word`; `because`: what it rests on; `speed`: what the measured speed is worth; `takes`:
    what it would take to tell, where that is open; `small`: it speaks for no real run."""

    word: str
    sentence: str
    because: tuple[str, ...]
    speed: str
    takes: str = ""
    small: bool = False


def decide(records: Records) -> Decision:
    """The decision that the records support."""
    doctor, study = records.data("doctor"), records.data("parity")
    speed, ratio = speed_of(records)
    if doctor is not None and not doctor["passed"]:
        failed = ", ".join(check["name"] for check in doctor["checks"] if not check["passed"])
        bits = f"a quantizer does not give its stored bits on this machine ({failed}), so nothing computed here counts"
        return Decision(
            CANNOT_TELL, f"{CANNOT_TELL}: {bits}.", (), speed, "a machine on which `halfbyte doctor` passes"
        )
    if study is None:
        missing = (records.get("parity") or {}).get("missing", "the parity study is not over")
        takes = needed(records, None)
        return Decision(CANNOT_TELL, f"{CANNOT_TELL}: {missing}. It would take {takes}.", (), speed, takes)
    found = {arm["name"]: arm for arm in study["arms"] if arm["kind"] == CANDIDATE}
    base = next(arm["name"] for arm in study["arms"] if arm["kind"] == BASELINE)
    words = {name: word_of(study, arm) for name, arm in found.items()}
    because = tuple(line for name, arm in found.items() for line in reasons(name, arm))
    good = [name for name, word in words.items() if word in (PASS, BETTER)]
    if good:
        slow = {name: ratio[name] for name in good if ratio and words[name] == PASS and ratio.get(name, math.inf) <= 1}
        told = ", ".join(f"{name} {value:.2f}x" for name, value in slow.items())
        if len(slow) == len(good):
            what = f"as good as {base} and no faster here, in tokens a second: {told}"
            return Decision(DO_NOT, f"{DO_NOT}: {what}. {error_rate(study)}", because, speed)
        sentence = switch(study, found, [name for name in good if name not in slow], base)
        sentence += f" As good, and no faster here: {told}." if slow else ""
        return Decision(SWITCH, sentence, because, speed, small=tokens_each(study) < REAL)
    if all(word == FAIL for word in words.values()):
        what = "; ".join(f"{name}: {why(arm)}" for name, arm in found.items())
        return Decision(DO_NOT, f"{DO_NOT}, stay with {base}. {what}. {fail_rate(study, found)}", because, speed)
    takes = needed(records, [found[name] for name, word in words.items() if word == CANNOT_TELL])
    cut = "" if study["complete"] else cut_short(study) + ". "
    what = cut + "; ".join(f"{name}: {why(arm)}" for name, arm in found.items())
    return Decision(CANNOT_TELL, f"{CANNOT_TELL}, stay with {base} until then. {what}. It would take {takes}.", because,
                    speed, takes)  # fmt: skip


def word_of(study: Data, arm: Data) -> str:
    """The study's word on a candidate, FAIL if the radar has an alarm. A loss that is *lower* than the baseline's by
    more than the margin fails a test of equality and is a reason to switch: BETTER, where it is told at a level that
    all candidates share and beside a broken recipe that was seen, else CANNOT TELL."""
    word: str = arm["verdict"]["word"]
    if alarms(arm) or word != FAIL or len(arm["gaps"]) < len(study["plan"]["seeds"]):  # or diverged
        return FAIL if alarms(arm) else word
    margin = parse_margin(study["plan"]["margin"]).value
    if arm["verdict"]["interval"]["high"] >= -margin:
        return FAIL
    high = shared_interval(study, arm).high
    told = high is not None and high < -margin and study["controls"]["sensitive"] is True
    return BETTER if told else CANNOT_TELL


def shared_interval(study: Data, arm: Data) -> Interval:
    """Of a candidate's gaps, at the level that the first of all candidates to pass needs."""
    return over_seeds(list(arm["gaps"].values()), 1 - 2 * ALPHA / study["plan"]["candidates"])


def cut_short(study: Data) -> str:
    return "The time was over after {done} of {planned} runs of the study".format(**study["runs"])


def alarms(arm: Data) -> list[str]:
    """Every alarm of the radar in an arm's runs."""
    return [text for probe in arm["radar"] for text in probe["alarms"]]


def why(arm: Data) -> str:
    found = alarms(arm)
    return f"the radar found that it is not what its recipe says ({found[0]})" if found else arm["verdict"]["reason"]


def reasons(name: str, arm: Data) -> list[str]:
    verdict, found = arm["verdict"], alarms(arm)
    lines = [f"{name}: {verdict['word']}, {verdict['reason']}"]
    if found:
        return [*lines, *(f"{name}: RADAR ALARM, {text}" for text in found[:3])]
    probed = sum(len(probe["gemms"]) for probe in arm["radar"])
    radar = f"radar, {probed} GEMMs beside what the recipe gives, no alarm" if probed else "no radar was run"
    more = (arm["token_overhead"] or {"mean": None})["mean"]
    cost = "" if more is None else f"; the baseline's last loss took it {more:+.1f}% tokens"
    return [lines[0] + cost, f"{name}: {radar}"]


def error_rate(study: Data) -> str:
    many = study["plan"]["candidates"]
    return (
        f"A recipe that really is {study['plan']['margin']} off would get this answer in at most {100 * ALPHA:g}% of "
        f"such studies ({many} candidate{'s' * (many > 1)}, {len(study['plan']['seeds'])} seeds)."
    )


def switch(study: Data, found: Mapping[str, Data], good: Sequence[str], base: str) -> str:
    """The sentence, about the best of those that may be taken; its size comes first where that is no real run."""
    best = min(good, key=lambda name: found[name]["verdict"]["interval"]["high"])
    each, size = tokens_each(study), parameters(study)
    of = f"{size / 1e6:,.1f}M parameters (without embeddings) and {each:.2g} tokens a parameter"
    first = f", for runs of this size alone ({of}, far too few to speak for a real one)" if each < REAL else ""
    where = f"its loss is within ±{study['plan']['margin']} of {base}'s: {found[best]['verdict']['reason']}"
    if found[best]["verdict"]["word"] == FAIL:
        where = f"its loss is lower than {base}'s by more than {study['plan']['margin']}: {lower(study, found[best])}"
    rest = "" if each < REAL else f" It holds for {of}."
    chosen = f" Of {len(good)} that pass it is the one whose interval ends lowest." if len(good) > 1 else ""
    return f"{SWITCH} to {best}{first}: {where}.{chosen} {error_rate(study)}{rest}"


def lower(study: Data, arm: Data) -> str:
    margin, shared = parse_margin(study["plan"]["margin"]), shared_interval(study, arm)
    ends = f"{margin.show(shared.low or 0.0)} to {margin.show(shared.high or 0.0)}"
    return f"{margin.show(shared.mean)}, {100 * shared.level:.4g}% interval over {shared.count} seeds {ends}"


def parameters(study: Data) -> int:
    """Without embeddings."""
    return body_size(plan_from_json(study["plan"], "the study's plan").base.model)


def tokens_each(study: Data) -> float:
    """Tokens a parameter that the study's runs have seen."""
    return study["arms"][0]["curves"][0]["tokens"][-1] / parameters(study)


def fail_rate(study: Data, found: Mapping[str, Data]) -> str:
    alarmed = [bool(alarms(arm)) for arm in found.values()]
    radar = "The radar compares with what the recipe gives on the same operands: an alarm is no matter of chance."
    loss = f"One that really is within the margin would get this answer in at most {100 * ALPHA:g}% of such studies."
    return " ".join([loss] * (not all(alarmed)) + [radar] * any(alarmed))


# Speed


def speed_of(records: Records) -> tuple[str, dict[str, float] | None]:
    """(what the measured speed is worth, in a sentence; arm -> its tokens a second over the baseline's, None where that
    is not the recipe's)."""
    compared, measured = records.data("compare"), records.data("bench")
    waits = {run["arm"]: run["speed"]["input_wait"] or 0.0 for run in compared["runs"]} if compared else {}
    if waits and max(waits.values()) > STALLED:
        worst = max(waits, key=lambda name: waits[name])
        return (
            f"The speed of these runs is not the recipe's: of a step of {worst} {waits[worst]:.0%} was spent waiting "
            "for data. Mend the input pipeline first; the bench's figures, on synthetic tokens, do not have that wait."
        ), None
    rows = {row["arm"]: row for row in measured["rows"]} if measured else {}
    rates = {name: row["tokens_per_s"] for name, row in rows.items() if row["tokens_per_s"]}
    if not rates or measured is None or measured["baseline"] not in rates:
        return "The speed was not measured.", None
    ratio = {name: rate / rates[measured["baseline"]] for name, rate in rates.items() if name != measured["baseline"]}
    steps = {run["arm"]: run["speed"]["step_time_s"] for run in compared["runs"]} if compared else {}
    first = steps.get(measured["baseline"])
    trained = {name: first / own for name, own in steps.items() if own and first}
    told = ", ".join(
        f"{name} {value:.2f}x" + (f" ({trained[name]:.2f}x in training)" if name in trained else "")
        for name, value in ratio.items()
    )
    checked = records.data("preflight") or {"arms": {}}
    if any("emulated" in row["execution"] for row in checked["arms"].values()):
        return (
            f"The speed of this machine says nothing about 4-bit units, which it has not: {told} of the baseline's "
            "tokens a second, emulated."
        ), None
    return f"Tokens a second over the baseline's, measured alone on this device: {told}.", ratio


# What it would take


def needed(records: Records, open_arms: Sequence[Data] | None) -> str:
    """Seeds, and how long they would take here."""
    plan, study = records.data("plan"), records.data("parity")
    if plan is None:
        return "a study: the same command goes on"
    steps = plan["steps"] or plan["fewest_steps"]
    counts = [FEWEST_SEEDS, plan["seeds"]]
    if study is not None and study["complete"] and open_arms:
        margin = parse_margin(study["plan"]["margin"]).value
        for arm in open_arms:
            if arm["interval"] is None or arm["interval"]["low"] is None:
                continue
            many = seeds_needed(Interval(**arm["interval"]), margin, alpha=ALPHA / study["plan"]["candidates"])
            if many is None:
                return (
                    f"more than 64 seeds for {arm['name']}, whose gap is about the margin itself: longer runs, or a "
                    "margin that says what a gap costs"
                )
            counts.append(many if ", but " not in arm["verdict"]["reason"] else 2 * len(study["plan"]["seeds"]))
    count = max(counts)
    minutes = (plan["before_s"] + slower(records) * study_seconds(count, steps, **plan["costs"])) / 60
    minutes /= 1 - plan["reserve"]
    budget = f"--budget {math.ceil(minutes)}m"
    if study is None and not plan["seeds"]:  # nothing has been looked at yet
        return f"about {count} seeds of {steps} steps: the same command with {budget}"
    return f"about {count} seeds of {steps} steps in a new directory: {budget} --seeds {count}"


def slower(records: Records) -> float:
    """What the study took over what was planned for it, where that was too hopeful."""
    record, plan = records.get("parity") or {}, records.data("plan")
    if "data" not in record or plan is None:
        return 1.0
    runs = record["data"]["runs"]
    return max(1.0, record["seconds"] * runs["planned"] / max(1, runs["done"]) / plan["seconds"])
