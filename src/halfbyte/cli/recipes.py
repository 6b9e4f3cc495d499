"""Every recipe, and how it differs from its neighbour.

Without names: all recipes. With one: its six operand policies. With two: where they differ, operand by operand.
MaxText's names (te_nvfp4, ...) are accepted."""

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from halfbyte.cli.result import Result
from halfbyte.cli.screen import console, table

if TYPE_CHECKING:
    from halfbyte.recipe import Recipe


@dataclass(frozen=True)
class Args:
    names: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[NAME [NAME]]")] = ()
    """None, one or two recipe names."""


def run(args: Args) -> Result:
    from halfbyte.recipe import recipe

    if len(args.names) > 2:
        raise ValueError(f"give none, one or two recipes, got {len(args.names)}; two are compared, one shown in full")
    chosen = [recipe(name) for name in args.names]
    if not chosen:
        return show_all()
    return show_one(chosen[0]) if len(chosen) == 1 else show_difference(*chosen)


def show_all() -> Result:
    from halfbyte.recipe import aliases, difference, neighbour, recipe, recipe_names

    known_as: dict[str, list[str]] = {}
    for alias, name in aliases().items():
        known_as.setdefault(name, []).append(alias)
    entries = []
    for name in recipe_names():
        base = neighbour(name)
        changes = difference(base, recipe(name)) if base else []
        entries.append({**describe(recipe(name)), "aliases": known_as.get(name, []), "differs_from": base and base.name,
                        "changes": [change(item) for item in changes]})  # fmt: skip
    rows = [
        (e["name"], e["description"], e["differs_from"] or "", short(e["changes"]), " ".join(e["aliases"]))
        for e in entries
    ]
    console().print(table(["recipe", "what it is", "neighbour", "differs in", "also known as"], rows))
    console().print("halfbyte recipes nvfp4 mxfp4   shows how two differ; halfbyte recipes nvfp4   shows one in full")
    return Result({"recipes": entries})


def show_one(chosen: "Recipe") -> Result:
    rows = [(role, *policy.values()) for role, policy in describe(chosen)["operands"].items()]
    console().print(
        table(
            ["operand", *(field.name for field in fields(chosen.fprop_x))],
            rows,
            title=f"{chosen.name}: {chosen.description}",
        )
    )
    if chosen.shared_scales:
        console().print("weights of q, k and v share one tensor scale, and those of gate and up another")
    if chosen.remainder:
        console().print("fprop multiplies what rounding x has left over as well, in the same format")
    if chosen.history:
        console().print(f"x, W and dy are scaled by the largest magnitude of {chosen.history:,} steps before")
    return Result(describe(chosen))


def show_difference(a: "Recipe", b: "Recipe") -> Result:
    from halfbyte.recipe import difference

    changes = [change(item) for item in difference(a, b)]
    rows = [(item["operand"], item["field"], item["from"], item["to"]) for item in changes]
    if rows:
        console().print(table(["operand", "field", a.name, b.name], rows))
    else:
        console().print(f"{a.name} and {b.name} compute the same numbers")
    return Result({"from": a.name, "to": b.name, "changes": changes})


def describe(chosen: "Recipe") -> dict[str, Any]:
    operands = {
        role: {field.name: plain(getattr(policy, field.name)) for field in fields(policy)}
        for role, policy in chosen.operands().items()
    }
    whole = {name: getattr(chosen, name) for name in ("shared_scales", "remainder", "history")}
    return {"name": chosen.name, "description": chosen.description, "operands": operands, **whole}


def change(item: tuple[str, str, object, object]) -> dict[str, Any]:
    """One field in which two recipes differ, as plain data."""
    operand, field, before, after = item
    return {"operand": operand, "field": field, "from": plain(before), "to": plain(after)}


def plain(value: Any) -> Any:
    """A format by its name; anything else as it is."""
    return getattr(value, "name", value)


def short(changes: list[dict[str, Any]]) -> str:
    """`block of fprop_w dgrad_w: 2d -> 1d` for every kind of change."""
    groups: dict[tuple[str, Any, Any], list[str]] = {}
    for item in changes:
        groups.setdefault((item["field"], item["from"], item["to"]), []).append(item["operand"])
    return "; ".join(
        f"{field} of {'all' if len(names) == 6 else ' '.join(names)}: {before} -> {after}"
        for (field, before, after), names in groups.items()
    )
