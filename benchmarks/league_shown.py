"""What the league's runs say, from docs/evidence/league/runs.json.

    python benchmarks/league_shown.py table 3M@16                        # the gaps of a cell, as Markdown
    python benchmarks/league_shown.py picture 3M@16                      # docs/evidence/league.svg
    python benchmarks/league_shown.py table 3M@16 --ablation             # nvfp4's ingredients, each beside the whole
    python benchmarks/league_shown.py picture 3M@16 --ablation           # docs/evidence/ablation.svg

docs/evidence/league/README.md and docs/evidence/ablation/README.md are the plans.
"""

import json
import math
from collections.abc import Sequence
from typing import Any

import tyro
from league_grid import ARMS, FOLDER

from halfbyte.devices import device
from halfbyte.parity.arms import TWIN
from halfbyte.parity.statistics import FEWEST_SEEDS, LEVEL, over_seeds, t_quantile
from halfbyte.recipe import GEMMS, recipe

CODE = [f"validation_loss/{source}" for source in ("pypi-python", "rust-src", "go-std", "cpython-stdlib")]
PROSE = [f"validation_loss/{source}" for source in ("eltec-eng", "standardebooks", "openstax-ccby", "sotu")]
WHOLE, MARGIN = "nvfp4", 0.005
Cell = tyro.conf.Positional[str]
ABLATION = {  # arm -> what it is; `halfbyte parity --arms ablation` has the same, with the MLP in 4 bits
    "nvfp4": "the full recipe, all linears",
    "nvfp4-twin": "the same but for rounding: noise",
    "nvfp4_no_rht": "without the Hadamard transform",
    "nvfp4_no_sr": "without stochastic rounding",
    "nvfp4_1d_weights": "without 2D weight blocks",
    "nvfp4_bare": "without all three",
    "nvfp4_sr_everywhere": "misused: x and W stochastic too",
    "nvfp4_rht_everywhere": "misused: transform in all GEMMs",
    "mxfp4": "blocks of 32 with E8M0 scales",
    "nvfp4_mlp": "attention projections in bf16",
    "nvfp4_last_bf16": "the last quarter of the blocks in bf16",
    "nvfp4_forward_only": "backward GEMMs in bf16",
    "nvfp4_backward_only": "forward GEMMs in bf16",
    "nvfp4_late": "forward GEMMs in bf16 in the last sixth",
}
NOT_IN_LEAGUE = ("bf16", "nvfp4_no_sr", "nvfp4_sr_everywhere", "nvfp4_bare")  # the baseline; questions of the ablation


def gap(cell: dict[str, Any], name: str, keys: Sequence[str] = ("validation_loss",)) -> float:
    """A run's loss over that of bf16 in its seed, minus 1; over several keys their mean."""
    base = cell[f"bf16-{name.rpartition('-')[2]}"]
    return sum(cell[name][key] / base[key] - 1 for key in keys) / len(keys)


def arms_of(cell: dict[str, Any]) -> dict[str, list[str]]:
    """The names of each arm's runs."""
    found: dict[str, list[str]] = {}
    for name in sorted(name for name in cell if "again" not in name):
        found.setdefault(name.rpartition("-")[0], []).append(name)
    return found


def gaps_of(cell_name: str, ablation: bool) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """(a cell's runs, the names of each arm's by the mean of their gaps)."""
    cell = json.loads((FOLDER / "runs.json").read_text(encoding="utf-8"))[cell_name]
    arms = arms_of(cell)
    shown = {arm: arms[arm] for arm in arms if (arm in ABLATION if ablation else arm not in NOT_IN_LEAGUE)}
    means = {arm: sum(gap(cell, name) for name in runs) / len(runs) for arm, runs in shown.items()}
    return cell, {arm: shown[arm] for arm in sorted(shown, key=means.__getitem__)}


def differences(cell: dict[str, Any], runs: Sequence[str]) -> list[float]:
    """Each run's gap minus that of the whole recipe in its seed."""
    return [gap(cell, name) - gap(cell, f"{WHOLE}-{name.rpartition('-')[2]}") for name in runs]


def single_run(cell: dict[str, Any]) -> float:
    """Half of the 90% interval of one run's difference: Student's, by the spread over seeds that 4-bit arms with
    several have in common."""
    several = [runs for arm, runs in arms_of(cell).items() if len(runs) >= FEWEST_SEEDS and not arm.startswith("bf16")]
    spreads = [over_seeds(differences(cell, runs)).sd or 0.0 for runs in several if f"{WHOLE}-0" not in runs]
    freedom = len(spreads) * (FEWEST_SEEDS - 1)
    return t_quantile(0.5 + LEVEL / 2, freedom) * math.sqrt(sum(sd**2 for sd in spreads) / len(spreads))


def spread(cell: dict[str, Any], runs: Sequence[str]) -> tuple[float, float, float]:
    """(mean, low, high) of an arm's differences: 90%, over its seeds or of a single run."""
    found = over_seeds(differences(cell, runs))
    if found.low is None or found.high is None:
        return found.mean, found.mean - single_run(cell), found.mean + single_run(cell)
    return found.mean, found.low, found.high


def judged(low: float, high: float) -> str:
    if low > -MARGIN and high < MARGIN:
        return "within 0.5%"
    if low > 0 or high < 0:
        return ("worse" if low > 0 else "better") + (" by more than 0.5%" if max(low, -high) > MARGIN else "")
    return "cannot tell"


