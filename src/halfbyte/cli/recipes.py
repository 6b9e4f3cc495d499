"""Every recipe, and how it differs from its neighbour.

Without names: all recipes. With one: its six operand policies. With two: where they differ, operand by operand.
MaxText's names (te_nvfp4, ...) are accepted."""

import textwrap
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from halfbyte.cli.console import PIPED_WIDTH, CommandResult, console, print_table, rich_table

if TYPE_CHECKING:
    from halfbyte.recipes import Recipe


@dataclass(frozen=True)
class Args:
    names: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[NAME [NAME]]")] = ()
    """None, one or two recipe names."""


def run(args: Args) -> CommandResult:
    from halfbyte.recipes import recipe

    if len(args.names) > 2:
        raise ValueError(f"give none, one or two recipes, got {len(args.names)}; two are compared, one shown in full")
    chosen = [recipe(name) for name in args.names]
    if not chosen:
        return show_all()
    return show_one(chosen[0]) if len(chosen) == 1 else show_difference(*chosen)


def show_all() -> CommandResult:
    from halfbyte.recipes import base_recipe, maxtext_aliases, recipe, recipe_diff, recipe_names

    known_as: dict[str, list[str]] = {}
    for alias, name in maxtext_aliases().items():
        known_as.setdefault(name, []).append(alias)
    entries = []
    for name in recipe_names():
        base = base_recipe(name)
        changes = recipe_diff(base, recipe(name)) if base else []
        entries.append({**recipe_fields(recipe(name)), "aliases": known_as.get(name, []),
                        "differs_from": base and base.name, "changes": list(map(field_change, changes))})  # fmt: skip
    rows = [
        (e["name"], e["description"], e["differs_from"] or "", summarise_changes(e["changes"]), " ".join(e["aliases"]))
        for e in entries
    ]
    if console().width >= PIPED_WIDTH:
        console().print(rich_table(["recipe", "what it is", "neighbour", "differs in", "also known as"], rows))
    else:
        show_names([row[:2] for row in rows])
    console().say("halfbyte recipes nvfp4 mxfp4 shows how two differ, halfbyte recipes nvfp4 one in full")
    return CommandResult({"recipes": entries})


def show_names(rows: list[tuple[str, str]]) -> None:
    """Prints names and descriptions, wrapped at words: what a narrow terminal has space for."""
    width = max(len(name) for name, _ in rows) + 2
    for name, text in rows:
        indent = " " * width
        wrap = textwrap.TextWrapper(console().width, initial_indent=f"{name:<{width}}", subsequent_indent=indent)
        print(wrap.fill(text))


def show_one(chosen: "Recipe") -> CommandResult:
    rows = [(role, *policy.values()) for role, policy in recipe_fields(chosen)["operands"].items()]
    console().say(f"{chosen.name}: {chosen.description}")
    print_table(["operand", *(field.name for field in fields(chosen.fprop_x))], rows)
    if chosen.shared_scales:
        console().print("weights of q, k and v share one tensor scale, and those of gate and up another")
    if chosen.remainder:
        console().print("fprop multiplies what rounding x has left over as well, in the same format")
    if chosen.amax_history_len:
        console().print(f"x, W and dy are scaled by the largest magnitude of {chosen.amax_history_len:,} steps before")
    return CommandResult(recipe_fields(chosen))


def show_difference(a: "Recipe", b: "Recipe") -> CommandResult:
    from halfbyte.recipes import recipe_diff

    changes = [field_change(item) for item in recipe_diff(a, b)]
    rows = [(item["operand"], item["field"], item["from"], item["to"]) for item in changes]
    if rows:
        print_table(["operand", "field", a.name, b.name], rows)
    else:
        console().say(f"{a.name} and {b.name} compute the same numbers")
    return CommandResult({"from": a.name, "to": b.name, "changes": changes})


def recipe_fields(chosen: "Recipe") -> dict[str, Any]:
    operands = {
        role: {field.name: format_field(getattr(policy, field.name)) for field in fields(policy)}
        for role, policy in chosen.operands().items()
    }
    whole = {"shared_scales": chosen.shared_scales, "remainder": chosen.remainder, "history": chosen.amax_history_len}
    return {"name": chosen.name, "description": chosen.description, "operands": operands, **whole}


def field_change(item: tuple[str, str, object, object]) -> dict[str, Any]:
    """One field in which two recipes differ, under the name that recipe files and `--json` have."""
    operand, field, before, after = item
    key = "history" if field == "amax_history_len" else field
    return {"operand": operand, "field": key, "from": format_field(before), "to": format_field(after)}


def format_field(value: Any) -> Any:
    """A format by its name; anything else as it is."""
    return getattr(value, "name", value)


def summarise_changes(changes: list[dict[str, Any]]) -> str:
    """`block of fprop_w dgrad_w: 2d -> 1d` for every kind of change."""
    groups: dict[tuple[str, Any, Any], list[str]] = {}
    for item in changes:
        groups.setdefault((item["field"], item["from"], item["to"]), []).append(item["operand"])
    return "; ".join(
        f"{field} of {'all' if len(names) == 6 else ' '.join(names)}: {before} -> {after}"
        for (field, before, after), names in groups.items()
    )
