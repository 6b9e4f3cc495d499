"""Halfbyte's recipes in MaxText's trainer. Oracle: `apply_recipe` by hand with the same key, and MaxText's own bits.

The stub has MaxText's module names and signatures; test_real_maxtext.py runs MaxText itself.
"""

import functools
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import halfbyte as hb
from halfbyte.integrations import maxtext
from halfbyte.recipes import layer_key, step_key

STUB = Path(__file__).parent / "stub"
QUICK = {"xla_backend_optimization_level": 0}  # compiling is most of the time, and no number depends on it
FAST = "--xla_backend_optimization_level=0"


@pytest.fixture
def trainer(monkeypatch):
    """The stub's modules (train, quantizations), imported anew."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "maxtext"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(STUB))
    yield importlib.import_module(maxtext.TRAIN), importlib.import_module(maxtext.QUANTIZATIONS)
    for name in [name for name in sys.modules if name.partition(".")[0] == "maxtext"]:
        del sys.modules[name]


def config(quantization="te_nvfp4", **fields):
    return SimpleNamespace(quantization=quantization, gradient_accumulation_steps=2, init_weights_seed=5, **fields)


def test_install_serves_te_and_leaves_other_values(trainer):
    _, quantizations = trainer
    maxtext.install()
    assert quantizations.configure_quantization(config()) is None
    assert quantizations.configure_quantization(config("int8"), quant_mode_str="serve") == "MaxText's int8"
    assert quantizations.configure_quantization(config("te_no_quant")) == "MaxText's te_no_quant"
    assert quantizations.configure_quantization(config("")) is None


@pytest.mark.parametrize("name", ["te_fp8_currentscaling", "te_mxfp8", "te_nvfp4", "te_nvfp4_no_rht"])
def test_every_te_value_is_a_recipe(trainer, name):
    train, _ = trainer
    maxtext.install()
    step = lambda data: train.train_step(None, config(name), None, None, train.create_state(0), data)  # noqa: E731
    grads = jax.eval_shape(step, train.create_batch())
    assert jax.tree.structure(grads) == jax.tree.structure(train.create_params())


def test_gradients_equal_apply_recipe_by_hand(trainer):
    """Two microbatches of step 3: rows 0 and 2, rows 1 and 3, each with the key of its number."""
    train, _ = trainer
    data, original = train.create_batch(), train.loss_fn
    maxtext.install()
    state = train.create_state(3)

    @functools.partial(jax.jit, compiler_options=QUICK)
    def by_hand(params, inputs):
        total = jax.tree.map(jnp.zeros_like, params)
        for microbatch in range(2):
            key = layer_key(step_key(5, 3), microbatch)
            loss = lambda p, x: original(p, None, {"inputs": x}, None, None)[0]  # noqa: E731
            fn = hb.apply_recipe(loss, hb.policy("mlp", "nvfp4"), key=key, show=None)
            total = jax.tree.map(jnp.add, total, jax.grad(fn)(params, inputs[microbatch::2]))
        return total

    @functools.partial(jax.jit, compiler_options=QUICK)
    def ours(data):
        return train.train_step(None, config(), None, None, state, data)

    jax.tree.map(np.testing.assert_array_equal, ours(data), by_hand(state.params, data["inputs"]))


def test_keys_of_steps_microbatches_layers_and_sites_differ(trainer, monkeypatch):
    import halfbyte.ops.adapters.jaxpr_interpreter as interpreter

    train, _ = trainer
    seen, derive = [], interpreter._site_key

    def noted(key, dot):
        made = derive(key, dot)
        jax.debug.callback(lambda words: seen.append(tuple(np.asarray(words).tolist())), jax.random.key_data(made))
        return made

    monkeypatch.setattr(interpreter, "_site_key", noted)
    maxtext.install()
    step = jax.jit(
        lambda n, data: train.train_step(None, config(), None, None, train.create_state(n), data),
        compiler_options=QUICK,
    )
    for number in range(3):
        jax.block_until_ready(step(jnp.int32(number), train.create_batch()))
    jax.effects_barrier()
    assert len(set(seen)) == 3 * 2 * train.LAYERS * 3  # steps, microbatches, layers, sites


def test_evaluation_runs_without_a_step_and_training_does_not(trainer):
    train, _ = trainer
    maxtext.install()
    call = lambda is_train: jax.eval_shape(  # noqa: E731
        lambda data: train.loss_fn(train.create_params(), config(), data, None, None, is_train=is_train)[0],
        train.create_batch(),
    )
    assert call(False).shape == ()
    with pytest.raises(ValueError, match="called without a step, so all steps would round with the same random bits"):
        call(True)


def test_report_says_what_is_replaced_and_what_stays(trainer, capsys):
    train, _ = trainer
    maxtext.install()
    for _ in range(2):
        jax.eval_shape(
            lambda data: train.train_step(None, config(), None, None, train.create_state(0), data), train.create_batch()
        )
    text = capsys.readouterr().err
    assert text.count("halfbyte: recipe te_nvfp4, policy mlp: 3 dots replaced, 1 left") == 1
    assert "  decoder/layers/mlp/wi_0/kernel x2: in nvfp4\n  decoder/layers/mlp/wi_1/kernel x2: in nvfp4\n" in text
    assert "  decoder/layers/self_attention/query/kernel x2: left: no rule matches\n" in text
    assert "halfbyte_policy=all_linear" in text


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("all_linear", {"wi_0", "wi_1", "wo", "query"}),
        ("mlp; mlp/wo=bf16", {"wi_0", "wi_1"}),
        ("mlp; layers[0:1]=bf16", {"wi_0", "wi_1", "wo"}),
        ("self_attention/*", {"query"}),
    ],
)
def test_policies_by_name_and_by_path(trainer, capsys, policy, expected):
    train, _ = trainer
    maxtext.install(policy=policy)
    jax.eval_shape(
        lambda data: train.train_step(None, config(), None, None, train.create_state(0), data), train.create_batch()
    )
    lines = [line for line in capsys.readouterr().err.splitlines() if line.endswith("in nvfp4")]
    assert {line.split("/kernel")[0].split("/")[-1] for line in lines} == expected
    assert all(("x1:" if "layers[" in policy else "x2:") in line for line in lines)


def test_recipe_of_the_arguments_replaces_that_of_quantization(trainer):
    _, quantizations = trainer
    maxtext.install(recipe="mxfp4")
    assert quantizations.configure_quantization(config("")) is None
    with pytest.raises(ValueError, match="halfbyte_recipe=mxfp4 and quantization=int8: a model has one quantization"):
        quantizations.configure_quantization(config("int8"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"quantization": "te_fp8_delayedscaling"}, "quantization=te_fp8_delayedscaling: recipe .* use fp8"),
        ({"quantization": "te_fp3"}, "quantization=te_fp3: Halfbyte has no recipe of this name; use one of te_"),
        ({"use_qwix_quantization": True}, "use_qwix_quantization=true is not supported"),
        ({"enable_diloco": True}, "enable_diloco=true is not supported .* set enable_diloco=false"),
    ],
)
def test_unsupported_fields_are_refused_when_the_model_is_built(trainer, fields, message):
    _, quantizations = trainer
    maxtext.install()
    with pytest.raises(ValueError, match=message):
        quantizations.configure_quantization(config(**fields))


def test_unknown_maxtext_is_refused_with_the_names_that_differ(trainer, monkeypatch):
    train, quantizations = trainer
    monkeypatch.setattr(train, "train_step", lambda model, config, state, data: None)
    monkeypatch.delattr(quantizations, "configure_quantization")
    with pytest.raises(ValueError, match="this MaxText is not known") as error:
        maxtext.install()
    text = str(error.value)
    assert "maxtext.layers.quantizations.configure_quantization is missing" in text
    assert "maxtext.trainers.pre_train.train.train_step takes (model, config, state, data), expected (model, " in text
    assert "loss_fn" not in text and "install maxtext==0.2.5" in text


def test_install_twice_wraps_once(trainer):
    train, quantizations = trainer
    original = train.loss_fn
    maxtext.install()
    maxtext.install(recipe="mxfp4")
    assert train.loss_fn.__wrapped__ is original
    assert quantizations.configure_quantization(config("")) is None


def test_errors_of_the_arguments_come_before_maxtext(trainer):
    with pytest.raises(ValueError, match="no recipe named 'nvfp5'"):
        maxtext.install(recipe="nvfp5")
    with pytest.raises(ValueError, match="no policy named 'mpl'"):
        maxtext.install(policy="mpl")
    with pytest.raises(ValueError, match="halfbyte_polciy=mlp: the options are halfbyte_recipe= and halfbyte_policy="):
        maxtext.split_arguments(["base.yml", "halfbyte_polciy=mlp"])


def run_module(*arguments, stub=True):
    path = str(STUB) if stub else ""
    return subprocess.run(
        [sys.executable, "-m", "halfbyte.integrations.maxtext", *arguments],
        env={**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": FAST},
        capture_output=True,
        text=True,
        check=False,
    )


def test_command_passes_on_all_other_arguments():
    done = run_module("base.yml", "quantization=te_nvfp4", "halfbyte_policy=all_linear", "steps=5")
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "argv": ["train", "base.yml", "quantization=te_nvfp4", "steps=5"],
        "finite": True,
    }
    assert "halfbyte: recipe te_nvfp4, policy all_linear: 4 dots replaced, 0 left" in done.stderr


@pytest.mark.skipif(importlib.util.find_spec("maxtext") is not None, reason="MaxText is installed")
def test_missing_maxtext_is_one_sentence():
    done = run_module("base.yml", stub=False)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.splitlines()[-1].startswith("halfbyte: MaxText is not installed: run `pip install maxtext`")
    assert "Traceback" not in done.stderr
