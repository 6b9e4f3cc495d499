"""What a training step would do on a cluster: fit, speed, cost, without a GPU.

The trainer's own step is compiled for the cluster with the CUDA compiler plugin (extra `plan`), without a GPU; its
schedule is read and simulated. Figures carry a band: prefer ratios. docs/plan.md says what is assumed.

halfbyte plan llama3.1-405b --device gb300 --count 128 --recipe nvfp4 --versus fp8,bf16 --tokens 15T --price 6
halfbyte plan llama3-8b --device h200 --count 8 --recipe fp8 --versus bf16 --html plan.html"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from halfbyte.cli.console import (
    EXIT_NOT_PASSED,
    EXIT_OK,
    CommandResult,
    console,
    print_line,
    print_paragraph,
    print_table,
    rich_table,
)
from halfbyte.io import atomic_write, check_float, check_int, validated_output_path
from halfbyte.io.install_command import install_command

SHOWN = 12  # layouts in the table of --search


@dataclass(frozen=True)
class Args:
    model: Annotated[str, tyro.conf.Positional]
    """A model preset (llama3-8b, ...), a config (.json), a run directory, or a Hugging Face folder."""
    device: str = "gb300"
    """h100, h200, b200, gb200, b300 or gb300."""
    count: int = 128
    """How many of them."""
    recipe: str = "nvfp4"
    versus: str = ""
    """Recipes to compare it with, comma-separated."""
    policy: str = ""
    """Which linears are quantized; empty: the preset's."""
    mesh: str = ""
    """As in `halfbyte train`; empty: the preset's, or FSDP over all devices."""
    batch: int = 0
    """Sequences a step; 0: the preset's."""
    seq: int = 0
    """Tokens a sequence; 0: the preset's."""
    remat: str = ""
    """none, dots, quantized or full; empty: the preset's."""
    reduce_dtype: str = ""
    """Type that gradients are summed in; empty: the preset's."""
    schedule_by: Literal["roofline", "xla"] = "roofline"
    """As in `halfbyte train`: how long things take when XLA orders a step on several GPUs."""
    xla_flags: Literal["recommended", "own-turn"] = "recommended"
    """As in `halfbyte train`: settings of XLA."""
    layers: int = 0
    """Layers of the model; 0: all."""
    tokens: str = ""
    """Tokens of the whole run (15T, 300B): days, cost and energy."""
    price: float = 0.0
    """Of a GPU for an hour."""
    parity: Path | None = None
    """The report.json of `halfbyte parity`, whose token overheads decide whether a faster step is a gain."""
    search: bool = False
    """Compare layouts: mesh, remat and the type that gradients are summed in."""
    minutes: float = 15.0
    """With --search: no layout is begun that would end later; another call goes on where this one ended."""
    html: Path | None = None
    """One self-contained page."""
    trace: Path | None = None
    """The simulated schedule for ui.perfetto.dev (.json.gz)."""


def run(args: Args) -> CommandResult:
    from halfbyte import plan
    from halfbyte.devices import device_by_name
    from halfbyte.plan import plan_outcome

    for flag in ("html", "trace"):
        if getattr(args, flag) is not None:
            validated_output_path(getattr(args, flag), flag=f"--{flag}")
    known = plan_outcome.token_overheads(args.parity) if args.parity else {}
    tokens = plan.parse_tokens(args.tokens) if args.tokens else 0.0
    _check_together(args)
    on = plan.make_cluster(device_by_name(args.device), args.count)
    if args.search:
        return _search(args, on)
    found: dict[str, Any] = {}
    names = dict.fromkeys([args.recipe, *filter(None, args.versus.split(","))])
    for name, (config, assumed) in {name: plan_config(args, name, on) for name in names}.items():  # all, then compiled
        if args.xla_flags != "recommended":
            assumed += (f"XLA has the flags {args.xla_flags}",)
        found[name] = plan.evaluate_plan(
            config, on, plan.profile_step(config, on, args.xla_flags, say=print_line), assumed=assumed
        )
    data = _data(args, on, found)
    if tokens:
        data["budget"] = {}
        for name, each in found.items():
            overhead = plan.overhead_of(each.config, known)
            data["budget"][name] = plan_outcome.run_budget(each, tokens=tokens, price=args.price, overhead=overhead)
    if known:
        data["break_even"] = plan_outcome.break_even_overhead(found[args.recipe], list(found.values()), known)
    _show(data)
    _write(args, data, found)
    return CommandResult(data, EXIT_NOT_PASSED if any(row["problems"] for row in data["recipes"].values()) else EXIT_OK)


