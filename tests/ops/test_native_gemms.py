"""The self-test of native GEMMs. No native unit is here: `reference` takes its place, then a broken one."""

import jax
import jax.numpy as jnp
import pytest

from halfbyte import ops
from halfbyte.ops import (
    SelfTestFailed,
    compare_native_gemms,
    compare_native_grouped_gemms,
    compare_native_linears,
    selftest_gemms,
)
from halfbyte.recipes import recipe


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compiles")
def test_native_self_test_passes_and_fails(monkeypatch):
    """First a backend that agrees, then one whose gradients are all zero."""
    deviations = compare_native_gemms(recipe("nvfp4"), candidate="reference")
    assert set(deviations) == {"fprop", "dgrad", "wgrad"}
    real = ops.qdot

    def broken(x, w, *, backend, **options):
        y = real(x, w, backend="emulated", **options)
        return y if backend == "emulated" else jax.lax.stop_gradient(y) + 0 * y

    monkeypatch.setattr(selftest_gemms, "qdot", broken)
    with pytest.raises(SelfTestFailed, match=r"dgrad off by 1.*nothing else is used.*--precision.backend emulated"):
        compare_native_gemms(recipe("nvfp4"), candidate="native")


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compiles")
def test_experts_are_compared_with_a_loop_of_carriers(monkeypatch):
    """On a GPU with a grouped kernel that one, here XLA's loop of tiles; then one that moves a row to another expert,
    and one that gives NaN."""
    how = {"sides": (32, 48), "counts": (5, 0, 33)}
    assert set(compare_native_grouped_gemms(recipe("nvfp4"), **how)) == {"fprop", "dgrad", "wgrad"}
    real = ops.grouped_qdot

    def broken(fault):
        def run(x, w, groups, *, backend, **options):
            return real(*(x, w, groups) if backend == "emulated" else fault(x, w, groups), backend=backend, **options)

        return run

    faults = {
        r"dgrad off by \S+, fprop off by \S+, wgrad off by": lambda x, w, groups: (
            x,
            w,
            groups + jnp.array([1, 0, -1], jnp.int32),
        ),
        "fprop off by inf": lambda x, w, groups: (x.at[3, 3].set(jnp.nan), w, groups),
    }
    for match, fault in faults.items():
        monkeypatch.setattr(selftest_gemms, "grouped_qdot", broken(fault))
        with pytest.raises(SelfTestFailed, match=f"of experts .* at gate .*{match}.*--precision.backend emulated"):
            compare_native_grouped_gemms(recipe("nvfp4"), site="gate", **how)


def test_linears_are_compared_at_their_own_sizes_once_each_and_named(monkeypatch):
    asked = []

    def agree(recipe, *, sizes, site):
        asked.append((sizes, site))
        if site.endswith("down"):
            raise SelfTestFailed(f"at {site}")
        return {"fprop": 0.0, "dgrad": 0.0, "wgrad": 0.0}

    monkeypatch.setattr(selftest_gemms, "compare_native_gemms", agree)
    nvfp4 = recipe("nvfp4")
    sites = [(f"layers/mlp/{name}", nvfp4, (65536, 512, 1024)) for name in ("gate", "up")]
    assert set(compare_native_linears(sites)) == {"layers/mlp/gate", "layers/mlp/up"}
    assert asked == [((4096, 512, 1024), "layers/mlp/gate")]
    with pytest.raises(SelfTestFailed, match="layers/mlp/down"):
        compare_native_linears([*sites, ("layers/mlp/down", nvfp4, (256, 1024, 512))])
