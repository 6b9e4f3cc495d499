"""Prints how much twins differ, from the records of `quiet.py`.

    python benchmarks/quiet_noise.py OUT [OUT ...] [--json FILE]

For each set-up, recipe and length: the loss, the standard deviation of a difference of two twins in percent of the loss
with its 90% interval, the same for the averaged weights, and what a study of three seeds detects in 80% of cases.

With x[s, t] the loss of twin t of seed s, the variance of a run is the mean square of x[s, t] - mean over t of x[s, t],
over the sum of (twins - 1), its degrees of freedom. A difference of two runs has twice that variance: for two twins per
seed this is the mean square of the paired differences. The interval is that of chi squared, which holds for normal
noise; heavier tails widen it. `rows` is the part that the choice of validation rows explains: the standard error of a
difference of two twins over rows, in percent.
"""

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

ALPHA, POWER = 0.05, 0.8
Runs = Mapping[int, Sequence[float]]  # seed -> loss per twin


def deviation(runs: Runs) -> tuple[float, int]:
    """(standard deviation of a difference of two twins in percent of the mean loss, degrees of freedom)."""
    squares = sum(float(np.sum((np.asarray(x) - np.mean(x)) ** 2)) for x in runs.values())
    freedom = sum(len(x) - 1 for x in runs.values())
    mean = float(np.mean([value for x in runs.values() for value in x]))
    return (100 * math.sqrt(2 * squares / freedom) / mean if freedom else math.nan), freedom


def interval(value: float, freedom: int, level: float = 0.9) -> tuple[float, float]:
    """Bounds of a standard deviation."""
    low, high = ((1 - level) / 2, (1 + level) / 2)
    return tuple(value * math.sqrt(freedom / stats.chi2.ppf(p, freedom)) for p in (high, low))  # type: ignore[return-value]


def detected(value: float, seeds: int) -> float:
    """Smallest mean difference over `seeds` seeds that a two-sided t test at 5% sees with probability POWER, if paired
    differences have the standard deviation `value`."""
    bound = stats.t.ppf(1 - ALPHA / 2, seeds - 1)
    return _noncentrality(bound, seeds - 1) * value / math.sqrt(seeds)


def _noncentrality(bound: float, freedom: int) -> float:
    """Of the t distribution that exceeds `bound` with probability POWER, by bisection."""
    low, high = 0.0, 100.0
    for _ in range(60):
        middle = (low + high) / 2
        seen = stats.nct.sf(bound, freedom, middle)
        low, high = (middle, high) if seen < POWER else (low, middle)
    return (low + high) / 2


def rows_error(sums: np.ndarray, scored: np.ndarray, pairs: Sequence[tuple[int, int]]) -> float:
    """Standard error over rows of the difference of two twins in percent of the loss, root mean square over pairs."""
    errors = []
    for a, b in pairs:
        ratio = (sums[a] - sums[b]).sum() / scored.sum()
        residual = (sums[a] - sums[b]) - ratio * scored
        errors.append(100 * math.sqrt(float((residual**2).sum())) / float(sums[a].sum()))
    return float(np.sqrt(np.mean(np.square(errors)))) if errors else math.nan


def read(folders: Sequence[Path]) -> tuple[list[dict[str, Any]], dict[str, np.ndarray]]:
    """Records of all folders and the losses of rows by job and reading."""
    records: list[dict[str, Any]] = []
    rows: dict[str, np.ndarray] = {}
    for folder in folders:
        for line in (folder / "records.jsonl").read_text().splitlines():
            records.append(json.loads(line) | {"folder": folder.name})
        if (folder / "rows.npz").is_file():
            with np.load(folder / "rows.npz") as stored:
                rows |= {name: stored[name] for name in stored.files}
    return records, rows


