"""The self-test of native GEMMs. No native unit is here: `reference` takes its place, then a broken one."""

import jax
import pytest

from halfbyte import ops
from halfbyte.conformance import SelfTestFailed, native_gemms_agree
from halfbyte.recipe import recipe


def test_native_self_test_passes_and_fails(monkeypatch):
    """First a backend that agrees, then one whose gradients are all zero."""
    deviations = native_gemms_agree(recipe("nvfp4"), candidate="reference")
    assert set(deviations) == {"fprop", "dgrad", "wgrad"}
    real = ops.qdot

    def broken(x, w, *, backend, **options):
        y = real(x, w, backend="carrier", **options)
        return y if backend == "carrier" else jax.lax.stop_gradient(y) + 0 * y

    monkeypatch.setattr(ops, "qdot", broken)
    with pytest.raises(SelfTestFailed, match=r"dgrad off by 1.*--precision.backend carrier"):
        native_gemms_agree(recipe("nvfp4"), candidate="native")
