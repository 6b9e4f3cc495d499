"""The pure step. Oracles: the same step done another way, and exact equality where arithmetic promises it."""

import dataclasses
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from halfbyte import models
from halfbyte.train import LossScaleConfig, PrecisionConfig, create_state, jit_train_step, phases, run_mesh
from halfbyte.train.batch_source import host_shard, make_global_batch, open_batch_source
from halfbyte.train.dynamic_scaling import update_loss_scale
from halfbyte.train.train_step import (
    NO_GATHER_PIPELINING,
    compile_train_step,
    compiler_options,
    gradients,
    split_microbatches,
)
from tiny import ONE_LAYER, ONE_LINEAR, tiny


@functools.cache
def prepared(config):
    mesh = run_mesh(config, jax.devices()[:1])
    step = jit_train_step(config, phases(config)[0].resolved(config), mesh)
    return mesh, step


def run(config, steps=2, batches=None):
    """(state, list of metrics) after some steps from a fresh state."""
    mesh, step = prepared(config)
    state, metrics = create_state(config, mesh), []
    loader = open_batch_source(config).loader(mesh)
    for number in range(steps):
        rows = next(loader) if batches is None else batches[number]
        state, found = step(state, make_global_batch(rows, mesh, batch=config.batch))
        metrics.append({name: float(value) for name, value in found.items()})
    loader.close()
    return state, metrics


def equal(a, b):
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def test_one_process_reads_every_row():
    for mesh, devices in {"": 1, "data=2,fsdp=2": 4, "fsdp=2,tensor=2": 4, "fsdp=2,tensor=2,context=2": 8}.items():
        assert host_shard(run_mesh(tiny(mesh=mesh), jax.devices("cpu")[:devices]), 8, 32) == (0, 1), mesh


def test_microbatches_keep_rows_on_their_device():
    batch = {"tokens": jnp.arange(8)[:, None] * jnp.ones((1, 3), jnp.int32)}
    split = split_microbatches(batch, 2)["tokens"]
    assert split.shape == (2, 4, 3)
    assert split[1, :, 0].tolist() == [1, 3, 5, 7]


def test_accumulated_gradients_equal_those_of_the_batch():
    """Uneven numbers of scored tokens: a mean of means would be off by a factor of eight in some rows."""
    whole = tiny(model=ONE_LAYER, recipe="bf16", z_loss=1e-3, precision=PrecisionConfig(compute_dtype="float32"))
    cut = dataclasses.replace(whole, accumulate=4)
    mesh = run_mesh(whole, jax.devices()[:1])
    state = create_state(whole, mesh)
    rows = next(open_batch_source(whole).loader(mesh))
    few = (np.arange(8)[:, None] % 4 == 1) & (np.arange(32)[None, :] < 29)
    batch = make_global_batch({**rows, "targets": np.where(few, -1, rows["targets"])}, mesh, batch=8)

    def grads(config):
        resolved = phases(config)[0].resolved(config)
        key, scale = jax.random.key(0), jnp.float32(1.0)
        return jax.jit(lambda p, b: gradients(config, resolved, mesh, p, b, key=key, scale=scale))(state.params, batch)

    (one, sums), (four, cut_sums) = grads(whole), grads(cut)
    assert float(sums["tokens"]) == float(cut_sums["tokens"]) == 2 * 3 + 6 * 32
    assert float(cut_sums["z_sum"]) == pytest.approx(float(sums["z_sum"]), rel=1e-4)
    assert float(sums["z_sum"]) > 0
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(four), strict=True):  # operands round to bf16: 2^-8
        np.testing.assert_allclose(a, b, atol=2**-8 * float(jnp.max(jnp.abs(a))))


PLAIN = tiny(recipe="nvfp4", policy=ONE_LINEAR)
SCALED = dataclasses.replace(PLAIN, loss_scale=LossScaleConfig(mode="dynamic", initial=2.0**9))


@pytest.mark.slow
def test_power_of_two_loss_scale_changes_no_bit():
    (a, first), (b, second) = run(PLAIN), run(SCALED)
    assert equal(a.params, b.params)
    assert equal(a.optimizer, b.optimizer)
    assert [m["loss"] for m in first] == [m["loss"] for m in second]
    assert second[0]["loss_scale"] == 512.0


