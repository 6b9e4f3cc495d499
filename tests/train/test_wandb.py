"""Weights & Biases without its package: a module that has no more than `init`, as version 0.31 promises."""

import importlib.machinery
import sys
from types import ModuleType, SimpleNamespace

from halfbyte.train import WandbSink


def test_wandb_run_keeps_its_id(tmp_path, monkeypatch):
    asked, logged = [], []

    def init(**options):
        asked.append(options)
        return SimpleNamespace(log=lambda row, step: logged.append((step, row)), finish=lambda: None)

    module = ModuleType("wandb")
    module.__spec__, module.init = importlib.machinery.ModuleSpec("wandb", None), init
    monkeypatch.setitem(sys.modules, "wandb", module)
    for step in (1, 2):
        sink = WandbSink("project", name="run", directory=tmp_path, config={"steps": 2})
        sink.write({"step": step, "loss": 1.5})
        sink.close()
    assert asked[0]["id"] == asked[1]["id"] == (tmp_path / "wandb_id").read_text()
    assert logged == [(1, {"loss": 1.5}), (2, {"loss": 1.5})]
