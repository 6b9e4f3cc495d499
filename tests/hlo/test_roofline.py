"""How long launches take by a roofline. Oracle: seconds counted by hand; a GEMM and a gather last one second each."""

import dataclasses

import pytest
from gpu_program import TEXT

from halfbyte.hlo import Roofline, execution_counts, instruction_costs_us, parse_hlo, to_profile_proto

START = (
    "(bf16[64,128]{1,0}, bf16[512,128]{1,0}) all-gather-start(%a), replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}"
)
DOT = "bf16[512,512]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
BYTES, FLOPS = 512 * 128 * 2 * 7 / 8, 2 * 512**3


def program(*schedule):
    lines = {
        **{f"g{i}": f"%g{i} = {START}" for i in (1, 2)},
        **{f"d{i}": f"%d{i} = bf16[512,128]{{1,0}} all-gather-done(%g{i})" for i in (1, 2)},
        **{f"dot{i}": f"%dot.{i} = {DOT}" for i in (1, 2)},
    }
    body = "\n".join(f"  {lines[name]}" for name in schedule)
    return parse_hlo(f"""HloModule jit_step, is_scheduled=true

ENTRY %main (a: bf16[64,128], x: bf16[512,512]) -> bf16[512,512] {{
  %a = bf16[64,128]{{1,0}} parameter(0)
  %x = bf16[512,512]{{1,0}} parameter(1)
{body}
  ROOT %out = bf16[512,512]{{1,0}} copy(%x)
}}
""")


ROOFLINE = Roofline(
    gemm={"bf16": FLOPS},
    attention=(1e9, 1e9),
    memory=1e6,
    nvlink_bandwidth=BYTES,
    network_bandwidth=BYTES,
    nvlink_domain_size=8,
)


def test_every_launch_has_its_time():
    found = instruction_costs_us(program("g1", "dot1", "d1"), {"fsdp": 8}, ROOFLINE)
    assert found["dot.1"] == pytest.approx(1e6)  # microseconds
    assert found["g1"] == pytest.approx(1e6, abs=20)  # and what a collective takes at least
    assert found["out"] == pytest.approx(2 * 512 * 512 * 2)  # a copy, read and written at 1 MB/s
    assert found.keys() == {"g1", "dot.1", "out"}
    assert to_profile_proto({"a.1": 2.5}) == 'costs { name: "a.1" cost_us: 2.5 }\n'


@pytest.mark.parametrize("domain, seconds", [(8, 1.0), (4, 10 / 4), (1, 10.0)])
def test_what_leaves_a_domain_takes_the_network(domain, seconds):
    """At a tenth of the link; what a ring over two domains of four carries leaves each through four cards."""
    slow = Roofline(
        {"bf16": FLOPS},
        (1e9, 1e9),
        1e6,
        nvlink_bandwidth=BYTES,
        network_bandwidth=BYTES / 10,
        nvlink_domain_size=domain,
    )
    found = instruction_costs_us(program("g1", "dot1", "d1"), {"fsdp": 8}, slow)
    assert found["g1"] == pytest.approx(1e6 * max(seconds, 1.0), abs=50)


def test_all_to_all_sends_own_rows_through_own_card():
    """64 x 128 bf16 per device, two domains of four: half of the rows, 8 KB, take one second of a card of 8 KB/s."""
    rows = "bf16[64,128]{1,0} all-to-all(%a), replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}"
    made = parse_hlo(f"""HloModule jit_step, is_scheduled=true

ENTRY %main (a: bf16[64,128]) -> bf16[64,128] {{
  %a = bf16[64,128]{{1,0}} parameter(0)
  ROOT %swap = {rows}
}}
""")
    slow = dataclasses.replace(ROOFLINE, network_bandwidth=64 * 128 * 2 / 2, nvlink_domain_size=4)
    assert instruction_costs_us(made, {"expert": 8}, slow)["swap"] == pytest.approx(1e6, abs=50)


