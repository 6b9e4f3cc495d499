"""Trouble is noticed, named and answered. Oracles: states and rows whose trouble was put there by hand."""

import dataclasses
import io
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from halfbyte.train import (
    CheckpointConfig,
    DivergedError,
    GuardConfig,
    create_state,
    jit_train_step,
    phases,
    read_rows,
    run_mesh,
    train,
)
from halfbyte.train.batch_source import make_global_batch, open_batch_source
from halfbyte.train.loop import Loop
from halfbyte.train.nan_guard import MIN_WINDOW, DivergenceGuard, TrainingFault, _too_large, find_first_nonfinite
from halfbyte.train.precision_phases import with_fallback_recipe
from halfbyte.train.resume import Goodput
from halfbyte.train.train_state import check_weights
from tiny import ONE_LINEAR, tiny

pytestmark = pytest.mark.usefixtures("one_device")

WELL = {"loss": 2.0, "grad_norm": 1.0, "skipped": 0.0, "weights_not_finite": 0.0, "weights_intact": 1.0}


def test_skipped_steps_are_counted_and_bounded():
    guard = DivergenceGuard(tiny(guard=GuardConfig(max_skipped_steps=2)))
    bad = {**WELL, "loss": float("nan")}
    assert guard.check_step(1, WELL) is None
    assert "STEP SKIPPED" in guard.check_step(2, {**bad, "skipped": 1.0})
    assert "2 of at most 2" in guard.check_step(3, {**bad, "skipped": 2.0})
    assert guard.check_step(4, {**WELL, "skipped": 2.0}) is None
    guard.check_step(5, {**bad, "skipped": 3.0})
    guard.check_step(6, {**bad, "skipped": 4.0})
    with pytest.raises(TrainingFault, match=r"step 7: loss nan.*3 steps in a row"):
        guard.check_step(7, {**bad, "skipped": 5.0})


def test_nonfinite_or_changed_weights_are_a_fault():
    guard = DivergenceGuard(tiny())
    with pytest.raises(TrainingFault, match="12 weights are not finite"):
        guard.check_step(1, {**WELL, "weights_not_finite": 12.0})
    with pytest.raises(TrainingFault, match="memory has changed them") as found:
        guard.check_step(2, {**WELL, "weights_intact": 0.0})
    assert found.value.in_memory


def test_zero_gradient_is_a_fault_after_a_few_steps():
    """Loss and weights are finite then, and nothing is learnt any more."""
    guard = DivergenceGuard(tiny(guard=GuardConfig(max_skipped_steps=2)))
    idle = {**WELL, "grad_norm": 0.0}
    for step in (1, 2, 4, 5):
        guard.check_step(step, idle)
        guard.check_step(3, WELL) if step == 2 else None
    with pytest.raises(TrainingFault, match=r"step 6: .*gradient has been 0 for 3 steps"):
        guard.check_step(6, idle)


def test_spike_is_a_fault_from_a_full_window_on():
    guard = DivergenceGuard(tiny(guard=GuardConfig(spike_threshold=2.0)))
    for step in range(1, MIN_WINDOW + 1):  # a median of fewer is none
        loss = 9.0 if step == MIN_WINDOW else 2.0 + 0.05 * (step % 3)
        assert guard.check_step(step, {**WELL, "loss": loss}) is None
    with pytest.raises(TrainingFault, match=r"LOSS SPIKE, 4\.5000"):
        guard.check_step(MIN_WINDOW + 1, {**WELL, "loss": 4.5})


@pytest.fixture(scope="module")
def one_step():
    """(config, resolved, mesh, fresh state, a batch, the step)."""
    config = tiny(recipe="nvfp4", policy=ONE_LINEAR)  # the program of test_step.py and of the spike below
    mesh = run_mesh(config, jax.devices()[:1])
    resolved = phases(config)[0].resolved(config)
    loader = open_batch_source(config).loader(mesh)
    batch = make_global_batch(next(loader), mesh, batch=config.batch)
    loader.close()
    state = create_state(config, mesh)
    step = jit_train_step(config, resolved, mesh)  # donates its state
    return config, resolved, mesh, state, batch, lambda state, batch: step(jax.tree.map(jnp.copy, state), batch)


def with_weight(state, path, index, value):
    """The state with one weight of `layers/mlp/<path>` replaced, as a fault of memory would."""
    layers = state.params["layers"]
    mlp = {**layers["mlp"], path: layers["mlp"][path].at[index].set(value)}
    return dataclasses.replace(state, params={**state.params, "layers": {**layers, "mlp": mlp}})


@pytest.mark.slow
def test_flipped_bit_in_a_weight_skips_the_step(one_step):
    *_, state, batch, step = one_step
    after, values = step(state, batch)
    assert values["weights_intact"] == 1
    _, values = step(after, batch)
    assert values["weights_intact"] == 1
    weight = after.params["layers"]["mlp"]["down"][1, 3, 5]
    flipped = jax.lax.bitcast_convert_type(jax.lax.bitcast_convert_type(weight, jnp.uint32) ^ 1, jnp.float32)
    broken = with_weight(after, "down", (1, 3, 5), flipped)
    then, values = step(broken, batch)
    assert values["weights_intact"] == 0
    assert np.array_equal(then.params["layers"]["mlp"]["up"], after.params["layers"]["mlp"]["up"])
    assert int(then.scaler["skipped"]) == 1