def test_overflow_skips_the_step_and_halves():
    """Weights of 1e34 in the head overflow float32 gradients."""
    config = dataclasses.replace(SCALED, model=ONE_LAYER, recipe="bf16")
    mesh, step = prepared(config)
    state = create_state(config, mesh)
    state = dataclasses.replace(state, params={**state.params, "head": state.params["head"] * 1e34})
    before = jax.device_get(state)
    rows = next(open_batch_source(config).loader(mesh))
    state, metrics = step(state, make_global_batch(rows, mesh, batch=8))
    assert not np.isfinite(float(metrics["grad_norm"]))
    assert equal(before.params, state.params)
    assert equal(before.optimizer, state.optimizer)
    assert float(state.scaler["scale"]) == 256.0
    assert int(state.scaler["skipped"]) == 1
    assert int(state.step) == 1


def test_scale_grows_after_good_steps_and_is_bounded():
    config = LossScaleConfig(mode="dynamic", initial=4.0, growth_interval=2)
    scaler = {"scale": jnp.float32(4.0), "good_steps": jnp.int32(0), "skipped": jnp.int32(0)}
    seen = []
    for finite in (True, True, True, False, True, True):
        scaler = update_loss_scale(config, scaler, jnp.asarray(finite))
        seen.append((float(scaler["scale"]), int(scaler["good_steps"])))
    assert seen == [(4.0, 1), (8.0, 0), (8.0, 1), (4.0, 0), (4.0, 1), (8.0, 0)]
    assert (
        float(update_loss_scale(config, {**scaler, "scale": jnp.float32(2.0**-24)}, jnp.asarray(False))["scale"])
        == 2.0**-24
    )


def test_loss_starts_at_ln_vocab_and_falls():
    _, metrics = run(PLAIN, steps=6)
    assert metrics[-1]["loss"] < metrics[0]["loss"] - 0.2
    assert metrics[0]["loss"] == pytest.approx(np.log(64) + 0.5, rel=0.1)  # ln(vocab) + half the variance of the logits


class Program:
    """A lowered step and its compiled text, as JAX hands them out."""

    def __init__(self, names: str, compiled: str) -> None:
        self.names, self.compiled = names, compiled

    def as_text(self, debug_info: bool = False) -> str:
        return self.names if debug_info else self.compiled

    def compile(self) -> "Program":
        return Program("", self.compiled)


def test_program_without_named_8_bit_gemms_is_refused():
    config = tiny(recipe="fp8")
    resolved = phases(config)[0].resolved(config)
    call = '%c = custom-call(%a), custom_call_target="__cublas$lt$matmul$f8"'
    named = call + ', metadata={op_name="f8_call/dot_general"}'
    assert compile_train_step(Program("f8_call/dot_general", named), resolved).as_text() == named
    assert compile_train_step(Program("dot_general", call), resolved).as_text() == call  # none was given its scales
    with pytest.raises(RuntimeError, match="dropped the name"):
        compile_train_step(Program("f8_call/dot_general", call), resolved)
    with pytest.raises(RuntimeError, match="1 GEMMs of the fp8 backend as something else"):
        compile_train_step(Program("f8_call/dot_general", named.replace("$f8", "")), resolved)


@pytest.mark.parametrize(
    "remat, axes, ahead",
    [("full", {"fsdp": 8}, True), ("full", {"fsdp": 4, "tensor": 2}, False), ("quantized", {"tensor": 2}, True)],
)
def test_gather_pipelining_is_off_where_it_recomputes_layers(remat, axes, ahead):
    """Compiled for 128 GB300 with them, 405B multiplied 1.047x of what is needed."""
    gpu = SimpleNamespace(platform="cuda")
    mesh = SimpleNamespace(devices=np.array([gpu]), size=8, shape=axes)
    config = tiny(recipe="nvfp4", remat=remat)
    found = compiler_options(config, mesh, phases(config)[0].resolved(config))
    assert len(NO_GATHER_PIPELINING.keys() & found.keys()) == (not ahead)  # by the name that this XLA has for it
    routed = dataclasses.replace(config, model=models.preset("moe-demo"))  # logits are gathered on every mesh
    found = compiler_options(routed, mesh, phases(config)[0].resolved(config))
    assert len(NO_GATHER_PIPELINING.keys() & found.keys()) == (remat == "full")
    jax.jit(jnp.negative).lower(1.0).compile(compiler_options=found)  # XLA knows them