@pytest.mark.parametrize("mesh, seconds", [({"data": 2, "fsdp": 8}, 1.0), ({"data": 8, "fsdp": 2}, 7 / 16)])
def test_group_over_an_outer_axis_leaves_the_domain(mesh, seconds):
    """16 devices, domains of 8. Copies of `data` are a domain apart where `fsdp` fills it: of an all-reduce of 16 KB a
    pair sends 16 KB each, one second of its card. Where `fsdp` has 2, a domain holds 4 of 8 copies, whose 4 cards
    share what a ring of 8 sends over a link, 2 x 7/8 of 16 KB."""
    groups = {2: "[8,2]<=[2,8]T(1,0)", 8: "[2,8]<=[8,2]T(1,0)"}[mesh["data"]]
    made = parse_hlo(f"""HloModule jit_step, is_scheduled=true

%add (p: bf16[], q: bf16[]) -> bf16[] {{
  %p = bf16[] parameter(0)
  %q = bf16[] parameter(1)
  ROOT %sum = bf16[] add(%p, %q)
}}

ENTRY %main (a: bf16[64,128]) -> bf16[64,128] {{
  %a = bf16[64,128]{{1,0}} parameter(0)
  ROOT %sum.1 = bf16[64,128]{{1,0}} all-reduce(%a), replica_groups={groups}, to_apply=%add
}}
""")
    slow = dataclasses.replace(ROOFLINE, nvlink_bandwidth=1e9, network_bandwidth=64 * 128 * 2)
    assert instruction_costs_us(made, mesh, slow)["sum.1"] == pytest.approx(1e6 * seconds, abs=50)


PAIRS = "replica_groups={{0,1},{2,3},{4,5},{6,7}}"
SCATTER = f"bf16[64,128]{{1,0}} reduce-scatter(%b), {PAIRS}, dimensions={{0}}, to_apply=%add"
GATHER = "bf16[256,128]{1,0} all-gather(%a), replica_groups={{0,2,4,6},{1,3,5,7}}, dimensions={0}"

GATHER_OF_TWO = "bf16[128,128]{1,0} all-gather(%a), replica_groups={{0,2},{1,3},{4,6},{5,7}}, dimensions={0}"
GRADIENT = "bf16[64,128]{1,0} all-reduce(%a), replica_groups={{0,4},{1,5},{2,6},{3,7}}, to_apply=%add"