def gemm_time(arm: str) -> float:
    """Of all GEMMs of a linear over the whole run, at the peaks of a GB300, beside bf16's."""
    peak, changes = device("gb300").peak, ARMS[arm].changes
    made, share = recipe(changes["recipe"]), 1 - changes.get("precision.switch_at", 1.0)

    def time_of(gemm: str) -> float:
        units = [getattr(made, role).format.unit or "bf16" for role in GEMMS[gemm]]
        slowest = min(peak[unit if unit in peak else "bf16"] for unit in units)
        one = peak["bf16"] / slowest * (2 if made.remainder and gemm == "fprop" else 1)
        return share + (1 - share) * one if gemm == "fprop" else one

    return sum(map(time_of, GEMMS)) / len(GEMMS)


def picture(cell_name: Cell, ablation: bool = False) -> None:
    """Every arm's gap of each seed; beside it the gap against what its GEMMs would take on a GB300, or, of the
    ablation, the difference to the whole recipe."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    pyplot.rcParams.update({"svg.hashsalt": "league", "font.size": 8})
    cell, arms = gaps_of(cell_name, ablation)
    height = 3.4 if ablation else 5.6
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, height), width_ratios=(1, 1.1), layout="constrained")
    for place, (arm, runs) in enumerate(arms.items()):
        found = [100 * gap(cell, name) for name in runs]
        left.plot(found, [place] * len(found), "o-", color=colour(arm), markersize=4, linewidth=0.8)
    left.set_yticks(range(len(arms)), list(arms))
    left.invert_yaxis()
    left.set_xlabel("loss over bf16's, %; a dot is a seed" + ("" if ablation else " (orange: ours)"))
    left.axvline(0.5, color="grey", linestyle="--", linewidth=0.8)
    (draw_differences if ablation else draw_costs)(right, cell, arms)
    for axes in (left, right):
        axes.grid(alpha=0.2)
    file = FOLDER.parent / ("ablation.svg" if ablation else "league.svg")
    figure.savefig(file, metadata={"Date": None})


def colour(arm: str) -> str:
    return "C1" if any(word in arm for word in ("remainder", "same", "alone", "x_4over6")) else "C0"


def draw_costs(axes: Any, cell: dict[str, Any], arms: dict[str, list[str]]) -> None:
    labels: dict[float, float] = {}
    for arm, runs in arms.items():
        if ARMS[arm].kind != TWIN and ARMS[arm].changes["policy"] == "all_linear":
            at = gemm_time(arm), 100 * sum(gap(cell, name) for name in runs) / len(runs)
            axes.plot(*at, "o", color=colour(arm), markersize=4)
            labels[at[0]] = max(labels.get(at[0], -1) + 0.1, at[1])  # arms come by their gaps
            axes.annotate(arm, (at[0], labels[at[0]]), xytext=(4, -2), textcoords="offset points", fontsize=6)
    axes.set_xlabel("GEMM time at a GB300's peaks, bf16 = 1")
    axes.set_xscale("log", base=2)
    axes.set_xlim(0.15, 1.4)
    axes.set_xticks([1 / 6, 1 / 4, 1 / 2, 1], ["1/6", "1/4", "1/2", "1"])
    axes.axhline(0.5, color="grey", linestyle="--", linewidth=0.8)


def draw_differences(axes: Any, cell: dict[str, Any], arms: dict[str, list[str]]) -> None:
    for place, arm in enumerate(arms):
        mean, low, high = (100 * value for value in spread(cell, arms[arm]))
        if arm != WHOLE:
            line = "-" if len(arms[arm]) >= FEWEST_SEEDS else ":"
            axes.plot([low, high], [place, place], line, color="C0", linewidth=1.2)
            axes.plot(mean, place, "o", color="C0", markersize=4)
        axes.annotate(ABLATION[arm], (1, place), xycoords=("axes fraction", "data"), xytext=(4, -2),
                      textcoords="offset points", fontsize=6, annotation_clip=False)  # fmt: skip
    axes.set_yticks(range(len(arms)), [""] * len(arms))
    axes.invert_yaxis()
    axes.set_xlabel(f"gap minus {WHOLE}'s, points: 90% over seeds; dotted: one run")
    axes.axvspan(-100 * MARGIN, 100 * MARGIN, color="grey", alpha=0.12)
    axes.axvline(0, color="grey", linewidth=0.8)


def table(cell_name: Cell, ablation: bool = False) -> None:
    """A cell's runs by the mean of their gaps, as Markdown: every seed, then code and prose apart, or, of the
    ablation, the difference to the whole recipe."""
    cell, arms = gaps_of(cell_name, ablation)
    heads = f"minus `{WHOLE}`'s | | is" if ablation else "gap of each seed | code | prose"
    heads = f"arm | {'what it is | gap of each seed | ' if ablation else ''}{heads}"
    print(f"| {heads} |\n" + "|---" * (heads.count("|") + 1) + "|")
    for arm in arms:
        seeds = ", ".join(f"{gap(cell, name):+.2%}" for name in arms[arm])
        if ablation:
            cells = [ABLATION[arm], seeds, *beside(cell, arm, arms[arm])]
        else:
            kinds = (sum(gap(cell, name, keys) for name in arms[arm]) / len(arms[arm]) for keys in (CODE, PROSE))
            cells = [seeds, *(f"{kind:+.1%}" for kind in kinds)]
        print(f"| `{arm}` | " + " | ".join(cells) + " |")


def beside(cell: dict[str, Any], arm: str, runs: Sequence[str]) -> list[str]:
    """The difference to the whole recipe: seed by seed, with its interval, in words."""
    if arm == WHOLE:
        return ["", "", ""]
    mean, low, high = spread(cell, runs)
    single = "" if len(runs) >= FEWEST_SEEDS else ", one run"
    seeds = ", ".join(f"{100 * value:+.2f}" for value in differences(cell, runs))
    return [seeds, f"{100 * mean:+.2f} [{100 * low:+.2f}, {100 * high:+.2f}]{single}", judged(low, high)]


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"table": table, "picture": picture}, description=__doc__)
