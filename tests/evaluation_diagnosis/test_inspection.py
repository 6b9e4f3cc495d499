"""Inspection of a model with a planted outlier channel. Oracle: where it was planted; the numbers of one operand
against NumPy and ml_dtypes."""

import contextlib
import dataclasses
import io

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest
from radar_model import CONFIG, batch_of
from rich.console import Console

from halfbyte import models
from halfbyte.cli.inspect import describe as as_data
from halfbyte.evaluation.inspection import Inspection, inspect_step, inspection_html, inspection_table
from halfbyte.evaluation.operand_stats import CHUNK, blocks_as_rows, rounding_outcomes, tensor_stats
from halfbyte.formats import FP8, MXFP4, NVFP4
from halfbyte.recipes import OperandPolicy, policy, recipe
from halfbyte.train import resolve_policy

# Every linear 64 x 64: what is looked at in one of them is compiled for all.
MODEL = CONFIG.model.replace(kv_heads=4, mlp=64)
LAYER, CHANNEL, FACTOR = 1, 5, 300.0


def with_outlier(params):
    """A channel that is 300 times as large before gate and up of one layer, and whose weights are 300 times smaller:
    the same function, and a block whose other 15 numbers round to zero."""
    mlp = dict(params["layers"]["mlp"])
    mlp["norm"] = mlp["norm"].at[LAYER, CHANNEL].multiply(FACTOR)
    for name in ("gate", "up"):
        mlp[name] = mlp[name].at[LAYER, CHANNEL].divide(FACTOR)
    return {**params, "layers": {**params["layers"], "mlp": mlp}}


