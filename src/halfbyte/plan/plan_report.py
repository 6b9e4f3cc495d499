"""Write a plan as JSON, as a self-contained HTML page (no script), and as a trace for Perfetto."""

import gzip
import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from halfbyte.io import TimelineBox, figure, html_page, html_table, notice_box, paragraph, section, timeline_chart
from halfbyte.plan.compiled_step import StepProfile
from halfbyte.plan.plan_outcome import GIB, PlanOutcome, plan_remarks, problems
from halfbyte.plan.rate_calibration import worst_fit_error
from halfbyte.plan.simulator import StepEvent, TimelineLoop, TimelineSpan, event_seconds, iter_events

MOST_SHOWN = 10  # entries of what takes longest
MEMORY_CATEGORIES = ("weights", "optimizer", "gradients", "residuals", "activations", "workspace")
LANE_OF_EVENT = {"gemm": "gemm", "attention": "attention", "pass": "memory", "send": "communication"}
CATEGORY_COLOURS = {
    "mlp": 0,
    "linears": 0,
    "attention linears": 5,
    "head": 7,
    "attention": 2,
    "operands": 1,
    "communication": 3,
}
PLAN_COLUMNS = ("recipe", "fits", "GiB", "step s", "queued s", "TFLOP/s", "tokens/s", "MFU", "exposed s", "vs")
LONGEST_COLUMNS = ("what", "for", "source", "ms a step")
SENT = ("collective", "over", "dtype", "link", "times", "GB", "ms alone", "hidden by")


def outcome_to_json(plan: PlanOutcome, others: Sequence[PlanOutcome]) -> dict[str, Any]:
    """Returns the JSON entry of one recipe."""
    profile, seconds = plan.step_profile, plan.shared.seconds
    tflops = plan.tflops(seconds)
    return {
        "fits": plan.fits,
        "memory": {**profile.memory, "total": profile.bytes_needed, "limit": plan.cluster.usable_bytes},
        "native_fp4_gemms": profile.native,
        "native_fp4_gemms_expected": profile.native_expected,
        "gemm_flops": profile.gemm_flops,
        "gemm_flops_needed": profile.needed_flops,
        "gemms": flops_by_linear(profile),
        "collectives": collective_table(plan),
        "operand_bytes": profile.operand_bytes,
        "operand_bytes_compulsory": profile.compulsory,
        "bytes_by_purpose": bytes_by_purpose(profile),
        "step_time_s": seconds,
        "step_time_queued_s": plan.queued.seconds,
        "compute_time_s": plan.compute,
        "mocked_time_s": plan.mock_seconds,
        "tflops_per_device": tflops,
        "tflops_per_device_queued": plan.tflops(plan.queued.seconds),
        "tokens_per_s_per_device": plan.tokens / seconds,
        "mfu": plan.mfu,
        "exposed_communication_s": plan.shared.exposed_communication,
        "exposed_communication_queued_s": plan.queued.exposed_communication,
        "speedup_vs": {other.config.recipe: other.shared.seconds / seconds for other in others if other is not plan},
        "band": {
            "relative": plan.band,
            "tflops_per_device": [tflops * (1 - plan.band), tflops * (1 + plan.band)],
        },
        "calibration_residual": worst_fit_error(plan.cluster.device),
        "most_expensive": longest_events(plan),
        "compiled": profile.compiled,
        "mesh": plan.config.mesh,
        "batch": plan.config.batch,
        "remat": plan.config.remat,
        "policy": plan.config.policy,
        "problems": list(problems(plan)),
        "remarks": list(plan_remarks(plan)),
    }


def flops_by_linear(profile: StepProfile) -> list[dict[str, Any]]:
    """Returns calls and FLOPs per step by linear and GEMM format."""
    total: Counter[tuple[str, str]] = Counter()
    calls: Counter[tuple[str, str]] = Counter()
    for event, times in iter_events(profile.events):
        if event.what == "gemm":
            total[event.purpose, event.format] += int(times * event.flops)
            calls[event.purpose, event.format] += times
    return [
        {"site": name, "format": format, "calls": calls[name, format], "flops": flops}
        for (name, format), flops in total.most_common()
    ]


def bytes_by_purpose(profile: StepProfile) -> dict[str, float]:
    """Returns the bytes per step of passes (neither GEMM, attention nor collective) by purpose."""
    total: Counter[str] = Counter()
    for event, times in iter_events(profile.events):
        if event.what == "pass":
            total[event.purpose] += int(times * event.moved)
    return dict(total.most_common())


