"""A program for eight GB200, compiled without one, whose figures are known by hand."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiling import BF16, F32, mesh_of, shape
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from overlaps import overlap
from step_traffic import flops_by_kind, traffic

import halfbyte as hb
from halfbyte import devices, ops
from halfbyte.hlo import find_collectives, find_gemms, parse_hlo

pytestmark = pytest.mark.slow


@pytest.mark.cuda_compiler
def test_fsdp_on_eight_gb200_in_four_bits():
    """One linear, [1024, 512] x [512, 1024], tokens and weights over fsdp=8: an eighth of three GEMMs a device, all of
    them native, and one gather of bytes for fprop and dgrad."""
    gb200 = devices.device_by_name("gb200")
    mesh, sizes = mesh_of(np.array(devices.topology(gb200, hosts=2, per_host=4).devices), fsdp=8)
    rows = NamedSharding(mesh, P("fsdp"))
    placement = ops.Placement(mesh, rows.spec, rows.spec, rows.spec)

    def loss(x, w):
        y = hb.qdot(x, w, recipe=hb.recipe("nvfp4"), key=jax.random.key(0), placement=placement)
        return jnp.sum(y.astype(F32) ** 2)

    with ops.compile_for(gb200):
        fn = jax.jit(jax.grad(loss, (0, 1)), out_shardings=(rows, rows))
        lowered = fn.lower(shape(1024, 512, dtype=BF16, sharding=rows), shape(512, 1024, sharding=rows))
    text = lowered.compile().as_text()
    program = parse_hlo(text)
    assert text.count('custom_call_target="__cudnn$blockScaledDot"') == 3
    assert flops_by_kind(find_gemms(program)) == {"block-scaled": 3 * 2 * 1024 * 512 * 1024 // 8}
    moved = {}
    for each in find_collectives(program, sizes):
        assert each.axes == ("fsdp",)
        moved[each.kind] = moved.get(each.kind, 0) + each.array_bytes
        assert each.kind != "all-gather" or set(each.dtypes) == {"u8"}
    elements = 512 * 1024
    assert elements / 2 <= moved["all-gather"] <= 0.6 * elements  # 4 bits an element, and scales
    assert moved["reduce-scatter"] == 4 * elements  # the gradient comes home in shards
    assert re.search(r"s32\[\d*\]\S* all-reduce", text)  # the largest magnitudes of whole tensors are found together
    assert [each.collective for each in overlap(program, sizes)] == find_collectives(program, sizes)
    assert traffic(program)["quantize"].total > 0