@contextlib.contextmanager
def counted_programs():
    """Yields a list that gets the seconds of each program that XLA compiles meanwhile."""
    seconds = []

    def listen(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            seconds.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seconds
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def test_a_planted_outlier_channel_is_named_first_and_kept_in_bf16():
    config = dataclasses.replace(CONFIG, model=MODEL, recipe="nvfp4", policy="mlp")
    resolved = resolve_policy(MODEL, "mlp", recipe("nvfp4"))
    params = with_outlier(jax.jit(lambda key: models.init(MODEL, key))(jax.random.key(3)))
    lines = []
    with counted_programs() as programs:
        found = inspect_step(
            config, resolved, params, [batch_of(seed, rows=2) for seed in (3, 4)], step=0, say=lines.append
        )
    assert len(lines) > 2 * MODEL.layers and "compiled" in lines[0]  # said before anything is
    assert any(line.endswith("s left") for line in lines) and not lines[-1].endswith("left")
    # The forward pass, a layer; of the one size of linears, with and without a key: GEMMs and a layout; statistics of
    # 1D and 2D blocks; and what derives keys.
    assert len(programs) <= 14, programs
    layer, site, gemm, decibels = found.worst()[0]
    assert (layer, gemm) == (LAYER, "fprop") and site in ("mlp/gate", "mlp/up") and decibels < 10
    text = found.policy("mlp", 12.0)
    chosen = policy(text, recipe("nvfp4")).resolve(models.linear_sites(MODEL), MODEL.layers)
    assert (
        not chosen.recipe_at("layers/mlp/gate", LAYER).quantized
        and chosen.recipe_at("layers/mlp/down", LAYER).quantized
    )
    assert chosen.recipe_at("layers/mlp/gate", 0).quantized
    crest = {(o["layer"], o["site"], o["role"]): o["crest"] for o in found.operands}
    assert crest[LAYER, "mlp/gate", "fprop_x"] > 2 * crest[0, "mlp/gate", "fprop_x"]
    page = inspection_html(found, title="<x>", lines=[], policy=text, wanted=12.0)
    assert "&lt;x&gt;" in page and "layers[1]" in page and "<script" not in page
    assert inspection_table(found, 12.0).row_count == 7 * 3


def test_what_the_run_leaves_in_bf16_is_shown_as_such():
    found = Inspection([], {(0, "mlp/up", "fprop"): 9.0, (1, "mlp/up", "fprop"): 8.0}, frozenset({(0, "mlp/up")}), 1, 4)
    console = Console(width=100, file=io.StringIO())
    console.print(inspection_table(found, 12.0))
    (row,) = (line for line in console.file.getvalue().splitlines() if "mlp/up" in line)
    assert row.split()[-4:] == ["9.0", "│", "(8.0)", "│"] and "in brackets: bf16 here" in console.file.getvalue()
    assert "(8.0)</td>" in inspection_html(found, title="t", lines=[], policy="mlp", wanted=12.0)
    assert [gemm["quantized"] for gemm in as_data(found, "mlp")["gemms"]] == [False, True]


@pytest.mark.slow
def test_numbers_of_one_operand_against_numpy():
    x = np.random.default_rng(0).normal(0, 1, (32, 64)).astype(np.float32)
    x[3, 7] = 80.0
    given = jnp.asarray(x, jnp.bfloat16)
    wide = np.asarray(given, np.float32)
    told = jax.jit(tensor_stats, static_argnums=(1, 2))
    found = told(given, OperandPolicy(NVFP4), -1)
    assert float(found["amax"]) == np.abs(wide).max()
    assert float(found["crest"]) == pytest.approx(np.abs(wide).max() / np.sqrt(np.mean(wide**2)), rel=1e-5)
    # The block of the outlier: its scale is 80 / 6, and what is below a quarter of that rounds to zero.
    block = np.delete(wide[3, :16], 7)
    crushed = np.sum(np.abs(block) < 80 / 6 / 4)
    assert float(found["zeros"]) * x.size >= crushed > 10
    assert int(found["scale_codes"].sum()) == x.size // 16
    scale = 448 / np.abs(wide).max()
    near = (wide * scale).astype(jnp.float8_e4m3fn).astype(np.float32) / scale
    expected = 10 * np.log10(np.sum(wide**2) / np.sum((near - wide) ** 2))
    assert float(told(given, OperandPolicy(FP8), -1)["snr"]) == pytest.approx(expected, abs=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    "axis, policy", [(-2, OperandPolicy(NVFP4, hadamard=True)), (-1, OperandPolicy(NVFP4, block="2d"))]
)
def test_a_matrix_laid_out_in_rows_has_the_same_numbers(axis, policy):
    x = jnp.asarray(np.random.default_rng(1).normal(0, 1, (48, 64)), jnp.bfloat16)
    laid = blocks_as_rows(x, policy.block, axis)
    assert laid.size > CHUNK > x.size
    expected = jax.jit(tensor_stats, static_argnums=(1, 2))(x, policy, axis)
    (stats,) = rounding_outcomes(laid, (policy,), jnp.int32(x.size))
    for name, value in expected.items():
        np.testing.assert_allclose(stats[name], value, rtol=1e-5, err_msg=name)


def test_chunks_of_a_tensor_share_its_scale():
    """Two chunks, the second in part zeros, and an outlier in the first only."""
    x = jnp.asarray(np.random.default_rng(2).normal(0, 1, (96, 1024)), jnp.bfloat16).at[3, 5].set(1e4)
    tried = OperandPolicy(NVFP4), OperandPolicy(FP8), OperandPolicy(MXFP4)
    outcomes = rounding_outcomes(blocks_as_rows(x, "1d", -1), tried, jnp.int32(x.size))
    for operand_policy, stats in zip(tried, outcomes, strict=True):
        for name, value in tensor_stats(x, operand_policy, -1).items():
            np.testing.assert_allclose(stats[name], value, rtol=1e-5, err_msg=name)


def test_a_shape_without_blocks_is_not_laid_out():
    assert blocks_as_rows(jnp.ones((3, 40), jnp.bfloat16), "1d", -1).shape[1] == 1
    assert blocks_as_rows(jnp.ones((16, 40), jnp.bfloat16), "2d", -1) is None
