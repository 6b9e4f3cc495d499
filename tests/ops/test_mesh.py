"""A linear's codes, scales and random bits do not know the mesh: 1x1, 4x1, 2x2, 1x4, and two processes of two devices.

Oracle: the 1x1 mesh, bit for bit, which `test_qdot` ties to the oracle of float64. Results of GEMMs whose contraction
is sharded differ by the order of their sums, so those are compared with the oracle to its tolerance.
"""

import functools
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import mesh_program
import numpy as np
import oracle_linear as oracle
import pytest
from checks import KEY, assert_rounded, matrix
from instruments import quick
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import halfbyte as hb
from halfbyte import ops
from halfbyte.distributed.supervisor import reserved_port


def mesh(shape):
    devices = jax.devices("cpu")[: shape[0] * shape[1]]
    return Mesh(np.array(devices).reshape(shape), mesh_program.AXES)


@functools.cache
def operands(shape, way="parts"):
    return mesh_program.flat(mesh_program.run(mesh(shape), (way,)))


def assert_equal(got, want):
    assert got.keys() == want.keys()
    for name, value in want.items():
        np.testing.assert_array_equal(got[name], value, err_msg=name)


def whole():
    """On one device, without shard_map, under the names of `parts`."""
    return {name.replace("compiler", "parts"): value for name, value in operands((1, 1), "compiler").items()}


@pytest.mark.slow(fast_cases=["2x2"])
@pytest.mark.parametrize("shape", [(1, 1), (4, 1), (2, 2), (1, 4)], ids=lambda s: f"{s[0]}x{s[1]}")
def test_operands_on_any_mesh_equal_those_of_one_device(shape):
    assert_equal(operands(shape), whole())


@pytest.mark.slow
def test_operands_sharded_by_xla_equal_those_of_one_device():
    assert_equal(operands((2, 2), "compiler"), operands((1, 1), "compiler"))


@pytest.mark.slow
def test_shard_without_its_offset_is_found(monkeypatch):
    monkeypatch.setattr("halfbyte.ops.operand.shard_offsets", lambda shape, cut: (0,) * len(shape))
    lost, right = mesh_program.flat(mesh_program.run(mesh((2, 1)), ways=("parts",))), whole()
    wrong = {name for name, value in lost.items() if not np.array_equal(value, right[name])}
    assert wrong == {f"parts {role}.0" for role in ("dgrad_dy", "wgrad_dy")}  # those that round stochastically


def test_amax_is_of_the_whole_tensor():
    """It lies in one corner: a scale of the shard's own would miss it on three devices of four."""
    for role, tensor in mesh_program.TENSOR_OF.items():
        if role not in ("wgrad_x", "wgrad_dy"):  # those see it spread over sixteen tokens
            assert operands((2, 2))[f"parts {role}.2"] == 30, tensor


@pytest.mark.slow
def test_operands_of_two_processes_equal_one_device(tmp_path):
    """fsdp lies over the processes, tensor inside each."""
    out = tmp_path / "operands.npz"
    source = pathlib.Path(hb.__file__).parents[1]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(source)}
    command = [sys.executable, mesh_program.__file__]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with reserved_port() as port:
        ranks = [
            subprocess.Popen([*command, str(rank), str(port), str(out)], env=environment, **pipes) for rank in range(2)
        ]
        try:
            outputs = [rank.communicate(timeout=1800)[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(outputs)
    with np.load(out) as saved:
        assert_equal(dict(saved), whole())


@pytest.mark.slow
def test_qdot_on_fsdp_and_tensor_mesh_equals_oracle():
    """On 2x2: results of the oracle; dw rests where w does; what is kept of w are shards of codes."""
    grid = mesh((2, 2))
    stored = NamedSharding(grid, P("fsdp", "tensor"))
    tokens, outputs = (NamedSharding(grid, spec) for spec in (P("fsdp"), P("fsdp", None, "tensor")))
    recipe, host = hb.recipe("nvfp4"), mesh_program.tensors()
    x, dy = (jnp.asarray(host[name], jnp.bfloat16) for name in ("x", "dy"))
    sharded = jax.device_put((x, host["w"], dy), (tokens, stored, outputs))

    def forward(x, w):
        def linear(x, w):
            placement = ops.Placement(grid, tokens.spec, stored.spec, outputs.spec)
            return hb.qdot(x, w, recipe=recipe, key=KEY, placement=placement)

        return jax.vjp(linear, x, w)

    y, pullback = jax.jit(forward, compiler_options=quick)(*sharded[:2])
    dx, dw = jax.jit(lambda pullback, dy: pullback(dy), compiler_options=quick)(pullback, sharded[2])
    assert y.sharding.is_equivalent_to(outputs, 3) and dw.sharding.is_equivalent_to(stored, 2)
    expected = oracle.linear(matrix(x), host["w"], matrix(dy), recipe, KEY)
    for result, want in zip((y, dx, dw), expected.values(), strict=True):
        assert_rounded(result, want)
    width = mesh_program.WIDTH
    kept = [leaf for leaf in jax.tree.leaves(pullback) if leaf.dtype == jnp.uint8]
    assert (width // 4, width // 2) in [leaf.sharding.shard_shape(leaf.shape) for leaf in kept]  # packed along inputs
