"""Size of the study that a budget has time for: three seeds first, without which there is no verdict, then steps up to
those of the run, then more seeds. Where three short runs do not fit, one seed has a gap and no verdict."""

from collections.abc import Mapping, Sequence
from typing import Any

from .statistics import FEWEST_SEEDS

MIN_STEPS, MAX_SEEDS = 30, 12
# Of an arm's compile time: the radar in its first run, and loading the program from the cache in later runs. Measured
# with nvfp4 of the demo on two CPU cores: 60 s and 4.9 s for 33 s.
RADAR, CACHED = 2.0, 0.2


def study_seconds(seeds: int, steps: int, costs: Mapping[str, float]) -> float:
    """Returns the seconds of a study, which has `first_s` once, `again_s` per seed and `step_s` per seed and step."""
    return costs["first_s"] + seeds * (costs["again_s"] + steps * costs["step_s"]) if seeds else 0.0


def size_of(left: float, costs: Mapping[str, float], *, steps: int, seeds: int, fixed: bool) -> tuple[int, int]:
    """Returns (seeds, steps) of the study for `left` seconds, (0, 0) if none fits: of `seeds` if not 0, and of at most
    `steps`; `fixed` takes as many whatever they take."""
    counts = [seeds] if seeds else range(FEWEST_SEEDS, MAX_SEEDS + 1)
    whole = [count for count in counts if study_seconds(count, steps, costs) <= left]
    if whole or fixed:
        return max(whole, default=counts[0]), steps
    for count in [seeds] if seeds else [FEWEST_SEEDS, 1]:
        longest = int(((left - costs["first_s"]) / count - costs["again_s"]) / costs["step_s"]) // 5 * 5
        if longest >= min(steps, MIN_STEPS):
            return count, min(steps, longest)
    return 0, 0


def costs_of(bench: Mapping[str, Any], trace: Mapping[str, Any], arms: Sequence[str]) -> dict[str, float]:
    """Returns the costs of a pass over `arms`, in seconds, from bench and the short run. An arm that was not measured
    costs as much as the baseline."""
    rows = {row["arm"]: row for row in bench["rows"]}
    base, own = rows[bench["baseline"]], rows[trace["arm"]]
    milliseconds, compile_s = (sum(rows.get(arm, base)[name] for arm in arms) for name in ("milliseconds", "compile_s"))
    slower = max(1.0, trace["step_time_s"] / (1e-3 * own["milliseconds"]))  # in training than alone
    overhead = max(0.0, trace["seconds"] - trace["stepping_s"] - own["compile_s"])
    probed = sum(row["compile_s"] for row in rows.values()) - base["compile_s"]
    return {"step_s": slower * 1e-3 * milliseconds, "first_s": (1 - CACHED) * compile_s + RADAR * probed,
            "again_s": len(arms) * overhead + CACHED * compile_s}  # fmt: skip