def _check_together(args: Args) -> None:
    """Raises ValueError for flags that would have no effect, and for a CUDA compiler that is installed in part."""
    from halfbyte.devices import check_cuda_compiler
    from halfbyte.plan.compiled_step import can_compile

    idle = [name for name in ("versus", "tokens", "price", "parity", "html", "trace") if getattr(args, name)]
    other = args.xla_flags != "recommended"
    if other:
        idle.append("xla-flags")
    if args.search and idle:
        raise ValueError(f"search: it compares layouts of one recipe, without --{' and --'.join(idle)}; leave one out")
    if other and not can_compile():
        raise ValueError(f"xla-flags: nothing is compiled without the CUDA compiler: {install_command('plan')}")
    if can_compile():
        check_cuda_compiler()
    if args.price and not args.tokens:
        raise ValueError("price: what a run costs takes its --tokens (15T, 300B)")


def plan_config(args: Args, recipe: str, on: Any) -> tuple[Any, tuple[str, ...]]:
    """The preset's run with the flags of this command on `on`, and what was assumed."""
    from halfbyte.cli.flag_parsing import config_for_name
    from halfbyte.plan import place_run

    preset: Any = config_for_name(args.model)
    check_int("batch", args.batch, zero="the preset's")
    check_int("layers", args.layers, zero="all")
    check_float("price", args.price, holds=args.price >= 0, wanted="0 or more")
    check_float("minutes", args.minutes, holds=args.minutes >= 0, wanted="0 or more")
    model = dataclasses.replace(preset.model, layers=args.layers or preset.model.layers)
    changes: dict[str, Any] = {"policy": args.policy, "remat": args.remat, "seq": args.seq or preset.seq or 8192}
    changes = {name: value for name, value in changes.items() if value}
    changes |= {"model": model, "recipe": recipe, "data": "synthetic", "schedule_by": args.schedule_by}
    config = dataclasses.replace(preset, **changes)
    if args.reduce_dtype:
        precision = dataclasses.replace(config.precision, reduce_dtype=args.reduce_dtype)
        config = dataclasses.replace(config, precision=precision)
    return place_run(config, on, mesh=args.mesh, batch=args.batch)


def _data(args: Args, on: Any, found: Mapping[str, Any]) -> dict[str, Any]:
    from halfbyte.plan.plan_report import outcome_to_json
    from halfbyte.plan.rate_calibration import calibration_note

    ordered = list(found.values())
    return {
        "model": args.model,
        "device": on.device.name,
        "count": on.count,
        "rack": on.rack,
        "recipes": {name: outcome_to_json(each, ordered) for name, each in found.items()},
        "band": calibration_note(on.device, max(each.band for each in ordered)),
        "peaks_reached": dict(ordered[0].rates.gemm),
    }


