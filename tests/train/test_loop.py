"""The host loop on a tiny run. Oracles: the files it leaves, and each other's numbers."""

import contextlib
import dataclasses
import io
import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

from halfbyte.ops import SelfTestFailed
from halfbyte.train import (
    CheckpointConfig,
    DeferredMetrics,
    DivergedError,
    LogConfig,
    LossScaleConfig,
    OptimizerConfig,
    PrecisionConfig,
    ProfileConfig,
    RunResult,
    ValidationConfig,
    loop,
    read_rows,
    train,
)
from halfbyte.train.loop import Loop
from halfbyte.train.resume import Goodput
from halfbyte.train.run_directory import open_run_directory
from halfbyte.train.train_state import params_checksum
from tiny import ONE_LAYER, ONE_LINEAR, tiny

pytestmark = pytest.mark.usefixtures("one_device")


def run(config, directory, **options):
    """(result, what was printed)."""
    out = io.StringIO()
    return train(config, directory, console=Console(file=out, width=100), **options), out.getvalue()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run with everything: a precision switch, validation, checkpoints, a profile, dynamic loss scale,
    TensorBoard."""
    config = tiny(
        model=ONE_LAYER,
        recipe="bf16",
        policy=ONE_LINEAR,
        precision=PrecisionConfig(switch_at=4, switch_to="fp8"),
        validation=ValidationConfig(every=3, batches=1),
        checkpoint=CheckpointConfig(every=2, keep_last=1, keep_every=4),
        loss_scale=LossScaleConfig(mode="dynamic", initial=4.0, growth_interval=3),
        log=LogConfig(tensorboard=True),
    )
    directory = tmp_path_factory.mktemp("runs") / "tiny"
    return config, directory, *run(config, directory, profile=ProfileConfig("xprof", 2, 3))


@pytest.mark.slow
def test_run_directory_has_config_checkpoints_and_manifest(finished):
    config, directory, result, _ = finished
    assert open_run_directory(directory).config == config
    assert sorted(int(path.name) for path in (directory / "checkpoints").iterdir()) == [4, 6]
    assert any((directory / "tensorboard").iterdir())
    assert result.step == 6
    manifest = json.loads((directory / "manifest.json").read_text())
    assert [phase["recipe"] for phase in manifest["phases"]] == ["bf16", "fp8"]
    assert [phase["steps"] for phase in manifest["phases"]] == [[1, 4], [5, 6]]


def test_one_row_a_step(finished):
    _, directory, result, _ = finished
    rows = read_rows(directory / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row["tokens"] for row in rows] == [256 * step for step in range(1, 7)]
    assert [row["step"] for row in rows if "validation_loss" in row] == [3, 6]
    assert rows[-1]["validation_loss"] == result.validation["all"] == rows[-1]["validation_loss/synthetic"]
    assert rows[-1]["loss"] == result.loss
    assert rows[0]["mfu"] is None
    assert rows[0]["flops_formula"]
    assert [row["loss_scale"] for row in rows] == [4.0, 4.0, 4.0, 8.0, 8.0, 8.0]
    assert all(row["input_wait_s"] >= 0 and row["step_time_s"] > 0 for row in rows)


def test_run_prints_switch_validation_and_loss(finished):
    _, _directory, result, text = finished
    assert "PRECISION SWITCH after step 4: bf16 -> fp8" in text
    assert "0.0% of FLOPs in 4 bits" in text
    assert "validation after step 6: synthetic" in text
    assert f"loss {result.loss:.6f}" in text
    assert "step time, steps 2 to 3: gemm" in text
    assert sum(result.breakdown.values()) == pytest.approx(1.0, abs=1e-6)


def test_finished_run_is_left_alone(finished):
    config, directory, result, _ = finished
    again, text = run(config, directory)
    assert "the run is complete at step 6; raise --steps" in text
    assert len(read_rows(directory / "metrics.jsonl")) == 6
    for a, b in zip(jax.tree.leaves(again.params), jax.tree.leaves(result.params), strict=True):
        assert (a == b).all()


def test_run_cannot_become_shorter(finished):
    config, directory, _, _ = finished
    before = {name: (directory / name).read_bytes() for name in ("config.json", "manifest.json", "metrics.jsonl")}
    with pytest.raises(ValueError, match=r"checkpoint of step 6, beyond the last .*--steps 5"):
        run(dataclasses.replace(config, steps=5), directory)
    assert {name: (directory / name).read_bytes() for name in before} == before


@pytest.mark.slow
def test_without_validation_no_eval_step_is_compiled(tmp_path, monkeypatch):
    monkeypatch.delattr(loop, "make_eval_step")
    result, text = run(tiny(recipe="bf16"), tmp_path / "run")
    assert result.validation == {} and "validation after" not in text
    assert "validation_loss" not in read_rows(tmp_path / "run" / "metrics.jsonl")[-1]


def test_diverged_run_stops_with_its_first_nonfinite(tmp_path):
    config = tiny(model=ONE_LAYER, recipe="bf16", optimizer=OptimizerConfig(learning_rate=1e18, warmup=0))
    config = dataclasses.replace(config, checkpoint=CheckpointConfig(every=1))
    named = r"step 5: .*gradient norm nan, 4 steps in a row.*the forward pass of layer 0.*step 4 is good"
    with pytest.raises(DivergedError, match=named):
        run(config, tmp_path / "run")
    assert [row["skipped"] for row in read_rows(tmp_path / "run" / "metrics.jsonl")] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("begins", [True, False])
def test_last_checkpoint_that_cannot_begin_is_an_error(tmp_path, begins):
    """A stop at the step of a save that failed at once: the state is nowhere, and nobody may be told that it is."""
    store = SimpleNamespace(save=lambda *_, **__: begins, close=lambda: True)
    params = {"w": jnp.ones(4)}
    loop = object.__new__(Loop)
    loop.step, loop.last_saved, loop.late, loop.program = 4, 2, DeferredMetrics(), None
    loop.result = RunResult(tmp_path, 4, stopped="SIGTERM")
    loop.config, loop.data_state, loop.goodput, loop.returns = tiny(), None, Goodput(0.0), []
    loop.session, loop.outputs = (
        SimpleNamespace(content=""),
        SimpleNamespace(store=store, display=None, assert_still_claimed=lambda: None),
    )
    loop.group = SimpleNamespace(report_activity=lambda *_: None)
    loop.state = SimpleNamespace(params=params, sentinel=params_checksum(params), items=dict)
    with contextlib.nullcontext() if begins else pytest.raises(OSError, match=r"step 4\) could not be written"):
        loop._finish()


@pytest.mark.slow
def test_failed_selftest_stops_the_run_before_step_1(tmp_path, monkeypatch):
    """It runs beside the compiler, in a thread of its own, and over the recipes of every phase; where both fail, it is
    what is said.
    """
    asked = []

    def wrong(recipes, backend, activation):
        asked.append((recipes[0].name, len(recipes), backend))
        if recipes[0].name == "nvfp4_no_sr":
            raise SelfTestFailed("3 numbers differ")
        return True

    def gives_up(*given):
        raise MemoryError

    monkeypatch.setattr("halfbyte.train.session.stacked_residuals_match_reference", wrong)
    monkeypatch.setattr("halfbyte.train.loop.compile_train_step", gives_up)
    later = PrecisionConfig(switch_at=1, switch_to="nvfp4_no_sr")
    with pytest.raises(SelfTestFailed, match="3 numbers differ") as failed:
        run(tiny(recipe="nvfp4", unroll=1, remat="none", steps=2, precision=later), tmp_path / "run")
    assert isinstance(failed.value.__context__, MemoryError)
    assert asked == [("nvfp4", 3, "emulated"), ("nvfp4_no_sr", 3, "emulated")]
    assert not (tmp_path / "run").exists()
