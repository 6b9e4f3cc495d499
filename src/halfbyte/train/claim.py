"""Whether a directory may be that of a run: it is empty, or it holds a run, and nothing in it leads out of it. And what
is left of it when an error comes before the first step: nothing."""

import contextlib
import shutil
from pathlib import Path

from halfbyte.inputs import UnreadableFile, check_output, read_json, refuse_links

WRITTEN = (
    ".lock", "config.json", "run.json", "manifest.json", "data.json", "tokenizer.json", "metrics.jsonl",
    "evaluations.jsonl", "tensorboard", "checkpoints", "damaged", "profile", "wandb", "wandb_id",
    "report.html", "huggingface", "radar.jsonl", "telemetry.jsonl",
)  # fmt: skip
"""What a run writes. Where a symbolic link has one of these names, the run would write somewhere else."""
IMPORTED = "imported.json"  # of a directory that holds an imported model and no training


def check_run_directory(directory: Path) -> None:
    """ValueError if `directory` cannot be the directory of a run: nothing of somebody else's is overwritten."""
    check_output(directory, flag="--run-dir")
    if not directory.exists() and not directory.is_symlink():
        return
    if not directory.is_dir():
        raise ValueError(f"--run-dir {directory} is not a directory; give another")
    refuse_links(directory, WRITTEN, flag="--run-dir")
    refuse_foreign_directory(directory)


def refuse_foreign_directory(directory: Path) -> None:
    """ValueError if `directory` holds files but no run. A config.json alone does not make a run: models have one."""
    if not directory.exists():
        return
    names = sorted(path.name for path in directory.iterdir() if path.name != ".lock" and path.suffix != ".tmp")
    if IMPORTED in names:
        raise ValueError(
            f"{directory} holds an imported model, not a run that could go on; "
            f"start one with its weights: --init-from {directory} --run-dir ANOTHER"
        )
    if not names or _is_config(directory / "config.json"):
        return
    what = "its config.json is not that of a run" if "config.json" in names else f"found {', '.join(names[:4])}"
    raise ValueError(
        f"run directory {directory} is not empty and holds no run ({what}); give another --run-dir: "
        "what is there would be overwritten"
    )


def _is_config(path: Path) -> bool:
    """True if the file is a config as a run writes it. A damaged one is said to be damaged where it is read."""
    if not path.is_file():
        return False
    try:
        found = read_json(path)
    except UnreadableFile:
        return (path.parent / "checkpoints").is_dir()
    return isinstance(found, dict) and found.keys() >= {"name", "model", "recipe", "steps"}


class NothingLeft:
    """Around a run that makes `directory`: an error before its first step leaves no directory behind."""

    def __init__(self, directory: Path):
        self._made = [path for path in (directory, *directory.parents) if not path.exists()]

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or not self._made or not self._made[0].is_dir() or _has_steps(self._made[0]):
            return
        shutil.rmtree(self._made[0], ignore_errors=True)
        for parent in self._made[1:]:
            with contextlib.suppress(OSError):
                parent.rmdir()


def _has_steps(directory: Path) -> bool:
    rows = directory / "metrics.jsonl"
    checkpoints = directory / "checkpoints"
    return (rows.is_file() and rows.stat().st_size > 0) or (checkpoints.is_dir() and any(checkpoints.glob("[0-9]*")))
