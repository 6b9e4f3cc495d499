"""Programs compiled here, whose figures are known by hand: for the CPU and, without a GPU, for an H200."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiling import BF16, mesh_of, shape
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from step_traffic import Traffic, traffic

from halfbyte import devices, ops
from halfbyte.hlo import HloParseError, find_collectives, find_gemms, op_category, parse_hlo


def compiled(fn, *arguments):
    return parse_hlo(jax.jit(fn).lower(*arguments).compile().as_text())


def nested(x, w):
    """3 turns of (a product and 5 turns of a product), then one product more."""

    def inner(y, _):
        return jnp.sin(y @ w), None

    def outer(y, _):
        return lax.scan(inner, jnp.cos(y @ w), None, length=5)[0], None

    return lax.scan(outer, x, None, length=3)[0] @ w


@pytest.mark.slow
def test_flops_of_nested_loops_on_the_cpu():
    program = compiled(nested, shape(32, 64), shape(64, 64))
    assert sum(gemm.flops for gemm in find_gemms(program)) == (3 * (1 + 5) + 1) * 2 * 32 * 64 * 64


def test_a_batched_product_contracts_what_it_says():
    program = compiled(lambda a, b: jnp.einsum("bmk,bkn->bmn", a, b), shape(3, 32, 64), shape(3, 64, 128))
    (gemm,) = find_gemms(program)
    assert (gemm.k, gemm.flops, gemm.execution_count) == (64, 2 * 3 * 32 * 64 * 128, 1)


def test_a_loop_of_unknown_length_is_an_error():
    def some(x, w, n):
        return lax.fori_loop(0, n, lambda _, y: jnp.sin(y @ w), x)

    program = compiled(some, shape(32, 64), shape(64, 64), shape(dtype=jnp.int32))
    with pytest.raises(HloParseError, match="no known trip count"):
        find_gemms(program)


def test_a_call_that_nobody_knows_is_an_error():
    text = jax.jit(lambda x: jnp.sin(x)).lower(shape(8)).compile().as_text()
    strange = '  %strange = f32[8]{0} custom-call(), custom_call_target="their_gemm"\n  ROOT'
    with pytest.raises(HloParseError, match="their_gemm.*say in halfbyte/hlo/gemm_ops.py whether it multiplies"):
        find_gemms(parse_hlo(text[: text.index("ENTRY")] + text[text.index("ENTRY") :].replace("  ROOT", strange, 1)))


def cpu_mesh(**sizes):
    return mesh_of(np.array(jax.devices("cpu")[:8]), **sizes)


def test_collectives_have_bytes_and_axes():
    """W is split over fsdp and gathered: 64 x 128 float32. The product over the split k is summed over tensor."""
    mesh, sizes = cpu_mesh(fsdp=4, tensor=2)
    place = functools.partial(NamedSharding, mesh)

    def fn(x, w, v):
        w = lax.with_sharding_constraint(w, place(P(None, None)))
        y = lax.with_sharding_constraint(x @ w, place(P("fsdp", None)))
        return y, lax.with_sharding_constraint(x.T @ v, place(P(None, None)))

    arguments = (
        shape(32, 64, sharding=place(P("fsdp", None))),
        shape(64, 128, sharding=place(P("fsdp", None))),
        shape(32, 16, sharding=place(P("fsdp", None))),
    )
    found = {(each.kind, each.axes): each for each in find_collectives(compiled(fn, *arguments), sizes)}
    gather, reduce = found["all-gather", ("fsdp",)], found["all-reduce", ("fsdp",)]
    assert (gather.group_size, gather.array_bytes, gather.wire_bytes_per_call) == (
        4,
        64 * 128 * 4,
        64 * 128 * 4 * 3 / 4,
    )
    assert (reduce.group_size, reduce.array_bytes, reduce.wire_bytes_per_call) == (
        4,
        64 * 16 * 4,
        2 * 64 * 16 * 4 * 3 / 4,
    )


@pytest.mark.slow
def test_a_collective_in_a_loop_counts_its_turns():
    mesh, sizes = cpu_mesh(data=2, tensor=4)

    def fn(x):
        def turn(y, _):
            return lax.psum(jnp.sin(y), ("data", "tensor")) * 0.1, None

        return lax.scan(turn, x, None, length=6)[0]

    fn = jax.shard_map(fn, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    found = find_collectives(compiled(fn, shape(128)), sizes)
    assert [(each.axes, each.group_size) for each in found] == [(("data", "tensor"), 8)] * len(found)
    assert sum(each.array_bytes for each in found) == 6 * 128 * 4


def test_elementwise_traffic_is_operands_and_results():
    program = compiled(lambda a, b: jnp.sin(a) + b, shape(1000), shape(1000))
    assert traffic(program) == {"other": Traffic(8000, 4000, 1)}


def test_of_a_stack_the_slices_are_moved():
    """Each of 16 turns reads a row of 512 float32 and writes one; the stacks themselves are not copied."""
    program = compiled(lambda xs: lax.scan(lambda c, x: (c, jnp.sin(x)), 0, xs)[1], shape(16, 512))
    total = sum((each for each in traffic(program).values()), Traffic())
    rows = 2 * 16 * 512 * 4
    assert rows <= total.total <= 1.6 * rows  # beside them the counter, and the result's first zeros
    assert total.total < 16 * 512 * 4 * 16


@pytest.mark.cuda_compiler
def test_flops_on_an_h200_with_a_peeled_or_whole_loop():
    target = devices.topology(devices.device_by_name("h200"), hosts=1, per_host=1)
    mesh, _ = mesh_of(np.array(target.devices))
    place = NamedSharding(mesh, P())
    arguments = shape(512, 1024, dtype=BF16, sharding=place), shape(1024, 1024, dtype=BF16, sharding=place)
    with ops.compile_for(devices.device_by_name("h200")):
        program = compiled(nested, *arguments)
    assert sum(gemm.flops for gemm in find_gemms(program)) == 19 * 2 * 512 * 1024 * 1024
    assert {op_category(program, gemm.instruction) for gemm in find_gemms(program)} == {"gemm"}
