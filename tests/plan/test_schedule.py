"""A schedule and how long it takes. Oracle: a program written by hand, seconds counted by hand."""

import dataclasses

import pytest

from halfbyte.devices import device_by_name
from halfbyte.hlo import HloParseError, parse_hlo
from halfbyte.plan.cluster_model import COLLECTIVE_LATENCY_S, DeviceRates
from halfbyte.plan.simulator import StepEvent, event_from_json, events_of_program, iter_events, simulate_step
from hlo import condition_of, opening_of

RATES = DeviceRates(
    device_by_name("gb300"), {"bf16": 1e12, "fp8": 2e12, "fp4": 4e12}, memory=1e12, own_kernel_bandwidth=1.5e12
)
LOOP = """\
%add (p: f32[], q: f32[]) -> f32[] {
  %p = f32[] parameter(0)
  %q = f32[] parameter(1)
  ROOT %sum = f32[] add(%p, %q)
}

%body (b: (s32[], bf16[64,128], bf16[512,512])) -> (s32[], bf16[64,128], bf16[512,512]) {
  %b = (s32[], bf16[64,128]{1,0}, bf16[512,512]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%b), index=0
  %a = bf16[64,128]{1,0} get-tuple-element(%b), index=1
  %x = bf16[512,512]{1,0} get-tuple-element(%b), index=2
  %g = (bf16[64,128]{1,0}, bf16[512,128]{1,0}) all-gather-start(%a), replica_groups=[1,8]<=[8], dimensions={0}
  %dot = bf16[512,512]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="dot" stack_frame_id=1}
  %d = bf16[512,128]{1,0} all-gather-done(%g)
  ROOT %t = (s32[], bf16[64,128]{1,0}, bf16[512,512]{1,0}) tuple(%i, %a, %dot)
}

ENTRY %main (a: bf16[64,128], x: bf16[512,512], w: f32[1024]) -> bf16[512,512] {
  %a0 = bf16[64,128]{1,0} parameter(0)
  %x0 = bf16[512,512]{1,0} parameter(1)
  %w = f32[1024]{0} parameter(2)
  %zero = s32[] constant(0)
  %start = (s32[], bf16[64,128]{1,0}, bf16[512,512]{1,0}) tuple(%zero, %a0, %x0)
  %loop = (s32[], bf16[64,128]{1,0}, bf16[512,512]{1,0}) while(%start), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %r = f32[1024]{0} all-reduce(%w), replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add
  ROOT %out = bf16[512,512]{1,0} get-tuple-element(%loop), index=2
}
"""  # noqa: E501
STEP = opening_of("ops/mlp.py", "mlp") + condition_of("(s32[], bf16[64,128]{1,0}, bf16[512,512]{1,0})") + LOOP


def of(text=STEP):
    return events_of_program(parse_hlo(text), {"fsdp": 8}, {"fsdp": (8, 1)})


def test_a_program_becomes_events_with_flops_bytes_and_axes():
    found = list(iter_events(of()))
    assert [(each.what, times) for each, times in found] == [("send", 3), ("gemm", 3), ("wait", 3), ("send", 1)]
    send, gemm, _, reduce = (each for each, _ in found)
    assert (gemm.flops, gemm.moved, gemm.format, gemm.purpose) == (2 * 512**3, 3 * 2 * 512**2, "bf16", "mlp")
    assert (send.format, send.moved, send.axes, send.inner, send.outer) == (
        "all-gather",
        2 * 512 * 128,
        ("fsdp",),
        8,
        1,
    )
    assert send.asynchronous and not reduce.asynchronous
    assert gemm.source == "ops/mlp.py:10:mlp"


def test_events_survive_json():
    import json

    assert tuple(event_from_json(json.loads(json.dumps(dataclasses.asdict(each)))) for each in of()) == of()


@pytest.mark.parametrize("old, new, match", [
    ("ops/mlp.py", "ops/elsewhere.py", "belongs to no linear"),
    (', backend_config={"known_trip_count":{"n":"3"}}', "", "no known trip count"),
    ("is_scheduled=true", "x=1", "not scheduled"),
])  # fmt: skip
def test_what_cannot_be_placed_is_an_error(old, new, match):
    with pytest.raises(HloParseError, match=match):
        of(STEP.replace(old, new))


def gather(name, moved, **more):
    return StepEvent("send", name, "communication", format="all-gather", moved=moved, inner=8, axes=("fsdp",), **more)


