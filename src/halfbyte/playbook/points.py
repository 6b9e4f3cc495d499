"""The table, point by point: what was looked at, each arm's figure, the limit, and whether it is held."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from halfbyte.parity.analysis import interval_text
from halfbyte.parity.arms import BASELINE, CANDIDATE

from .decision import BETTER, STALLED, alarms, cut_short, word_of
from .records import STAGES, Records

Data = Mapping[str, Any]
PASS, FAIL, OPEN = "PASS", "FAIL", "CANNOT TELL"
CALM = 3.0  # times the baseline's largest gradient norm over its median
TITLES = {
    "doctor": "Self-test of every quantizer", "preflight": "Pre-flight", "trace": "Trace and telemetry",
    "inspect": "Noise of every GEMM, and the policy that it suggests", "bench": "Speed and memory of every arm",
    "plan": "Size of the study", "parity": "Parity study, radar", "eval": "Downstream scores",
    "compare": "Input wait and gradients of the runs", "ablation": "Ablation", "cluster": "The cluster",
}  # fmt: skip


@dataclass(frozen=True)
class Point:
    """`values`: arm -> its figure as text; `verdict` is empty where a point has no limit; `made_by`: stage."""

    what: str
    values: Mapping[str, str]
    limit: str
    verdict: str
    made_by: str


def arms_of(records: Records) -> list[str]:
    """The baseline and the candidates, in their order."""
    study, checked = records.data("parity"), records.data("preflight")
    if study is not None:
        return [arm["name"] for arm in study["arms"] if arm["kind"] in (BASELINE, CANDIDATE)]
    return list(checked["arms"]) if checked else []


def points(records: Records) -> list[Point]:
    """Every point of which something is known."""
    parts: Sequence[Callable[[Records], Iterator[Point]]] = (
        _health, _study, _gradients, _scores, _bench, _input, _trace, _noise, _cluster,
    )  # fmt: skip
    return [point for part in parts for point in part(records)]


def _health(records: Records) -> Iterator[Point]:
    doctor, checked = records.data("doctor"), records.data("preflight")
    names = arms_of(records)
    if doctor is not None and names:
        good = sum(check["passed"] for check in doctor["checks"])
        text = f"{good} of {len(doctor['checks'])}"
        verdict = PASS if doctor["passed"] else FAIL
        yield Point("quantizers with their stored bits", {names[0]: text}, "all", verdict, "doctor")
    if checked is not None:
        rows = checked["arms"]
        runs = {name: ", ".join(row["execution"]) for name, row in rows.items()}
        yield Point("its linears run here", runs, "", "", "preflight")
        share = {name: f"{row['share_4bit']:.0%}" for name, row in rows.items()}
        yield Point("FLOPs in 4 bits", share, "", "", "preflight")
        memory = {name: f"{row['memory_gib']:.2f} GiB" for name, row in rows.items()}
        limit = f"{checked['device_memory_gib']:.1f} GiB" if checked["device_memory_gib"] else ""
        held = all(row["memory_gib"] <= (checked["device_memory_gib"] or math.inf) for row in rows.values())
        yield Point("memory a device, estimated", memory, limit, (PASS if held else FAIL) if limit else "", "preflight")


def _study(records: Records) -> Iterator[Point]:
    study = records.data("parity")
    if study is None:
        return
    shown = {arm["name"]: arm for arm in study["arms"] if arm["kind"] in (BASELINE, CANDIDATE)}
    candidates = {name: arm for name, arm in shown.items() if arm["kind"] == CANDIDATE}
    losses = {name: fmean(arm["final"].values()) for name, arm in shown.items() if arm["final"]}
    yield Point("validation loss, nats a token", _texts(losses, "{:.4f}"), "", "", "parity")
    margin = f"±{study['plan']['margin']}"
    words = [BETTER if word_of(study, arm) == BETTER else arm["verdict"]["word"] for arm in candidates.values()]
    gaps = {name: interval_text(arm["interval"], arm["unit"]) or "diverged" for name, arm in candidates.items()}
    apart = ", ".join(f"{name} {word}" for name, word in zip(candidates, words, strict=True))
    verdict = words[0] if len(set(words)) == 1 else apart
    unit = next(iter(shown.values()))["unit"]
    yield Point(f"gap to the baseline, {unit} [90% over seeds]", gaps, margin, verdict, "parity")
    checks = study["controls"]
    floor = checks["noise_floor"]
    if floor is not None:
        text = {next(iter(shown)): f"{floor:.4f} {unit}"}
        near = {True: PASS, False: FAIL, None: OPEN}[checks["near_seen"]]
        yield Point("noise of equal runs; twice the margin is seen", text, "seen", near, "parity")
    if checks["broken"] is not None:
        seen = {True: PASS, False: FAIL, None: OPEN}[checks["sensitive"]]
        yield Point("a recipe broken on purpose is seen", {}, "seen", seen, "parity")
    found = {name: len(alarms(arm)) for name, arm in candidates.items()}
    probed = {name: sum(len(p["gemms"]) for p in arm["radar"]) for name, arm in candidates.items()}
    if any(probed.values()) or any(found.values()):
        text = {name: f"{found[name]} in {probed[name]} GEMMs" if probed[name] else "not probed" for name in candidates}
        yield Point("radar: alarms", text, "0", FAIL if any(found.values()) else PASS, "parity")
    spikes = {name: str(sum(arm["spikes"].values())) for name, arm in shown.items()}
    yield Point("spikes of the loss", spikes, "", "", "parity")
    more = {name: (arm["token_overhead"] or {"mean": None})["mean"] for name, arm in candidates.items()}
    told = {name: f"{value:+.1f}%" for name, value in more.items() if value is not None}
    if told:
        yield Point("tokens more for the same loss", told, "", "", "parity")


def _gradients(records: Records) -> Iterator[Point]:
    found = {run["arm"]: run["gradient_norm"] for run in (records.data("compare") or {"runs": ()})["runs"]}
    peaks = {name: norm["largest"] / norm["median"] for name, norm in found.items() if norm and norm["median"]}
    if peaks:
        first = next(iter(peaks.values()))
        held = PASS if max(peaks.values()) <= CALM * first else FAIL
        texts, limit = _texts(peaks, "{:.1f}"), f"{CALM * first:.1f}"
        yield Point("gradient norm, largest over median", texts, limit, held, "compare")


def _scores(records: Records) -> Iterator[Point]:
    found = records.data("eval")
    tasks = dict.fromkeys(r["task"] for arm in (found or {"arms": {}})["arms"].values() for r in arm["results"])
    for task in tasks:
        values = {}
        for name, arm in (found or {})["arms"].items():
            metrics: Data = next((r["metrics"] for r in arm["results"] if r["task"] == task), {})
            chosen = next((m for m in ("acc_norm", "acc", "nats_per_token") if m in metrics), None)
            if chosen:
                error = metrics[chosen]["error"]
                values[name] = f"{metrics[chosen]['value']:.4f}" + ("" if error is None else f" ± {error:.4f}")
        yield Point(task, values, "", "", "eval")


def _bench(records: Records) -> Iterator[Point]:
    found = records.data("bench")
    rows = {row["arm"]: row for row in found["rows"]} if found else {}
    fields = (
        ("step alone, ms", "milliseconds", "{:.1f}"), ("tokens/s a device", "tokens_per_s", "{:,.0f}"),
        ("TFLOP/s a device", "tflops", "{:.3g}"), ("MFU", "mfu", "{:.1%}"), ("peak memory, GiB", "peak_gib", "{:.2f}"),
        ("memory of the program, GiB", "needed_gib", "{:.2f}"),
    )  # fmt: skip
    for what, field, form in fields:
        values = {name: row[field] for name, row in rows.items() if row[field] is not None}
        if values:
            yield Point(what, _texts(values, form), "", "", "bench")
        elif rows:
            yield Point(what, {}, "", f"missing: {ABSENT.get(field, 'it did not run')}", "bench")


ABSENT = {
    "mfu": "the peak of this device is not in the table",
    "peak_gib": "this device's allocator does not say",
}


def _input(records: Records) -> Iterator[Point]:
    found = records.data("compare")
    if found is None:
        return
    speeds = {run["arm"]: run["speed"] for run in found["runs"]}
    times = {name: 1e3 * speed["step_time_s"] for name, speed in speeds.items() if speed["step_time_s"]}
    yield Point("step in training, ms", _texts(times, "{:.0f}"), "", "", "compare")
    waits = {name: speed["input_wait"] or 0.0 for name, speed in speeds.items()}
    held = PASS if max(waits.values()) <= STALLED else FAIL
    yield Point("input wait, of a step", _texts(waits, "{:.1%}"), f"{STALLED:.0%}", held, "compare")


def _trace(records: Records) -> Iterator[Point]:
    found = records.data("trace")
    if found is None:
        return
    if not found["breakdown"]:
        yield Point("parts of a step", {}, "", "missing: the profiler has seen no event of this device", "trace")
    for part, share in found["breakdown"].items():
        yield Point(f"of a step: {part}", {found["arm"]: f"{share:.1%}"}, "", "", "trace")


def _noise(records: Records) -> Iterator[Point]:
    found, short = records.data("inspect"), records.data("trace")
    if found is not None and short is not None and found["gemms"]:
        worst = found["gemms"][0]
        where = f"{worst['snr_db']:.1f} dB, layer {worst['layer']} {worst['site']} {worst['gemm']}"
        held = PASS if worst["snr_db"] >= found["wanted"] else FAIL
        yield Point("noisiest GEMM", {short["arm"]: where}, f"{found['wanted']:g} dB", held, "inspect")


def _cluster(records: Records) -> Iterator[Point]:
    found = records.data("cluster")
    if found is None:
        return
    on = f"{found['count']} {found['device']}"
    rows = found["recipes"]
    steps = {name: f"{row['step_time_s']:.3f} s" for name, row in rows.items()}
    yield Point(f"step on {on}, simulated", steps, "", "", "cluster")
    fits = {name: "yes" if row["fits"] else "NO" for name, row in rows.items()}
    yield Point(f"fits {on}", fits, "yes", PASS if set(fits.values()) == {"yes"} else FAIL, "cluster")


def _texts(values: Mapping[str, float], form: str) -> dict[str, str]:
    return {name: form.format(value) for name, value in values.items()}


def missing(records: Records) -> list[tuple[str, str]]:
    """(section, why it is not there), for every stage without data, and for runs that a study had no time for."""
    found, study = ((stage, records.get(stage)) for stage in STAGES), records.data("parity")
    cut = [(TITLES["parity"], cut_short(study))] if study and not study["complete"] else []
    return cut + [
        (TITLES[stage], record["missing"] if record else "not run yet: the same command goes on")
        for stage, record in found
        if record is None or "missing" in record
    ]