def _show(data: Mapping[str, Any]) -> None:
    from halfbyte.plan import plan_report

    title = f"{data['model']} on {data['count']} {data['device']}"
    for words in dict.fromkeys(row["remarks"][0] for row in data["recipes"].values() if not row["compiled"]):
        print_paragraph(words)
    rows = [plan_report.plan_cells(name, row) for name, row in data["recipes"].items()]
    print_table(plan_report.PLAN_COLUMNS, rows, title=title)
    for name, row in data["recipes"].items():
        print_paragraph(
            f"{name}: mesh {row['mesh'] or 'one device'}, batch {row['batch']}, remat {row['remat']}, "
            f"policy {row['policy']}"
        )
        for words in (*row["problems"], *row["remarks"]):
            print_paragraph(f"  {words}")
    first = next(iter(data["recipes"].values()))
    # File and line: functions are in the page. A table that were transposed for its width would have ten columns.
    longest = [{**row, "source": ":".join(row["source"].split(":")[:2])} for row in first["most_expensive"]]
    cells = map(plan_report.longest_row, longest)
    table = rich_table(plan_report.LONGEST_COLUMNS, cells, title="what takes longest", numbers=3)
    table.columns[2].overflow = "fold"  # a path has no spaces to wrap at
    console().print(table)
    for name, each in data.get("budget", {}).items():
        worth = f"(a percent of step time is worth {(each['cost'] or 0) / 100:,.0f})"
        cost = f", cost {each['cost']:,.0f} in the unit of --price {worth}" if each["cost"] else ""
        energy = f", at most {each['megawatt_hours_at_most']:,.0f} MWh for the GPUs without hosts, network and cooling"
        unknown = "break_even" in data and each["token_overhead"] is None
        more = "; the report does not say how many more it needs" if unknown else ""
        days = "{:.1f} days ({:.1f} to {:.1f})".format(each["days"], *each["days_band"])
        print_paragraph(f"{name}: {days} to {each['tokens']:.3g} tokens{cost}{energy}{more}")
    for each in data.get("break_even", ()):
        verdict = {True: "a gain", False: "no gain", None: "not known: the study has not both"}[each["gain"]]
        print_paragraph(
            f"against {each['against']}: may need {each['may_need_more_tokens']:.1%} more tokens; {verdict}"
        )
    print_paragraph(data["band"])


def _write(args: Args, data: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    from halfbyte.plan import plan_report

    title = f"{args.model} on {args.count} {args.device}"
    made: dict[Path | None, Callable[[], str | bytes]] = {
        args.html: lambda: plan_report.plan_html(title, data, found),
        args.trace: lambda: plan_report.perfetto_trace(found),
    }
    for path, content in made.items():
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(path, content())


def _search(args: Args, on: Any) -> CommandResult:
    from halfbyte import plan
    from halfbyte.cli.flag_parsing import train_arguments
    from halfbyte.plan.layout_search import command, coverage, pareto_front, pipeline_parallelism_note, rank_of_current

    config, _ = plan_config(args, args.recipe, on)
    found = plan.search_layouts(config, on, minutes=args.minutes, say=print_line)
    if not found:
        raise ValueError(f"search: no layout of {args.model} fits {on.count} {on.device.name}; take a larger --count")
    listed, place, known = [_layout(c) for c in found], rank_of_current(config, found), coverage(found)
    rows = [(f"{row['step_time_s']:.3f}", f"{row['gib']:.0f}", row["remat"], row["reduce_dtype"], row["accumulate"],
             row["mesh"].replace(",", ", "), row["known_from"]) for row in listed[:SHOWN]]  # fmt: skip
    heads = (
        "step s",
        "GiB",
        "remat",
        "sums in",
        "parts",
        "mesh",
        "known from",
    )  # of 80 columns: the last two are folded
    console().print(rich_table(heads, rows, title=f"layouts, batch {config.batch}"))
    rank = f"number {place} of {known['ranked']} compiled" if place and place <= known["ranked"] else "not compiled"
    print_paragraph(f"the preset's layout is {rank if place else 'not among those that fit'}")
    print_paragraph(
        f"{known['near']} layouts are near the best by the bound; {known['compiled']} are compiled, {known['refused']} "
        f"refused, {known['near_not_compiled'] - known['refused']} left to a next call; of all others the bound leaves "
        f"{known['not_ruled_out']} that might be faster"
    )
    layers = ("--model.layers", str(args.layers)) if args.layers else ()
    best = command(found[0].config, (*train_arguments(args.model), *layers))
    print_line(f"best: {best}")
    print_paragraph(pipeline_parallelism_note(config, on))
    return CommandResult({
        "layouts": listed, "count": len(found), "preset_rank": place, **known, "best": best,
        "front": [_layout(c) for c in pareto_front(found)], "pipelines": pipeline_parallelism_note(config, on),
    })  # fmt: skip


def _layout(found: Any) -> dict[str, Any]:
    """A layout as `--json` has it."""
    config = found.config
    return {
        "mesh": config.mesh, "remat": config.remat, "reduce_dtype": str(config.precision.reduce_dtype),
        "accumulate": config.accumulate, "step_time_s": found.seconds, "gib": found.bytes_needed / 2**30,
        "bound_s": found.bound.shared.seconds, "near": found.is_near_best, "known_from": found.estimate_note,
    }  # fmt: skip