def test_seconds_by_hand():
    gemm, pass_ = StepEvent("gemm", "g", "mlp", format="fp4", flops=4e12), StepEvent("pass", "p", "loss", moved=2e12)
    assert simulate_step([gemm, pass_], RATES, queued=False).seconds == pytest.approx(1 + 2)
    assert simulate_step([StepEvent("loop", times=5, body=(gemm,))], RATES, queued=True).seconds == pytest.approx(5)
    assert (
        simulate_step([StepEvent("gemm", "g", "mlp", format="fp4", flops=1.0, moved=1e12)], RATES, queued=False).seconds
        == 1
    )


def test_passes_of_our_kernels_have_a_rate_of_their_own():
    ours, theirs = (StepEvent("pass", "p", "operands", format=format, moved=3e12) for format in ("kernel", ""))
    assert simulate_step([ours], RATES, queued=False).seconds == pytest.approx(2)
    assert simulate_step([theirs], RATES, queued=False).seconds == pytest.approx(3)


def test_arithmetic_follows_the_clock_and_memory_does_not():
    gemm, attend = (
        StepEvent("gemm", "g", format="bf16", flops=3e12),
        StepEvent("attention", "a", format="forward", flops=1e15),
    )
    faster = dataclasses.replace(RATES, gains={"bf16": 2.0, "attention": 2.0})
    for event, ratio in ((gemm, 2), (attend, 2), (StepEvent("pass", "p", moved=3e12), 1)):
        slow, fast = (simulate_step([event], rates, queued=False).seconds for rates in (RATES, faster))
        assert slow == pytest.approx(ratio * fast)


def test_heads_of_half_the_width_attend_slower_on_hopper():
    wide, narrow = (StepEvent("attention", "a", format="forward", flops=1e15, head_dim=dim) for dim in (128, 64))
    rates = dataclasses.replace(RATES, device=device_by_name("h200"))
    assert (
        simulate_step([narrow], rates, queued=False).seconds > 1.2 * simulate_step([wide], rates, queued=False).seconds
    )


@pytest.mark.parametrize("queued, exposed", [(False, 1.0), (True, 0.0)])
def test_links_are_shared_or_queued(queued, exposed):
    """Two gathers of a second each beside a GEMM of a second; the first is waited for before the second GEMM."""
    second = 784e9 * (1 - COLLECTIVE_LATENCY_S["nvlink"])
    gemm = StepEvent("gemm", "g", "mlp", format="fp4", flops=4e12)
    events = [gather("a", second), gather("b", second), gemm, StepEvent("wait", "a"), gemm, StepEvent("wait", "b")]
    found = simulate_step(events, RATES, queued=queued)
    assert found.exposed_communication == pytest.approx(exposed, abs=1e-6)
    assert found.seconds == pytest.approx(2 + exposed, abs=1e-6)
    assert found.link == pytest.approx({"nvlink": 2.0})


def test_every_turn_of_a_loop_waits_for_its_own_collective():
    """Five turns of a gather of two seconds next to a GEMM of one: five seconds in the open, ten on the link."""
    two_seconds = 784e9 * (2 - COLLECTIVE_LATENCY_S["nvlink"])
    gemm = StepEvent("gemm", "g", "mlp", format="fp4", flops=4e12)
    turn = gather("a", two_seconds), gemm, StepEvent("wait", "a")
    found = simulate_step([StepEvent("loop", times=5, body=turn)], RATES, queued=False)
    assert found.exposed_communication == pytest.approx(5, abs=1e-6)
    assert found.seconds == pytest.approx(10, abs=1e-6) and found.link == pytest.approx({"nvlink": 10.0})


def test_a_synchronous_one_is_waited_for_and_a_network_is_slower():
    near, far = gather("a", 784e8, asynchronous=False), gather("a", 784e8, asynchronous=False, outer=16)
    assert simulate_step([near], RATES, queued=False).exposed_communication == pytest.approx(0.1, rel=1e-3)
    # a ring over 128 devices leaves the rack through eight cards of 100 GB/s of which 0.78 are reached
    leaves = 784e8 * 127 / 128 / 8 / 78e9
    assert simulate_step([far], RATES, queued=False).exposed_communication == pytest.approx(
        leaves + 2 * COLLECTIVE_LATENCY_S["network"], rel=1e-6
    )
