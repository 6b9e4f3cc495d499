"""Compiling for GPUs that are not here. Oracle: the compiler, which refuses a target it does not understand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from halfbyte.devices import DEVICES, lookup, target_config, topology


@pytest.mark.parametrize("name", ["h200", "gb300"])
def test_target_config_states_the_table(name):
    text = target_config(DEVICES[name])
    for fact in (f"core_count: {DEVICES[name].sms}", f"major: {DEVICES[name].capability[0]}", DEVICES[name].kind):
        assert fact in text


def test_cudnn_is_stated_where_either_compiler_reads_it():
    """JAX 0.10 beside the device's facts, JAX 0.11 among them."""
    facts, rest = target_config(DEVICES["b200"]).split("platform_name")
    assert facts.endswith('\n  dnn_version: "9.15.0"\n}\n')
    assert "dnn_version_info {\n  major: 9\n  minor: 15\n}" in rest


def test_shared_memory_and_threads_go_by_capability():
    """CUDA C++ Programming Guide: 227 KiB a block and 2,048 threads on 9.0 and 10.x, 99 KiB and 1,536 on 12.x."""
    for name, shared, threads in (("h200", 232448, 2048), ("b300", 232448, 2048), ("spark", 101376, 1536)):
        text = target_config(DEVICES[name])
        assert f"optin: {shared}\n" in text and f"threads_per_core_limit: {threads}\n" in text


def test_target_without_a_compiler_is_refused():
    with pytest.raises(ValueError, match="cannot compile for cpu"):
        target_config(DEVICES["cpu"])
    with pytest.raises(ValueError, match="hosts=0"):
        topology(DEVICES["b200"], hosts=0, per_host=4)


@pytest.mark.cuda_compiler
def test_matmul_compiles_for_b200_without_one():
    mesh = Mesh(np.array(topology(DEVICES["b200"], hosts=2, per_host=2).devices).reshape(2, 2), ("fsdp", "tensor"))
    x = jax.ShapeDtypeStruct((256, 128), jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec("fsdp", None)))
    w = jax.ShapeDtypeStruct((128, 512), jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec("fsdp", "tensor")))
    program = jax.jit(jnp.dot).lower(x, w).compile()
    assert "all-gather" in program.as_text()
    # x [128, 128] and w [64, 256] on each device, bf16
    assert program.memory_analysis().argument_size_in_bytes == 2 * (128 * 128 + 64 * 256)


@pytest.mark.cuda_compiler
def test_topology_of_every_gpu_is_found_in_the_table():
    for name in set(DEVICES) - {"cpu"}:
        found = topology(DEVICES[name], hosts=1, per_host=8).devices
        assert len(found) == 8 and lookup(found[0]) is DEVICES[name]
