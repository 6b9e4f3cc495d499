"""Operands against the definition, bit for bit. Oracle: passes that are broken on purpose are found and counted."""

import dataclasses
from contextlib import nullcontext
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from halfbyte import kernels
from halfbyte.kernels.mosaic_launch import StackSlice
from halfbyte.ops import (
    SelfTestFailed,
    backends_match_reference,
    count_mismatches,
    selftest_operands,
    selftest_reference_operands,
    stacked_residuals_match_reference,
)
from halfbyte.ops.activation import ACTIVATIONS, SILU
from halfbyte.ops.backends.fused import FusedQuantizePasses
from halfbyte.ops.operand import BlockDequantized
from halfbyte.ops.quantize_passes import XLA_PASSES, QuantizePasses
from halfbyte.ops.selftest_operands import count_stacked_mismatches, hamming_distance
from halfbyte.recipes import recipe


@pytest.mark.slow
def test_operands_of_every_backend_here_equal_the_definition() -> None:
    found = backends_match_reference(recipe("nvfp4"), tokens=32, features=128)
    assert {"reference", "emulated"} <= set(found) and all(found.values())


class BrokenWeight(QuantizePasses):
    """Passes that quantize another weight."""

    def quantize_weight(self, w, wanted, **options):
        return super().quantize_weight(w * 1.01, wanted, **options)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_code")
def test_a_wrong_weight_is_found_and_counted() -> None:
    x, dy, w = (jax.random.normal(jax.random.key(i), (32, 128), jnp.float32) for i in range(3))
    x, dy = x.astype(jnp.bfloat16), dy.astype(jnp.bfloat16)
    right = selftest_reference_operands(recipe("fp8"), x, dy, w)
    assert count_mismatches(recipe("fp8"), XLA_PASSES, XLA_PASSES, x, dy, w, right) == 0
    assert count_mismatches(recipe("fp8"), XLA_PASSES, BrokenWeight(), x, dy, w, right) >= 2  # at least both scales


@pytest.mark.slow
def test_scales_of_rows_are_compared_row_by_row() -> None:
    right = BlockDequantized(jnp.ones((4, 16)), jnp.arange(4.0), recipe("nvfp4_row").fprop_x)
    assert hamming_distance(right, right) == 0
    assert hamming_distance(dataclasses.replace(right, decode_scale=right.decode_scale.at[2].set(7)), right) == 1


@pytest.fixture
def interpreted(quick_code):
    with kernels.interpret_kernels():
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_4over6_mse", "halfbyte"])
def test_kernels_of_weights_are_compared_as_multiplied_and_as_they_travel(name) -> None:
    """Square tiles, which kernels also pack, and blocks along an axis, which they do not; of a forward operand.
    Kernels of x and dy: ops/test_fused.py."""
    x, dy, w = (jax.random.normal(jax.random.key(i), (128 if i == 2 else 16, 128), jnp.float32) for i in range(3))
    x, dy, given = x.astype(jnp.bfloat16), dy.astype(jnp.bfloat16), recipe(name)
    chosen = dataclasses.replace(recipe("bf16"), name="weights", fprop_w=given.fprop_w, dgrad_w=given.dgrad_w)
    right = selftest_reference_operands(chosen, x, dy, w)
    assert count_mismatches(chosen, XLA_PASSES, FusedQuantizePasses(), x, dy, w, right) == 0


class InTheWrongLayer(FusedQuantizePasses):
    """Kernels that write where they should, and say that it is what was there before."""

    def activate_to_stacks(self, g, u, specs, into):
        made, _ = super().activate_to_stacks(g, u, specs, into)
        return made, tuple(layer.stack for layer in into)


@pytest.mark.slow(fast_cases=["passes1"])
@pytest.mark.parametrize("passes", [FusedQuantizePasses(), InTheWrongLayer()])
@pytest.mark.usefixtures("interpreted")
def test_a_run_asks_whether_layers_are_kept_as_they_are(monkeypatch, passes) -> None:
    monkeypatch.setattr(selftest_operands, "choose_backend", lambda backend, problem: SimpleNamespace(passes=passes))
    right = type(passes) is FusedQuantizePasses
    with nullcontext() if right else pytest.raises(SelfTestFailed, match="numbers of a layer that its kernels write"):
        assert stacked_residuals_match_reference([recipe("nvfp4")] * 3, "fused", SILU, tokens=32, features=128)


def test_where_nothing_is_kept_in_stacks_nothing_is_asked() -> None:
    assert not stacked_residuals_match_reference([recipe("nvfp4")] * 3, "emulated", SILU, tokens=32, features=128)


@pytest.mark.usefixtures("interpreted")
def test_an_activation_that_kernels_do_not_hold_is_not_asked_about(monkeypatch) -> None:
    passes = FusedQuantizePasses()
    monkeypatch.setattr(selftest_operands, "choose_backend", lambda backend, problem: SimpleNamespace(passes=passes))
    other = next(each for name, each in ACTIVATIONS.items() if name != "silu")
    assert not stacked_residuals_match_reference([recipe("nvfp4")] * 3, "fused", other, tokens=32, features=128)


@pytest.mark.slow
@pytest.mark.usefixtures("interpreted")
def test_layers_of_a_stack_are_read_as_arrays_are_and_a_wrong_layer_is_found(monkeypatch) -> None:
    """Above `check_stacks` has found no difference in the same program."""
    x, dy = (jax.random.normal(jax.random.key(i), (32, 128), jnp.bfloat16) for i in range(2))
    right = StackSlice.reshape
    monkeypatch.setattr(StackSlice, "reshape", lambda a, *shape: StackSlice(right(a, *shape).stack, jnp.int32(1)))
    assert count_stacked_mismatches(recipe("nvfp4"), FusedQuantizePasses(), x, dy) > 0
