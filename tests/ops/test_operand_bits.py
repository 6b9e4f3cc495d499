"""Operands against the definition, bit for bit. Oracle: passes that are broken on purpose are found and counted."""

import dataclasses
from contextlib import nullcontext
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from halfbyte import kernels, ops
from halfbyte.conformance import SelfTestFailed, check_stacks, definition, differing, operands_agree
from halfbyte.conformance.operand_bits import differing_in_stacks, distance
from halfbyte.kernels.stacks import Layer
from halfbyte.ops.activation import ACTIVATIONS, SILU
from halfbyte.ops.backends.fused import FusedPasses
from halfbyte.ops.operand import Carrier
from halfbyte.ops.passes import XLA, Passes
from halfbyte.recipe import recipe


@pytest.mark.slow
def test_operands_of_every_backend_here_equal_the_definition() -> None:
    found = operands_agree(recipe("nvfp4"), tokens=32, features=128)
    assert {"reference", "carrier"} <= set(found) and all(found.values())


class BrokenWeight(Passes):
    """Passes that quantize another weight."""

    def weight(self, w, wanted, **options):
        return super().weight(w * 1.01, wanted, **options)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_code")
def test_a_wrong_weight_is_found_and_counted() -> None:
    x, dy, w = (jax.random.normal(jax.random.key(i), (32, 128), jnp.float32) for i in range(3))
    x, dy = x.astype(jnp.bfloat16), dy.astype(jnp.bfloat16)
    right = definition(recipe("fp8"), x, dy, w)
    assert differing(recipe("fp8"), XLA, XLA, x, dy, w, right) == 0
    assert differing(recipe("fp8"), XLA, BrokenWeight(), x, dy, w, right) >= 2  # at least both scales


@pytest.mark.slow
def test_scales_of_rows_are_compared_row_by_row() -> None:
    right = Carrier(jnp.ones((4, 16)), jnp.arange(4.0), recipe("nvfp4_row").fprop_x)
    assert distance(right, right) == 0
    assert distance(dataclasses.replace(right, factor=right.factor.at[2].set(7)), right) == 1


@pytest.fixture
def interpreted(quick_code):
    with kernels.interpreted():
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
    right = definition(chosen, x, dy, w)
    assert differing(chosen, XLA, FusedPasses(), x, dy, w, right) == 0


class InTheWrongLayer(FusedPasses):
    """Kernels that write where they should, and say that it is what was there before."""

    def activate_into(self, g, u, requests, into):
        made, _ = super().activate_into(g, u, requests, into)
        return made, tuple(layer.stack for layer in into)


@pytest.mark.slow(fast_cases=["passes1"])
@pytest.mark.parametrize("passes", [FusedPasses(), InTheWrongLayer()])
@pytest.mark.usefixtures("interpreted")
def test_a_run_asks_whether_layers_are_kept_as_they_are(monkeypatch, passes) -> None:
    monkeypatch.setattr(ops, "choose", lambda backend, problem: SimpleNamespace(passes=passes))
    right = type(passes) is FusedPasses
    with nullcontext() if right else pytest.raises(SelfTestFailed, match="numbers of a layer that its kernels write"):
        assert check_stacks([recipe("nvfp4")] * 3, "fused", SILU, tokens=32, features=128)


def test_where_nothing_is_kept_in_stacks_nothing_is_asked() -> None:
    assert not check_stacks([recipe("nvfp4")] * 3, "carrier", SILU, tokens=32, features=128)


@pytest.mark.usefixtures("interpreted")
def test_an_activation_that_kernels_do_not_hold_is_not_asked_about(monkeypatch) -> None:
    passes = FusedPasses()
    monkeypatch.setattr(ops, "choose", lambda backend, problem: SimpleNamespace(passes=passes))
    other = next(each for name, each in ACTIVATIONS.items() if name != "silu")
    assert not check_stacks([recipe("nvfp4")] * 3, "fused", other, tokens=32, features=128)


@pytest.mark.slow
@pytest.mark.usefixtures("interpreted")
def test_layers_of_a_stack_are_read_as_arrays_are_and_a_wrong_layer_is_found(monkeypatch) -> None:
    """Above `check_stacks` has found no difference in the same program."""
    x, dy = (jax.random.normal(jax.random.key(i), (32, 128), jnp.bfloat16) for i in range(2))
    right = Layer.reshape
    monkeypatch.setattr(Layer, "reshape", lambda a, *shape: Layer(right(a, *shape).stack, jnp.int32(1)))
    assert differing_in_stacks(recipe("nvfp4"), FusedPasses(), x, dy) > 0
