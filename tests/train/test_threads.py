"""Threads at the end of a run, however it ends. Oracle: the threads that Python knew before it."""

import dataclasses
import io
import threading
import time

import pytest
from rich.console import Console

from halfbyte.data import batch_loader, prepare
from halfbyte.train import CheckpointConfig, ValidationConfig, train
from tiny import MODEL, tiny

pytestmark = pytest.mark.usefixtures("one_device")


@pytest.fixture(scope="module")
def config(tmp_path_factory, compile_cache):
    """Two steps on prepared data, validated and saved."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "text.jsonl").write_text("".join(f'{{"text": "{i} is a number. "}}\n' * 9 for i in range(60)))
    out = folder / "set"
    prepare(folder / "text.jsonl", tokenizer="bytes", out=out, seq_len=32, val_fraction=0.2, workers=1)
    return tiny(
        model=dataclasses.replace(MODEL, vocab_size=512, layers=1),
        data=str(out),
        recipe="bf16",
        steps=2,
        validation=ValidationConfig(at_end=True),
        checkpoint=CheckpointConfig(every=1, keep_last=1),
        compile_cache=str(compile_cache),
    )


class Fails:
    """An observer that raises before the second step."""

    every = 1

    def __init__(self, error):
        self.error = error

    def observe(self, moment):
        if moment.step == 2 and self.error is not None:
            raise self.error
        return []


@pytest.mark.parametrize("error", [None, KeyboardInterrupt()], ids=["ends", "fails"])
def test_run_leaves_no_thread(config, tmp_path, monkeypatch, error, until):
    """None of ours or of Grain at once, though its source is slow here and a read is always in progress; then none."""
    read = batch_loader.GrainRowSource.__getitem__

    def slowly(self, index):
        time.sleep(0.02)
        return read(self, index)

    monkeypatch.setattr(batch_loader.GrainRowSource, "__getitem__", slowly)
    before = set(threading.enumerate())
    console = Console(file=io.StringIO())
    if error is None:
        assert train(config, tmp_path / "run", console=console).step == 2
    else:
        with pytest.raises(type(error)):
            train(config, tmp_path / "run", console=console, observers=[Fails(error)])
    left = {thread for thread in threading.enumerate() if thread not in before}
    ours = [thread.name for thread in left if thread.name.startswith(("halfbyte", "grain"))]
    assert not ours
    until(lambda: not any(thread.is_alive() for thread in left))  # Orbax is closed in the background
