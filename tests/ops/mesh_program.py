"""The operands of a linear, computed on a mesh: the program that `test_mesh` runs on several meshes.

As a script it is one of two processes of two devices each: `mesh_program.py RANK PORT OUT`.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

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


def operands(recipe, key):
    """(x, w, dy) -> role -> codes, scales as bytes, amax, and the random bytes of its key."""
    from halfbyte.formats import random_bytes
    from halfbyte.ops.operand import quantize_operand
    from halfbyte.ops.passes import request
    from halfbyte.recipe import role_key

    def one(role, x):
        axis = -2 if role.startswith("wgrad") or role == "fprop_w" else -1
        wanted = request(recipe, role, key)
        made = quantize_operand(x, wanted.policy, axis=axis, key=wanted.key).codes
        scales = jax.lax.bitcast_convert_type(made.scales, jnp.uint8)
        return made.codes, scales, made.amax, random_bytes(role_key(key, role), x.shape)

    return lambda x, w, dy: {role: one(role, {"x": x, "w": w, "dy": dy}[t]) for role, t in TENSOR_OF.items()}


def run(mesh):
    """{role: [codes, scales, amax, bytes]} on the host, made by the devices of `mesh` from sharded tensors."""
    import halfbyte as hb

    def place(name, value):
        sharding = NamedSharding(mesh, SPECS[name])
        return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])

    arrays = {name: place(name, value) for name, value in tensors().items()}
    x, dy = (jax.jit(lambda a: a.astype(jnp.bfloat16))(arrays[name]) for name in ("x", "dy"))
    made = jax.jit(operands(hb.recipe("nvfp4"), jax.random.key(3)), compiler_options=quick)(x, arrays["w"], dy)
    codes = made["dgrad_dy"][0]
    assert not codes.is_fully_replicated or mesh.size == 1, "not computed in shards"
    whole = jax.jit(lambda tree: tree, out_shardings=NamedSharding(mesh, P()))(made)
    return jax.tree.map(lambda a: np.asarray(a.addressable_data(0)), whole)


def flat(made):
    return {f"{role}.{i}": leaf for role, leaves in made.items() for i, leaf in enumerate(leaves)}


def main(rank, port, out):
    address = f"127.0.0.1:{port}"
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        address, 2, rank, coordinator_bind_address=address, initialization_timeout=60, heartbeat_timeout_seconds=30
    )
    made = run(jax.make_mesh((2, 2), AXES, axis_types=(jax.sharding.AxisType.Auto,) * 2))
    if rank == 0:
        np.savez(out, **flat(made))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
