"""What `choose` promises is what a traced program calls: every preset, a grid of shapes, every kind of device.

Oracle: the equations of the traced linear with its gradients. A GEMM that XLA multiplies is two `dot_general`s (one for
the CPU, one for others), an 8-bit one is one, a native one is the block-scaled call, and one of our own kernel is none
of these; passes of ours are kernels by name. Cases with the same recipe and choice are the same program at
another size, and are traced once.
"""

from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from instruments import equations

import halfbyte as hb
from halfbyte import devices, ops
from halfbyte.ops.gemm_problem import GEMMS
from halfbyte.ops.quantize_passes import XLA_PASSES
from halfbyte.recipes import LEAGUE, recipe_names

SHAPES = [(256, 256, 512), (256, 128, 640), (128, 384, 1376), (64, 96, 64)]
DEVICES = ["cpu", "h200", "b200", "gb300"]
DOTS = {"emulated": 2, "reference": 1, "fp8": 1, "fused": 0, "native": 0}
KERNELS = ("pallas_call", "mpmd_map")  # of tiles, and of one program for all widths
NATIVE = ("ffi_call", "scaled_matmul_wrapper")  # our own call of cuDNN's GEMM, and JAX's


def promised(name, shape, device):
    problem = ops.LinearProblem(hb.recipe(name), *shape, device=devices.device_by_name(device))
    return None if problem.block_mismatch_reason() else ops.choose_backend("auto", problem)


def called(name, shape, device):
    """primitive, and name of a kernel -> how often."""
    tokens, inputs, outputs = shape
    x = jax.ShapeDtypeStruct((tokens, inputs), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((inputs, outputs), jnp.float32)

    def loss(x, w, key):
        return jnp.sum(hb.qdot(x, w, recipe=hb.recipe(name), key=key).astype(jnp.float32) ** 2)

    with ops.compile_for(devices.device_by_name(device)):
        traced = jax.make_jaxpr(jax.grad(loss, (0, 1)))(x, w, jax.random.key(0))
    found = Counter()
    for equation, _ in equations(traced.jaxpr):
        found[equation.primitive.name] += 1
        if equation.primitive.name in KERNELS:
            found[str(equation.params.get("name") or equation.params["name_and_src_info"]).split()[0]] += 1
    return found


# Of the league one for each way to be served: as codes by a native GEMM, with drawn scales, by the reference.
TRACED = set(recipe_names()) - {made.name for made in LEAGUE} | {"nvfp4_4over6_sr", "quartet2", "tetrajet2"}


@pytest.mark.slow(fast_cases=["mxfp8", "mxfp8_floor"])
@pytest.mark.parametrize("name", sorted(TRACED))
def test_traced_program_calls_chosen_backend(name):
    cases = [(shape, device, promised(name, shape, device)) for shape in SHAPES for device in DEVICES]
    cases = {choice: (shape, device) for shape, device, choice in reversed(cases) if choice is not None}
    assert cases
    for choice, (shape, device) in cases.items():
        found = called(name, shape, device)
        multipliers = [choice.gemm_backend(gemm).name for gemm in GEMMS]
        assert found["dot_general"] == sum(DOTS[m] for m in multipliers), (shape, device, choice, found)
        own = choice.name == "native" and choice.passes is not XLA_PASSES
        for call, count in zip(NATIVE, (own, not own), strict=True):
            assert found[call] == count * multipliers.count("native"), (shape, device, choice, found)
        kernels = sum(found[primitive] for primitive in KERNELS)
        assert (kernels > 0) == (choice.passes.name != "xla"), (shape, device, choice, found)
        weights = [call for call in found if call.startswith("quantize_weight")]  # in tiles, or along an axis
        assert bool(weights) == (choice.weight_passes == "fused"), (shape, device, choice, found)


def test_grid_of_problems_meets_every_backend():
    choices = [promised(name, shape, d) for name in recipe_names() for shape in SHAPES for d in DEVICES]
    assert {c.name for c in choices if c} >= {"native", "fp8", "fused", "emulated"}
    assert any(c.name == "fused" and c.gemm_backend(GEMMS[1]).name == "emulated" for c in choices if c)
