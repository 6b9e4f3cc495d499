"""The whole path of llama3.1-405b, without owning one GPU: specs and shardings on 128 devices, and the real train
step compiled for GB300.

Oracle for the program: 9 native FP4 GEMMs a layer (three linears, three directions), plus the two forward GEMMs that
full rematerialization repeats
(gate and up; the output of down is not needed again).
"""

import dataclasses
from importlib.util import find_spec

import jax
import numpy as np
import pytest

from halfbyte import models, ops
from halfbyte.devices import device, topology
from halfbyte.ops.attention import cudnn_version
from halfbyte.program import parse_program, weighted_calls
from halfbyte.runs import run_config
from halfbyte.train import abstract_state, check, lower_train_step, phases, run_mesh
from halfbyte.train.preflight import estimate_memory

LAYERS = 126
needs_plugin = pytest.mark.skipif(
    find_spec("jax_cuda12_plugin") is None, reason="needs the CUDA compiler plugin (extra `plan`), no GPU"
)


@pytest.fixture(scope="module")
def where():
    """(config, device, mesh of 32 hosts x 4 GB300)."""
    config, gb300 = run_config("llama3.1-405b"), device("gb300")
    return config, gb300, run_mesh(config, np.array(topology(gb300, hosts=32, per_host=4).devices))


@needs_plugin
def test_state_and_memory_of_a_device(where):
    config, gb300, mesh = where
    found = check(config, mesh, seq=config.seq, device=gb300, memory=gb300.memory_bytes)
    parameters = models.count_params(config.model)
    assert parameters == 405_853_388_800
    # float32 weights and two moments over 128 devices; norms are replicated, and small.
    assert found.memory.state == pytest.approx(12 * parameters / 128, rel=2e-3)
    assert found.manifests[0].share_4bit == pytest.approx(0.784, abs=5e-4)
    shapes = jax.tree.leaves(abstract_state(config, mesh))
    assert all(leaf.sharding is not None for leaf in shapes)


@needs_plugin
def test_one_device_cannot_hold_it(where):
    config, gb300, _ = where
    alone = run_mesh(dataclasses.replace(config, mesh=""), np.array(topology(gb300, hosts=1, per_host=1).devices))
    with pytest.raises(ValueError, match="GiB a device"):
        check(config, alone, seq=config.seq, device=gb300, memory=gb300.memory_bytes)


@pytest.mark.slow
@needs_plugin
def test_the_train_step_compiles_for_128_gb300(where):
    config, gb300, mesh = where
    assert config.remat == "full"
    with ops.compile_for(gb300), cudnn_version():
        compiled = lower_train_step(config, phases(config)[0].resolved(config), mesh, seq=config.seq).compile()
    program = parse_program(compiled.as_text())
    assert weighted_calls(program, "blockScaledDot") == LAYERS * (9 + 2)
    native = [found for found in program.instructions.values() if "blockScaledDot" in found.target]
    assert all("ops/mlp.py" in found.origin for found in native)  # none in the attention projections
    assert weighted_calls(program, "fmha") >= 2 * LAYERS
    needed = compiled.memory_analysis()
    total = needed.argument_size_in_bytes + needed.temp_size_in_bytes
    assert estimate_memory(config, mesh, seq=config.seq).floor < total < gb300.memory_bytes
    print(
        f"405B on 128 GB300: {needed.argument_size_in_bytes / 2**30:.1f} GiB arguments, {total / 2**30:.1f} GiB in all"
    )
