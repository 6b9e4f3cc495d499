"""Kernels that Mosaic GPU launches compile for GB300, those that write codes and the GEMMs of experts that read them
among them: alone in a process, because Mosaic GPU has one target in each."""

import jax.numpy as jnp
import pytest
from kernel_programs import blackwell_experts, compiled, compiled_choosing, compiled_codes, hidden, shapes, topology_of

pytestmark = pytest.mark.cuda_compiler


def test_codes_compile():
    assert compiled_codes("gb300").count('custom_call_target="mosaic_gpu_v2"') == 3


def test_passes_that_choose_compile():
    compiled_choosing("gb300", ("absolute", "expected"))


def test_swiglu_passes_compile():
    """For Hopper: in the step of bench/test_placement.py."""
    like = shapes(topology_of("gb300"))
    text = compiled(hidden, "gb300", *[like(256, 512)] * 3, like(2, dtype=jnp.uint32))
    assert text.count("__gpu$xla.gpu.triton") >= 5 and "swiglu_backward" in text


def test_experts_are_multiplied_as_codes(tmp_path, monkeypatch):
    blackwell_experts("gb300", "sm_103a", tmp_path, monkeypatch)