def test_weights_have_the_link_after_what_a_layer_waits_for():
    """A sum over `tensor` takes one second, a gather over `fsdp` three; where both travel, it comes a second later."""

    def gather(*schedule, data=1):
        body = "\n".join(f"  %{name} = {text}" for name, text in schedule)
        made = parse_hlo(f"""HloModule jit_step, is_scheduled=true

%add (p: bf16[], q: bf16[]) -> bf16[] {{
  %p = bf16[] parameter(0)
  %q = bf16[] parameter(1)
  ROOT %sum = bf16[] add(%p, %q)
}}

ENTRY %main (a: bf16[64,128], b: bf16[128,128]) -> bf16[64,128] {{
  %a = bf16[64,128]{{1,0}} parameter(0)
  %b = bf16[128,128]{{1,0}} parameter(1)
{body}
  ROOT %out = bf16[64,128]{{1,0}} copy(%a)
}}
""")
        link = 64 * 128 * 2  # what a device sends of the sum; of the gather three times as much
        return instruction_costs_us(
            made,
            {"data": data, "fsdp": 4 // data, "tensor": 2},
            Roofline({"bf16": 1.0}, (1.0, 1.0), 1e6, link, link, 8),
        )

    alone, beside = gather(("g", GATHER)), gather(("s", SCATTER), ("g", GATHER))
    assert alone["g"] == pytest.approx(3e6, abs=20) and beside["s"] == pytest.approx(1e6, abs=20)
    assert beside["g"] == pytest.approx(4e6, abs=40)
    # What goes over `data` as well is no weight.
    assert gather(("s", SCATTER), ("g", GATHER), data=2)["g"] == pytest.approx(3e6, abs=20)
    # A gather over half as many takes one second; a turn in which gradients travel over `data` leaves it at that.
    pair, gradient = GATHER_OF_TWO, ("r", GRADIENT)
    assert gather(("s", SCATTER), ("g", pair), data=2)["g"] == pytest.approx(2e6, abs=40)
    assert gather(("s", SCATTER), ("g", pair), gradient, data=2)["g"] == pytest.approx(1e6, abs=20)


def test_gradients_scattered_in_their_own_turn_have_the_rest_of_it():
    """A scatter takes one second, a gather two. Where this turn has made what is scattered, it is told to take three,
    as its linear's two neighbours travel too, and the gather to be there when both are; a scatter of what the turn
    before has handed on leaves both as they are, and so do one outside of loops, one beside a loop, and more than a
    layer has: microbatches."""
    over, turns = "replica_groups={{0,1}}", 'backend_config={"known_trip_count":{"n":"4"}}'

    def times(scattered, beside=""):
        made = parse_hlo(f"""HloModule jit_step, is_scheduled=true

%add (p: bf16[], q: bf16[]) -> bf16[] {{
  %p = bf16[] parameter(0)
  %q = bf16[] parameter(1)
  ROOT %sum = bf16[] add(%p, %q)
}}

%inner (d: (s32[])) -> (s32[]) {{
  ROOT %d = (s32[]) parameter(0)
}}

%goes (e: (s32[])) -> pred[] {{
  %e = (s32[]) parameter(0)
  ROOT %on = pred[] constant(true)
}}

%body (b: (bf16[128,128], bf16[128,128])) -> (bf16[128,128], bf16[128,128]) {{
  %b = (bf16[128,128]{{1,0}}, bf16[128,128]{{1,0}}) parameter(0)
  %w = bf16[128,128]{{1,0}} get-tuple-element(%b), index=0
  %last = bf16[128,128]{{1,0}} get-tuple-element(%b), index=1
  %g = bf16[256,128]{{1,0}} all-gather(%w), {over}, dimensions={{0}}
  %made = bf16[128,128]{{1,0}} negate(%w)
  %beside = bf16[128,128]{{1,0}} copy(%last)
  %handed = bf16[128,128]{{1,0}} bitcast(%beside)
  %s = bf16[64,128]{{1,0}} reduce-scatter(%{scattered}), {over}, dimensions={{0}}, to_apply=%add
{beside}
  ROOT %next = (bf16[128,128]{{1,0}}, bf16[128,128]{{1,0}}) tuple(%w, %made)
}}

%condition (c: (bf16[128,128], bf16[128,128])) -> pred[] {{
  %c = (bf16[128,128]{{1,0}}, bf16[128,128]{{1,0}}) parameter(0)
  ROOT %go = pred[] constant(true)
}}

ENTRY %main (a: bf16[128,128]) -> bf16[128,128] {{
  %a = bf16[128,128]{{1,0}} parameter(0)
  %begin = (bf16[128,128]{{1,0}}, bf16[128,128]{{1,0}}) tuple(%a, %a)
  %loop = (bf16[128,128], bf16[128,128]) while(%begin), condition=%condition, body=%body, {turns}
  %again = bf16[128,128]{{1,0}} negate(%a)
  %late = bf16[64,128]{{1,0}} reduce-scatter(%again), {over}, dimensions={{0}}, to_apply=%add
  ROOT %out = bf16[128,128]{{1,0}} get-tuple-element(%loop), index=0
}}
""")
        link = 64 * 128 * 2
        found = instruction_costs_us(made, {"fsdp": 2}, Roofline({"bf16": 1.0}, (1.0, 1.0), 1e6, link, link, 8))
        return [round(found[name] / 1e6, 3) for name in ("s", "g", "late")]

    assert times("made") == [3.0, 3.0, 1.0]
    assert times("handed") == [1.0, 2.0, 1.0]
    count = "%zero = s32[] constant(0)\n  %count = (s32[]) tuple(%zero)\n"
    assert times("made", f"  {count}  %l = (s32[]) while(%count), condition=%goes, body=%inner, {turns}") == [1, 2, 1]
    more = f"bf16[64,128] reduce-scatter(%made), {over}, dimensions={{0}}, to_apply=%add"
    scatters = [f"  %s{n} = {more}" for n in range(7)]
    assert times("made", "\n".join(scatters[:6])) == [3.0, 9.0, 1.0]
    assert times("made", "\n".join(scatters)) == [1.0, 2.0, 1.0]


def test_a_program_of_every_kind_is_told_whole():
    made = parse_hlo(TEXT)
    names = {each.instruction.name for each in execution_counts(made)}
    found = instruction_costs_us(made, {"fsdp": 8}, ROOFLINE)
    waits = {name for name in names if made.instructions[name].opcode.endswith("-done")}
    inside = {"inner-scatter"}  # of the async pair that starts it, which is what is scheduled
    assert names - waits - inside <= found.keys() and min(found.values()) >= 2.0
