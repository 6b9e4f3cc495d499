"""Operands against the definition, bit for bit. Oracle: passes that are broken on purpose are found and counted."""

import jax
import jax.numpy as jnp

from halfbyte.conformance import definition, differing, operands_agree
from halfbyte.conformance.operand_bits import differing_in_stacks
from halfbyte.ops.backends.fused import FusedPasses
from halfbyte.ops.passes import XLA, Passes
from halfbyte.ops.stacks import Layer
from halfbyte.recipe import recipe


def test_operands_of_every_backend_here_equal_the_definition() -> None:
    found = operands_agree(recipe("nvfp4"), tokens=32, features=128)
    assert {"reference", "carrier"} <= set(found) and all(found.values())


class BrokenWeight(Passes):
    """Passes that quantize another weight."""

    def weight(self, w, policy, **options):
        return super().weight(w * 1.01, policy, **options)


def test_a_wrong_weight_is_found_and_counted() -> None:
    x, dy, w = (jax.random.normal(jax.random.key(i), (32, 128), jnp.float32) for i in range(3))
    x, dy = x.astype(jnp.bfloat16), dy.astype(jnp.bfloat16)
    right = definition(recipe("fp8"), x, dy, w)
    assert differing(recipe("fp8"), XLA, XLA, x, dy, w, right) == 0
    assert differing(recipe("fp8"), XLA, BrokenWeight(), x, dy, w, right) >= 2  # at least both scales


def test_layers_of_a_stack_are_read_as_arrays_are_and_a_wrong_layer_is_found(monkeypatch) -> None:
    x, dy = (jax.random.normal(jax.random.key(i), (32, 128), jnp.bfloat16) for i in range(2))
    passes = FusedPasses(interpret=True)
    assert differing_in_stacks(recipe("nvfp4"), passes, x, dy) == 0
    right = Layer.reshape
    monkeypatch.setattr(Layer, "reshape", lambda a, *shape: Layer(right(a, *shape).stack, jnp.int32(1)))
    assert differing_in_stacks(recipe("nvfp4"), passes, x, dy) > 0
