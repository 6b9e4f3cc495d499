"""The operands of a linear, computed on a mesh: the program that `test_mesh` runs on several meshes.

As a script it is one of two processes of two devices each: `mesh_program.py RANK PORT OUT`.
"""

import sys
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import halfbyte as hb
from halfbyte.formats import random_bytes
from halfbyte.ops import linear_sharding
from halfbyte.ops.operand import quantize_operand
from halfbyte.ops.quantize_passes import operand_spec
from halfbyte.recipes import role_key

BATCH, SEQ, WIDTH = 4, 16, 64
AXES = ("fsdp", "tensor")
SPECS = {"x": P("fsdp", None, "tensor"), "w": P("fsdp", "tensor"), "dy": P("fsdp", None, "tensor")}
TENSOR_OF = {"fprop_x": "x", "wgrad_x": "x", "fprop_w": "w", "dgrad_w": "w", "dgrad_dy": "dy", "wgrad_dy": "dy"}
quick = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def tensors():
    """x, w, dy; the largest magnitude of each lies in one corner, so that one shard alone has seen it."""
    rng = np.random.default_rng(9)
    shapes = {"x": (BATCH, SEQ, WIDTH), "w": (WIDTH, WIDTH), "dy": (BATCH, SEQ, WIDTH)}
    made = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    for tensor in made.values():
        tensor[(-1,) * tensor.ndim] = 30
    return made


def within(shape, cut):
    """Where a part lies in the whole, as random_bytes is told; nothing for a whole tensor."""
    return (
        {"offset": linear_sharding.shard_offsets(shape, cut), "global_shape": linear_sharding.global_shape(shape, cut)}
        if cut
        else {}
    )


def operands(recipe, key, cuts=MappingProxyType({})):
    """(x, w, dy) -> role -> codes, scales as bytes, amax, and the random bytes of its key; of local parts by `cuts`."""

    def one(role, x, cut):
        axis = -2 if role.startswith("wgrad") or role == "fprop_w" else -1
        wanted = operand_spec(recipe, role, key)
        made = quantize_operand(x, wanted.policy, axis=axis, key=wanted.key, cut=cut).codes
        scales = jax.lax.bitcast_convert_type(made.scales, jnp.uint8)
        return made.codes, scales, made.amax, random_bytes(role_key(key, role), x.shape, **within(x.shape, cut))

    def all_of(x, w, dy):
        tensor = {"x": x, "w": w, "dy": dy}
        return {role: one(role, tensor[name], cuts.get(name, ())) for role, name in TENSOR_OF.items()}

    return all_of


def in_parts(mesh, recipe, key):
    """`operands` as linears make them: inside shard_map, of local parts that know where they lie."""
    whole = {role: (SPECS[name], SPECS[name], P(), SPECS[name]) for role, name in TENSOR_OF.items()}
    cuts = {name: linear_sharding.dim_axes_of_spec(spec, len(spec)) for name, spec in SPECS.items()}
    local = operands(recipe, key, cuts)
    return jax.shard_map(local, mesh=mesh, in_specs=tuple(SPECS.values()), out_specs=whole, check_vma=False)


def run(mesh, ways=("compiler", "parts")):
    """{way: {role: [codes, scales, amax, bytes]}} on the host, made by the devices of `mesh` from sharded tensors: cut
    by the compiler, and into parts by shard_map.
    """
    recipe, key = hb.recipe("nvfp4"), jax.random.key(3)

    def place(name, value):
        sharding = NamedSharding(mesh, SPECS[name])
        return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])

    def make(x, w, dy):
        given = x.astype(jnp.bfloat16), w, dy.astype(jnp.bfloat16)
        by = {"compiler": operands(recipe, key), "parts": in_parts(mesh, recipe, key)}
        return {way: by[way](*given) for way in ways}

    arrays = [place(name, value) for name, value in tensors().items()]
    made = jax.jit(make, compiler_options=quick)(*arrays)
    for each in made.values():
        assert not each["dgrad_dy"][0].is_fully_replicated or mesh.size == 1, "not computed in shards"
    whole = jax.jit(lambda tree: tree, out_shardings=NamedSharding(mesh, P()))(made)
    return jax.tree.map(lambda a: np.asarray(a.addressable_data(0)), whole)


def flat(made):
    return {
        f"{way} {role}.{i}": leaf
        for way, roles in made.items()
        for role, leaves in roles.items()
        for i, leaf in enumerate(leaves)
    }


def main(rank, port, out):
    address = f"127.0.0.1:{port}"
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        address, 2, rank, coordinator_bind_address=address, initialization_timeout=600, heartbeat_timeout_seconds=600
    )
    made = run(jax.make_mesh((2, 2), AXES, axis_types=(jax.sharding.AxisType.Auto,) * 2), ways=("parts",))
    if rank == 0:
        np.savez(out, **flat(made))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