def summarize(records: Sequence[Mapping[str, Any]], rows: Mapping[str, np.ndarray]) -> list[dict[str, Any]]:
    """A row per set-up, recipe and length that has ended."""
    made = [r for r in records if r["kind"] == "evaluation"]
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = defaultdict(list)
    for record in made:
        groups[record["setup"], record["recipe"], record["steps"], record["job"]].append(record)
    table = []
    for (setup, recipe, steps, job), own in groups.items():
        last = [r for r in own if r["step"] == steps]
        if not last:
            continue
        readings = {"last": by_seed(last, lambda r: r["validation"])}
        readings |= {name: by_seed(last, lambda r, n=name: r["averaged"][n]) for name in last[0]["averaged"]}
        value, freedom = deviation(readings["last"])
        row = {
            "setup": setup, "recipe": recipe, "job": job, "steps": steps, "tokens": last[0]["tokens"],
            "runs": len(last), "loss": float(np.mean([r["validation"] for r in last])), "freedom": freedom, "sd": value,
            "interval": interval(value, freedom) if freedom else None,
            "detected": {n: detected(value, n) for n in (3, 5, 8)} if freedom else None,
            "skipped": sum(r["skipped"] for r in last),
            "readings": {name: {"loss": float(np.mean([v for x in runs.values() for v in x])), "sd": deviation(runs)[0]}
                         for name, runs in readings.items()},
            "on the way": on_the_way(own), "losses": {str(s): x for s, x in readings["last"].items()},
        }  # fmt: skip
        if f"{job}/last" in rows and "scored" in rows and freedom:
            names = [(r["setup"], r["seed"], r["twin"]) for r in made if r["job"] == job and r["step"] == steps]
            at = {name: number for number, name in enumerate(names)}
            pairs = [(at[setup, r["seed"], 0], at[setup, r["seed"], r["twin"]]) for r in last if r["twin"]]
            sums, scored = rows[f"{job}/last"], rows["scored"]
            row["rows"] = rows_error(sums, scored, pairs) if sums.shape[1] == len(scored) else None
        table.append(row)
    return table


def by_seed(records: Sequence[Mapping[str, Any]], value: Any) -> dict[int, list[float]]:
    runs: dict[int, list[float]] = defaultdict(list)
    for record in sorted(records, key=lambda r: (r["seed"], r["twin"])):
        runs[record["seed"]].append(value(record))
    return dict(runs)


def on_the_way(records: Sequence[Mapping[str, Any]]) -> list[list[float]]:
    """[fraction of the run, mean loss, deviation of twins in percent] at each evaluation."""
    found = []
    for step in sorted({r["step"] for r in records}):
        runs = by_seed([r for r in records if r["step"] == step], lambda r: r["validation"])
        mean = float(np.mean([v for x in runs.values() for v in x]))
        found.append([round(step / records[0]["steps"], 3), round(mean, 4), round(deviation(runs)[0], 4)])
    return found


def show(table: Sequence[Mapping[str, Any]], records: Sequence[Mapping[str, Any]]) -> None:
    for record in records:
        if record["kind"] in ("pace", "left out", "failed", "compiled"):
            print(json.dumps({k: v for k, v in record.items() if k != "folder"}))
    for row in table:
        low, high = row["interval"] or (math.nan, math.nan)
        others = [f"{name} {r['loss']:.4f} ({r['sd']:.3f}%)" for name, r in row["readings"].items() if name != "last"]
        print(f"\n{row['setup']} {row['recipe']}, {row['tokens'] / 1e6:.1f}M tokens, {row['runs']} runs, "
              f"{row['skipped']} steps skipped: loss {row['loss']:.4f}")  # fmt: skip
        print(f"  twins differ by {row['sd']:.3f}% [{low:.3f}, {high:.3f}] ({row['freedom']} degrees of freedom); "
              f"of that by the choice of rows {row.get('rows') or math.nan:.3f}%")  # fmt: skip
        if row["detected"]:
            listed = ", ".join(f"{n} seeds {x:.2f}%" for n, x in row["detected"].items())
            print(f"  detected in 80% of studies: {listed}")
        print("  " + ", ".join(others))
        print("  on the way: " + ", ".join(f"{part:g}: {loss:.3f} ({sd:.2f}%)" for part, loss, sd in row["on the way"]))
        for seed, losses in row["losses"].items():
            print(f"  seed {seed}: " + ", ".join(f"{value:.4f}" for value in losses))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="+")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    records, rows = read(given.out)
    table = summarize(records, rows)
    show(table, records)
    if given.json:
        given.json.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
