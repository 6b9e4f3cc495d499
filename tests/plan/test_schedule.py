"""A schedule and how long it takes. Oracle: a program written by hand, seconds counted by hand."""

import dataclasses

import pytest
from hlo import condition_of, opening_of

from halfbyte.devices import device
from halfbyte.plan.rates import LATENCY, Rates
from halfbyte.plan.schedule import Event, from_json, schedule, walk
from halfbyte.plan.simulate import simulate
from halfbyte.program import Unreadable, read

RATES = Rates(device("gb300"), {"bf16": 1e12, "fp8": 2e12, "fp4": 4e12}, memory=1e12, kernels=1.5e12)
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
    return schedule(read(text), {"fsdp": 8}, {"fsdp": (8, 1)})


def test_a_program_becomes_events_with_flops_bytes_and_axes():
    found = list(walk(of()))
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

    assert tuple(from_json(json.loads(json.dumps(dataclasses.asdict(each)))) for each in of()) == of()


@pytest.mark.parametrize("old, new, match", [
    ("ops/mlp.py", "ops/elsewhere.py", "belongs to no linear"),
    (', backend_config={"known_trip_count":{"n":"3"}}', "", "no known trip count"),
    ("is_scheduled=true", "x=1", "not scheduled"),
])  # fmt: skip
def test_what_cannot_be_placed_is_an_error(old, new, match):
    with pytest.raises(Unreadable, match=match):
        of(STEP.replace(old, new))


def gather(name, moved, **more):
    return Event("send", name, "communication", format="all-gather", moved=moved, inner=8, axes=("fsdp",), **more)


def test_seconds_by_hand():
    gemm, pass_ = Event("gemm", "g", "mlp", format="fp4", flops=4e12), Event("pass", "p", "loss", moved=2e12)
    assert simulate([gemm, pass_], RATES, queued=False).seconds == pytest.approx(1 + 2)
    assert simulate([Event("loop", times=5, body=(gemm,))], RATES, queued=True).seconds == pytest.approx(5)
    assert simulate([Event("gemm", "g", "mlp", format="fp4", flops=1.0, moved=1e12)], RATES, queued=False).seconds == 1


def test_passes_of_our_kernels_have_a_rate_of_their_own():
    ours, theirs = (Event("pass", "p", "operands", format=format, moved=3e12) for format in ("kernel", ""))
    assert simulate([ours], RATES, queued=False).seconds == pytest.approx(2)
    assert simulate([theirs], RATES, queued=False).seconds == pytest.approx(3)


def test_arithmetic_follows_the_clock_and_memory_does_not():
    gemm, attend = Event("gemm", "g", format="bf16", flops=3e12), Event("attention", "a", format="forward", flops=1e15)
    faster = dataclasses.replace(RATES, gains={"bf16": 2.0, "attention": 2.0})
    for event, ratio in ((gemm, 2), (attend, 2), (Event("pass", "p", moved=3e12), 1)):
        slow, fast = (simulate([event], rates, queued=False).seconds for rates in (RATES, faster))
        assert slow == pytest.approx(ratio * fast)


def test_heads_of_half_the_width_attend_slower_on_hopper():
    wide, narrow = (Event("attention", "a", format="forward", flops=1e15, head_dim=dim) for dim in (128, 64))
    rates = dataclasses.replace(RATES, device=device("h200"))
    assert simulate([narrow], rates, queued=False).seconds > 1.2 * simulate([wide], rates, queued=False).seconds


@pytest.mark.parametrize("queued, exposed", [(False, 1.0), (True, 0.0)])
def test_links_are_shared_or_queued(queued, exposed):
    """Two gathers of a second each beside a GEMM of a second; the first is waited for before the second GEMM."""
    second = 784e9 * (1 - LATENCY["nvlink"])
    gemm = Event("gemm", "g", "mlp", format="fp4", flops=4e12)
    events = [gather("a", second), gather("b", second), gemm, Event("wait", "a"), gemm, Event("wait", "b")]
    found = simulate(events, RATES, queued=queued)
    assert found.exposed == pytest.approx(exposed, abs=1e-6)
    assert found.seconds == pytest.approx(2 + exposed, abs=1e-6)
    assert found.link == pytest.approx({"nvlink": 2.0})


def test_a_synchronous_one_is_waited_for_and_a_network_is_slower():
    near, far = gather("a", 784e8, asynchronous=False), gather("a", 784e8, asynchronous=False, outer=16)
    assert simulate([near], RATES, queued=False).exposed == pytest.approx(0.1, rel=1e-3)
    # fifteen sixteenths of it leave the rack, through eight cards of 100 GB/s of which 0.78 are reached
    leaves = 784e8 * 15 / 16 / 8 / 78e9
    assert simulate([far], RATES, queued=False).exposed == pytest.approx(leaves + 2 * LATENCY["network"], rel=1e-6)