def collective_table(plan: PlanOutcome) -> list[dict[str, Any]]:
    """Returns the collectives of a step, grouped by kind, axes, dtypes, link and source, the longest first."""
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for send, times, concurrent in _collective_overlaps(plan.step_profile.events, 1):
        seconds, link = plan.rates.collective_seconds(send.format, send.moved, send.inner, send.outer)
        key = (send.format, send.axes, send.dtypes, link, send.asynchronous, send.source)
        row = rows.setdefault(key, {
            "kind": send.format, "axes": list(send.axes), "dtypes": list(send.dtypes), "link": link,
            "asynchronous": send.asynchronous, "source": send.source, "times": 0, "bytes": 0.0, "seconds": 0.0,
            "hidden_by": Counter(),
        })  # fmt: skip
        row["times"] += times
        row["bytes"] += times * send.moved
        row["seconds"] += times * seconds
        for event in concurrent:
            row["hidden_by"][event.purpose] += times * event_seconds(event, plan.rates)
    for row in rows.values():
        row["hidden_by"] = [name for name, _ in row["hidden_by"].most_common(3)]
    return sorted(rows.values(), key=lambda row: -row["seconds"])


def _collective_overlaps(events: Sequence[StepEvent], times: int) -> Iterator[tuple[StepEvent, int, list[StepEvent]]]:
    """Yields (collective, executions per step, compute events between its start and its end)."""
    for start, event in enumerate(events):
        if event.what == "loop":
            yield from _collective_overlaps(event.body, times * event.times)
        elif event.what == "send":
            end = next(
                (i for i in range(start, len(events)) if (events[i].what, events[i].name) == ("wait", event.name)),
                start,
            )
            concurrent = [e for e, _ in iter_events(events[start + 1 : end]) if e.what in ("gemm", "attention", "pass")]
            yield event, times, concurrent


def longest_events(plan: PlanOutcome) -> list[dict[str, Any]]:
    """Returns the MOST_SHOWN entries that take longest, by operation, purpose and source line."""
    total: defaultdict[tuple[str, str, str], float] = defaultdict(float)
    for event, times in iter_events(plan.step_profile.events):
        if event.what in ("gemm", "attention", "pass"):
            name = f"{event.what} {event.format}".strip()
            total[name, event.purpose, event.source] += times * event_seconds(event, plan.rates)
    total["exposed communication", "communication", ""] = plan.shared.exposed_communication
    ranked = sorted(total.items(), key=lambda item: item[1], reverse=True)
    return [
        {"what": what, "purpose": purpose, "source": source, "seconds": seconds}
        for (what, purpose, source), seconds in ranked[:MOST_SHOWN]
    ]


