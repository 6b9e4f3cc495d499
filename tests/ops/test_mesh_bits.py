"""Operands of a sharded tensor. Oracle: the reference on one device; a shard without its offset must be seen."""

import jax
import pytest

from halfbyte.ops import selftest_operands, selftest_reference_operands
from halfbyte.recipes import recipe


@pytest.mark.slow
def test_sharded_operands_equal_those_of_one_device(quick_compiles, monkeypatch):
    chosen, devices, made = recipe("nvfp4"), jax.devices("cpu")[:2], []

    def once(*tensors):
        made.extend([] if made else selftest_reference_operands(*tensors))
        return made

    monkeypatch.setattr(selftest_operands, "selftest_reference_operands", once)
    assert selftest_operands.mesh_operand_mismatches(chosen, devices, features=32) == {"tokens": 0, "features": 0}
    right = selftest_operands.operand_spec
    monkeypatch.setattr(
        selftest_operands, "operand_spec", lambda *a, cut: right(*a)
    )  # each part as if it were the whole
    assert all(selftest_operands.mesh_operand_mismatches(chosen, devices, features=32).values())