@pytest.mark.slow
def test_weights_are_checked_after_the_gradients(one_step):
    """Or a bit that flips while a step runs would be built on. A norm that cannot be shows that it is waited for."""
    state = one_step[3]
    intact = jax.jit(lambda state, norm: check_weights(state, norm).intact)
    assert bool(intact(state, jnp.float32(1.0)))
    assert not bool(intact(state, jnp.float32(-1.0)))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nonfinite_weight_is_named_with_its_layer(one_step, value):
    config, resolved, mesh, state, batch, step = one_step
    broken = with_weight(state, "down", (1, 3, 5), value)
    _, values = step(broken, batch)
    assert values["weights_not_finite"] == 1
    named = find_first_nonfinite(config, resolved, mesh, broken.params, batch, step=jnp.int32(0))
    assert named == "the weight of layers/mlp/down, layer 1: 1 values are not finite"


def test_layer_that_overflows_is_named(one_step):
    config, resolved, mesh, state, batch, _ = one_step
    huge = with_weight(state, "down", 1, 3e38).params
    named = find_first_nonfinite(config, resolved, mesh, huge, batch, step=jnp.int32(0))
    assert named.startswith("the forward pass of layer 1")


def test_finite_gradients_of_infinite_norm_are_named():
    grads = {"layers": {"mlp": {"up": jnp.ones((2, 4)), "down": jnp.ones((2, 4)).at[1, 2].set(1e30)}}}
    assert _too_large(grads) == "the norm of the gradients: that of layers/mlp/down, layer 1 reaches 1.0e+30"
    assert _too_large(jax.tree.map(jnp.sign, grads)) is None


def test_token_outside_the_vocabulary_is_named(one_step):
    config, resolved, mesh, state, batch, _ = one_step
    bad = {**batch, "tokens": batch["tokens"].at[0, 0].set(9999)}
    assert "tokens from 0 to 9999" in find_first_nonfinite(config, resolved, mesh, state.params, bad, step=jnp.int32(0))


def test_spike_rolls_back_skips_and_falls_back_to_bf16(tmp_path, monkeypatch):
    """A limit so tight that noise passes it: two returns, then the run stops. Rows are each there once, and so is each
    recipe compiled."""
    compiled = []
    compile_phase = Loop._compile
    monkeypatch.setattr(Loop, "_compile", lambda self, phase: compiled.append(phase) or compile_phase(self, phase))
    config = tiny(
        recipe="nvfp4",
        policy=ONE_LINEAR,
        steps=60,
        guard=GuardConfig(spike_threshold=1.0005, max_rollbacks=2),
        on_divergence="bf16",
        checkpoint=CheckpointConfig(every=5),
    )
    out = io.StringIO()
    with pytest.raises(DivergedError, match=r"LOSS SPIKE.*after 2 returns"):
        train(config, tmp_path / "run", console=Console(file=out, width=200))
    assert out.getvalue().count("GOING BACK") == 2
    assert [phase.recipe.name for phase in compiled] == ["nvfp4", "bf16"]
    assert "on in BF16" in out.getvalue()
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    first, _ = manifest["returns"]
    assert first["recipe"] == "bf16"
    assert first["skipped"] == first["at"] - first["step"] > 0
    assert manifest["phases"][-1]["recipe"] == "bf16"
    assert manifest["phases"][0]["steps"][1] == first["step"]
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, rows[-1]["step"] + 1))
    assert all(0 < row["goodput"] <= 1 for row in rows)


def test_fallback_phases():
    config = tiny(recipe="nvfp4", steps=20)
    after = with_fallback_recipe(phases(config), 8, "bf16")
    assert [(phase.start, phase.stop, phase.recipe.name) for phase in after] == [(0, 8, "nvfp4"), (8, 20, "bf16")]
    assert with_fallback_recipe(after, 8, "bf16")[-1].start == 8
    assert with_fallback_recipe(phases(config), 0, "fp8")[0].recipe.name == "fp8"
    assert with_fallback_recipe(after, 12, "") == after


def test_goodput_adds_up():
    """A run of 100 s: 30 s of steps that count, of which the checkpoint held 20, and 10 s that a crash threw away."""
    found = Goodput(0.0, clock=lambda: 100.0)
    for _ in range(10):
        found.step({"step_time_s": 2.5, "input_wait_s": 0.5})
    kept = found.to_json()
    dropped = [{"step_time_s": 5.5, "input_wait_s": 0.5}] * 2
    again = Goodput.resumed(kept, dropped)
    again.clock = lambda: 100.0
    again.step({"step_time_s": 10.0, "input_wait_s": 0.0})
    assert (again.productive, again.lost, again.overhead) == (30.0, 10.0, 60.0)
    again.discard_since(20.0)
    assert (again.productive, again.lost, again.overhead) == (20.0, 20.0, 60.0)
    assert "productive 20.0% (20.0 s), lost 20.0% (20.0 s), waiting 60.0%" in str(again)