def plan_cells(name: str, row: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the table row of one recipe, in the order of PLAN_COLUMNS."""
    low, high = row["band"]["tflops_per_device"]
    faster = ", ".join(f"{ratio:.2f}x {other}" for other, ratio in row["speedup_vs"].items())
    return (
        name, "yes" if row["fits"] else "NO", f"{row['memory']['total'] / GIB:.1f}", f"{row['step_time_s']:.3f}",
        f"{row['step_time_queued_s']:.3f}", f"{row['tflops_per_device']:,.0f} ({low:,.0f} to {high:,.0f})",
        f"{row['tokens_per_s_per_device']:,.0f}", f"{row['mfu']:.1%}", f"{row['exposed_communication_s']:.3f}",
        faster or "-",
    )  # fmt: skip


def plan_html(title: str, data: Mapping[str, Any], plans: Mapping[str, PlanOutcome]) -> str:
    """Returns the plan of all recipes as one self-contained HTML page."""
    recipes = data["recipes"]
    parts = [notice_box(f"{name}: {problem}") for name in recipes for problem in recipes[name]["problems"]]
    parts += [paragraph(f"{name}: {remark}", soft=True) for name in recipes for remark in recipes[name]["remarks"]]
    table = html_table(PLAN_COLUMNS, [plan_cells(name, row) for name, row in recipes.items()])
    parts.append(section("Recipes", table, paragraph(data["band"])))
    parts.append(section("Memory of a device", figure("GiB", memory_bars(recipes))))
    for name, plan in plans.items():
        row = recipes[name]
        parts.append(section(
            f"A step in {name}",
            figure("One iteration of each loop, in order; width is duration", timeline_svg(plan.shared.spans)),
            html_table(LONGEST_COLUMNS, map(longest_row, row["most_expensive"])),
            html_table(SENT, map(_collective, row["collectives"][:12])),
        ))  # fmt: skip
    if "budget" in data:
        columns = ("recipe", "days", "cost in the unit of --price", "MWh of GPUs at most")
        parts.append(section("Budget", html_table(columns, [budget_cells(*row) for row in data["budget"].items()])))
    return html_page(title, parts)


def budget_cells(name: str, row: Mapping[str, Any]) -> tuple[str, ...]:
    """The budget of one recipe as a row of its table."""
    days = "{:.1f} ({:.1f} to {:.1f})".format(row["days"], *row["days_band"])
    return name, days, *(f"{row[key]:,.0f}" if row[key] else "-" for key in ("cost", "megawatt_hours_at_most"))


def longest_row(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the table row of one entry of `longest_events`, in the order of LONGEST_COLUMNS."""
    return row["what"], row["purpose"], row["source"], f"{1e3 * row['seconds']:.1f}"


def _collective(row: Mapping[str, Any]) -> tuple[str, ...]:
    kind = row["kind"] if row["asynchronous"] else f"{row['kind']} (SYNC)"
    hidden_by = ", ".join(row["hidden_by"]) or "nothing"
    return (
        kind, "+".join(row["axes"]), "+".join(row["dtypes"]), row["link"], str(row["times"]),
        f"{row['bytes'] / 1e9:.2f}",
        f"{1e3 * row['seconds']:.1f}", hidden_by,
    )  # fmt: skip


def memory_bars(recipes: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns an SVG with one bar per recipe, stacked by category, and a line at the usable memory of a device."""
    memory = {name: row["memory"] for name, row in recipes.items()}
    bars = {}
    for name, row in memory.items():
        sizes = [row[category] for category in MEMORY_CATEGORIES]
        starts = itertools.accumulate(sizes, initial=0.0)
        bars[name] = [
            TimelineBox(start, size, colour, f"{category}: {size / GIB:.1f} GiB", label=category)
            for colour, (category, start, size) in enumerate(zip(MEMORY_CATEGORIES, starts, sizes))
        ]
    limits = {name: row["limit"] for name, row in memory.items()}
    return timeline_chart(bars, end=max(max(row["total"], row["limit"]) for row in memory.values()), limits=limits)


def timeline_svg(spans: Sequence[TimelineSpan | TimelineLoop]) -> str:
    """Returns an SVG with lanes of computation and communication; each loop body is drawn once."""
    flat = list(_collapse_loops(spans, 0.0))
    boxes: dict[str, list[TimelineBox]] = {lane: [] for lane in LANE_OF_EVENT.values()}
    for span, start in flat:
        colour, faint = CATEGORY_COLOURS.get(span.event.purpose, 6), span.event.what == "send" and not span.waited
        label = f"{span.event.purpose} {span.event.format} {span.event.name}: {1e3 * span.seconds:.3f} ms"
        boxes[LANE_OF_EVENT[span.event.what]].append(TimelineBox(start, span.seconds, colour, label, faint=faint))
    return timeline_chart(boxes, end=max((start + span.seconds for span, start in flat), default=1.0))


def _collapse_loops(
    spans: Sequence[TimelineSpan | TimelineLoop], offset: float
) -> Iterator[tuple[TimelineSpan, float]]:
    """Yields (span, start) with one iteration per loop; later spans move forward by the iterations left out."""
    skipped = 0.0
    for entry in sorted(spans, key=lambda entry: entry.start):
        if isinstance(entry, TimelineLoop):
            yield from _collapse_loops(entry.spans, offset + entry.start - skipped)
            skipped += entry.seconds_per_iteration * (entry.trip_count - 1)
        else:
            yield entry, offset + entry.start - skipped


def perfetto_trace(plans: Mapping[str, PlanOutcome]) -> bytes:
    """Returns a gzipped trace for ui.perfetto.dev, loops unrolled.

    There is one process per recipe, with a thread for computation and one for communication.
    """
    events: list[dict[str, Any]] = []
    for process, (name, plan) in enumerate(plans.items()):
        events.append({"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}})
        for thread, lane in enumerate(("computation", "communication")):
            events.append({"ph": "M", "pid": process, "tid": thread, "name": "thread_name", "args": {"name": lane}})
        for span, start in _expand_loops(plan.shared.spans, 0.0):
            is_collective = span.event.what == "send"
            events.append({
                "ph": "X", "pid": process, "tid": int(is_collective),
                "name": f"{span.event.purpose} {span.event.format}".strip(),
                "ts": round(1e6 * start, 3), "dur": round(1e6 * span.seconds, 3),
                "args": {"instruction": span.event.name, "source": span.event.source},
            })  # fmt: skip
    return gzip.compress(json.dumps({"traceEvents": events}).encode(), mtime=0)


def _expand_loops(spans: Sequence[TimelineSpan | TimelineLoop], offset: float) -> Iterator[tuple[TimelineSpan, float]]:
    for entry in spans:
        if isinstance(entry, TimelineLoop):
            for iteration in range(entry.trip_count):
                yield from _expand_loops(entry.spans, offset + entry.start + iteration * entry.seconds_per_iteration)
        else:
            yield entry, offset + entry.start
