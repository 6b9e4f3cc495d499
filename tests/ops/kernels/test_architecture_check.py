"""Kernels for a second GPU architecture are rejected where JAX compiles for one per process. Oracle: the versions of
JAX that were tried (docs/plan.md)."""

import itertools

import jax
import jax.numpy as jnp
import pytest

from halfbyte import kernels as K
from halfbyte.devices import device, lowering_for
from halfbyte.devices.jax_versions import mosaic_keeps_first_architecture
from halfbyte.devices.target import lowering_capability
from halfbyte.kernels import architecture

ROWS = itertools.count(1024, 128)  # JAX traces a kernel of a new shape anew


@pytest.fixture(autouse=True)
def first_kernel_of_a_process(monkeypatch):
    monkeypatch.setattr(architecture, "_first", [])


def trace_gemm(name):
    """Traces our GEMM kernel for the device `name`; nothing is compiled."""
    a, b = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((next(ROWS), 512), (512, 512)))
    with lowering_for(device(name)):
        return jax.eval_shape(lambda a, b: K.matmul(a, b, jnp.float32(1), jnp.float32(1)), a, b)


@pytest.mark.parametrize("name, capability", [("h200", (9, 0)), ("gb300", (10, 3)), ("spark", (12, 1))])
def test_lowering_capability_is_that_of_the_target(name, capability):
    with lowering_for(device(name)):
        assert lowering_capability() == capability


@pytest.mark.parametrize("second", ["b200", "gb300"])
def test_second_architecture_is_rejected_by_jax_that_cannot_compile_it(monkeypatch, second):
    monkeypatch.setattr(architecture, "mosaic_keeps_first_architecture", lambda: True)
    trace_gemm("h200")
    trace_gemm("h100")  # sm_90a as well
    with pytest.raises(RuntimeError, match="kernels for sm_90a: JAX .* Start another process for sm_10.a"):
        trace_gemm(second)


def test_second_architecture_is_traced_by_jax_that_compiles_it(monkeypatch):
    monkeypatch.setattr(architecture, "mosaic_keeps_first_architecture", lambda: False)
    assert trace_gemm("h200").dtype == trace_gemm("gb300").dtype == jnp.bfloat16


@pytest.mark.skipif(not mosaic_keeps_first_architecture(), reason="JAX 0.11 alone keeps the first architecture")
def test_jax_011_is_known_to_keep_the_first_architecture():
    trace_gemm("gb300")
    with pytest.raises(RuntimeError, match="kernels for sm_90a cannot be compiled"):
        trace_gemm("h200")
