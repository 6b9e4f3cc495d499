"""How the 8B step lies on eight H200, compiled without one. Oracle: the model's own FLOPs and bytes."""

import dataclasses

import pytest
from eight_gpus import check, compile_for, config_of, hidden_share, kernels_kept
from overlaps import overlap
from step_placement import reduces_whole

from halfbyte import models, plan
from halfbyte.devices import device_by_name
from halfbyte.hlo import find_collectives, parse_hlo
from halfbyte.models import REMAT_POLICIES
from halfbyte.plan.simulator import StepEvent
from halfbyte.plan.step_placement import REMAT_LINEARS

H200 = device_by_name("h200")
CONFIG = config_of("bf16", batch=16)


def test_needed_flops_are_the_models_and_what_remat_repeats():
    plain = dataclasses.replace(CONFIG, remat="none")
    linears = {
        part: flops for part, flops in models.flops_by_component(CONFIG.model, 8192).items() if part != "attention"
    }
    assert sum(plan.needed_flops(plain).values()) == sum(linears.values()) * 16 * 8192
    tokens, layers = 16 * 8192, CONFIG.model.layers
    again = sum(plan.needed_flops(CONFIG).values()) - sum(plan.needed_flops(plain).values())
    assert again == 2 * layers * 2 * tokens * 4096 * 14336  # the forward GEMMs of gate and up
    assert set(REMAT_LINEARS) == set(REMAT_POLICIES)


@pytest.mark.slow
@pytest.mark.cuda_compiler
@pytest.mark.parametrize("recipe", ["bf16", "nvfp4"])  # fp8: below
def test_a_device_multiplies_gathers_and_hides_what_it_should(recipe):
    config = config_of(recipe, batch=16)
    mesh, compiled = compile_for(H200, config, hosts=1)
    found, _ = check(compiled, config, mesh, H200)
    if recipe == "bf16":
        # Every weight of a layer once for the forward and once for the backward pass; the head once, embedding never.
        layer = models.count_params(config.model) - 2 * 4096 * 128256 - (2 * config.model.layers + 1) * 4096
        tokens = 4 * 16 * 8192  # bytes: whose rows are looked up
        assert found.gathered == {"bf16": 2 * (2 * layer + 4096 * 128256), "s32": tokens}


@pytest.mark.slow
@pytest.mark.cuda_compiler
def test_weights_travel_beside_products_under_tensor_parallelism_too(tmp_path, monkeypatch):
    monkeypatch.setenv("HALFBYTE_CACHE", str(tmp_path))
    config = dataclasses.replace(config_of("fp8", batch=16), mesh="fsdp=4,tensor=2", schedule_by="roofline")
    mesh, compiled = compile_for(H200, config, hosts=1, options=kernels_kept(tmp_path))
    _, program = check(compiled, config, mesh, H200)
    # Sums over `tensor` of the backward pass: of gate's, up's, q's, k's and v's dx, each behind products of wgrad.
    sums = [each for each in overlap(program, dict(mesh.shape)) if scatters_tokens(each.collective)]
    beside = [each for each in sums if each.gemms]
    assert sum(each.collective.execution_count for each in beside) >= 5 * config.model.layers - 5


@pytest.mark.parametrize("order, hidden", [(("send", "gemm", "wait"), 1.0), (("send", "wait", "gemm"), 0.0)])
def test_hidden_share_counts_weights_and_no_tokens(order, hidden):
    gather = {"format": "all-gather", "axes": ("fsdp",), "moved": 1e8, "inner": 8}
    events = {
        "send": StepEvent("send", "weights", **gather),
        "wait": StepEvent("wait", "weights"),
        "gemm": StepEvent("gemm", "dot", format="bf16", flops=1e13),
    }
    tokens = StepEvent("send", "tokens", **(gather | {"axes": ("tensor",), "asynchronous": False}))
    assert hidden_share((*(events[name] for name in order), tokens), H200) == pytest.approx(hidden)


def scatters_tokens(each):
    return each.kind == "reduce-scatter" and each.axes == ("tensor",)


LOSS = """HloModule jit_step, is_scheduled=true

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

ENTRY %main (a: f32[64,128]) -> f32[64,128] {
  %a = f32[64,128]{1,0} parameter(0)
  ROOT %psum = f32[64,128]{1,0} all-reduce(%a), channel_id=1, replica_groups=GROUPS, to_apply=%add
}
"""


@pytest.mark.parametrize("groups, gradient", [
    ("{{0,2,4,6},{1,3,5,7}}", True),
    ("{{0,1},{2,3},{4,5},{6,7}}", False),  # over tensor: the loss, or a layer's partial sums
])  # fmt: skip
def test_a_sum_over_tensor_is_no_gradient(groups, gradient):
    (found,) = find_collectives(parse_hlo(LOSS.replace("GROUPS", groups)), {"fsdp": 4, "tensor": 2})
    assert reduces_whole(found, 64 * 128) == gradient
    assert not reduces_whole(found, 64 * 128 + 1)
