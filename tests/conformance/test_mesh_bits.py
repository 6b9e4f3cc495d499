"""Oracle: the definition on one device. What must be found: a part that does not know where it lies."""

import jax

from halfbyte.conformance import definition, mesh_bits
from halfbyte.recipe import recipe


def test_a_cut_tensor_gives_the_operands_of_one_device(quick_compiles, monkeypatch):
    chosen, devices, made = recipe("nvfp4"), jax.devices("cpu")[:2], []

    def once(*tensors):
        made.extend([] if made else definition(*tensors))
        return made

    monkeypatch.setattr(mesh_bits, "definition", once)
    assert mesh_bits.operands_on_mesh(chosen, devices, features=32) == {"tokens": 0, "features": 0}
    right = mesh_bits.request
    monkeypatch.setattr(mesh_bits, "request", lambda *a, cut: right(*a))  # each part as if it were the whole
    assert all(mesh_bits.operands_on_mesh(chosen, devices, features=32).values())
