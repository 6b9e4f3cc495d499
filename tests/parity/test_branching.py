"""Branches of a run, with nothing trained."""

import shutil

import pytest
from fakes import BASE

from halfbyte.parity import branching
from halfbyte.parity.runner import Stop


def test_half_of_a_copied_checkpoint_is_no_branch(tmp_path, monkeypatch):
    """Killed while it copies: the next command would find a folder without checkpoint and train from step 0."""
    whole = tmp_path / "run" / "checkpoints" / "6"
    whole.mkdir(parents=True)
    for name in ("a", "b"):
        (whole / name).write_text(name)
    seen, copytree = [], shutil.copytree

    def killed(source, to, **options):
        copytree(source, to, ignore=lambda *_: ["b"])
        raise KeyboardInterrupt

    def train(config, folder, **_):
        seen.append(sorted(path.name for path in (folder / "checkpoints" / "6").iterdir()))

    monkeypatch.setattr(branching, "train", train)
    plan = branching.Branches(tmp_path / "run", BASE, (6,), 2, "bf16")
    with Stop(print) as stop:
        monkeypatch.setattr(shutil, "copytree", killed)
        with pytest.raises(KeyboardInterrupt):
            branching.grow(plan, tmp_path / "out", 6, "bf16", say=print, stop=stop)
        monkeypatch.setattr(shutil, "copytree", copytree)
        branching.grow(plan, tmp_path / "out", 6, "bf16", say=print, stop=stop)
    assert seen == [["a", "b"]]
    assert [path.name for path in (tmp_path / "out" / "step-6-to-8").iterdir()] == ["bf16"]


def test_branches_of_another_length_are_others(tmp_path, monkeypatch):
    """Asked for fewer steps, a branch that had gone further would be shown with its own end."""
    (tmp_path / "run" / "checkpoints" / "6").mkdir(parents=True)
    ended = {}
    monkeypatch.setattr(branching, "train", lambda config, folder, *, until, **_: ended.setdefault(folder, until))
    with Stop(print) as stop:
        for steps in (4, 2):
            plan = branching.Branches(tmp_path / "run", BASE, (6,), steps, "bf16")
            assert ended[branching.grow(plan, tmp_path / "out", 6, "bf16", say=print, stop=stop)] == 6 + steps


def test_a_branch_that_would_end_before_it_begins_is_refused(tmp_path):
    with pytest.raises(ValueError, match="branch_steps must be 0"):
        branching.plan_branches(tmp_path, baseline="bf16", steps=-3)
