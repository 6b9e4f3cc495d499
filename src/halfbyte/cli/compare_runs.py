"""The runs that `halfbyte compare` is given: run directories, and metrics of MaxText runs, which name neither recipe
nor seed.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from halfbyte.study.arms import ComparedRun, PairedArm

NO_CONTROLS = (
    "without controls: no twin of the baseline and no recipe that is broken on purpose ran, so nothing shows that "
    "these runs would reveal a broken recipe; the margin was not written down before the first step"
)


def load_runs(arguments: Sequence[str]) -> "list[ComparedRun]":
    """Returns the runs of each argument; those of MaxText are arms by argument, and seeds by their order in it."""
    from halfbyte.evaluation.loss_curves import is_maxtext_run, read_curve
    from halfbyte.study.arms import ComparedRun, read_provenance

    arms = [list(map(Path, text.split(",") if not Path(text).exists() else [text])) for text in arguments]
    folders = [folder for arm in arms for folder in arm]
    labels = iter(short_names(folders))  # a run that is given twice has two
    others = [folder for folder in folders if not is_maxtext_run(folder)]
    if others and any(len(arm) > 1 for arm in arms):
        raise ValueError("runs joined by commas are seeds of MaxText runs; the config of a Halfbyte run holds its seed")
    runs = []
    for arm in arms:
        recipe = ""
        for seed, folder in enumerate(arm):
            label = next(labels)
            recipe = recipe or label
            config = read_config(folder) if folder in others else {"recipe": recipe, "seed": seed}
            provenance = read_provenance(folder, config) if folder in others else {}
            runs.append(ComparedRun(label, folder, config, read_curve(folder, label), provenance))
    return runs


def short_names(folders: Sequence[Path]) -> list[str]:
    """The last part of each path, or as many parts as tell the runs apart."""
    for parts in range(1, max(len(folder.parts) for folder in folders) + 1):
        names = ["/".join(folder.parts[-parts:]) for folder in folders]
        if len(set(names)) == len(names):
            return names
    return [f"{folder} ({number})" for number, folder in enumerate(folders, 1)]


def read_config(folder: Path) -> Mapping[str, Any]:
    """The fields of a run's config, as it wrote them; none of a folder that holds metrics alone."""
    from halfbyte.train.run_directory import open_run_directory

    return open_run_directory(folder).values if (folder / "config.json").exists() else {}


def judge_seeds(arms: "Sequence[PairedArm]", margin: str) -> list[dict[str, Any]]:
    """Returns the verdict of each arm over its seeds, as `halfbyte parity` at one look, without controls."""
    from halfbyte.study.equivalence_test import judge_arm, parse_margin

    found, allowed = [], parse_margin(margin)
    for arm in arms:
        over = [pair for pair in arm.pairs if pair.baseline and math.isfinite(pair.baseline.curve.loss[-1])]
        ended = [pair for pair in over if math.isfinite(pair.run.curve.loss[-1])]
        diverged = len(over) - len(ended)
        gaps = {
            pair.run.seed: 100 * pair.gap.relative if allowed.relative else pair.gap.value
            for pair in ended
            if pair.gap is not None
        }
        verdict = judge_arm(arm.name, gaps, allowed, diverged=diverged, share=len(arms))
        found.append({"arm": arm.name, "word": verdict.word.value, "reason": verdict.reason, "margin": margin})
    return found


def print_verdicts(screen: Any, verdicts: Sequence[Mapping[str, Any]]) -> None:
    for verdict in verdicts:
        screen.print(f"{verdict['word']} {verdict['arm']}: {verdict['reason']}", markup=False)
    if verdicts:
        screen.print(NO_CONTROLS, markup=False)
