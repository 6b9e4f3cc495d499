"""How long launches take by a roofline. Oracle: seconds counted by hand."""

import pytest
from gpu_program import TEXT
from test_link import BYTES, FLOPS, program

from halfbyte.program import Roofline, as_profile, costs, launches, read

ROOFLINE = Roofline(gemm={"bf16": FLOPS}, attention=(1e9, 1e9), memory=1e6, link=BYTES, network=BYTES, domain=8)


def test_every_launch_has_its_time():
    found = costs(program("g1", "dot1", "d1"), {"fsdp": 8}, ROOFLINE)
    assert found["dot.1"] == pytest.approx(1e6)  # microseconds
    assert found["g1"] == pytest.approx(1e6, abs=20)  # and what a collective takes at least
    assert found["out"] == pytest.approx(2 * 512 * 512 * 2)  # a copy, read and written at 1 MB/s
    assert found.keys() == {"g1", "dot.1", "out"}
    assert as_profile({"a.1": 2.5}) == 'costs { name: "a.1" cost_us: 2.5 }\n'


@pytest.mark.parametrize("domain, seconds", [(8, 1.0), (4, 8 / 7 / 2 / 4 * 10), (1, 10.0)])
def test_what_leaves_a_domain_takes_the_network(domain, seconds):
    """At a tenth of the link; half of what is gathered over two domains of four leaves each, through four cards."""
    slow = Roofline({"bf16": FLOPS}, (1e9, 1e9), 1e6, link=BYTES, network=BYTES / 10, domain=domain)
    found = costs(program("g1", "dot1", "d1"), {"fsdp": 8}, slow)
    assert found["g1"] == pytest.approx(1e6 * max(seconds, 1.0), abs=50)


def test_a_program_of_every_kind_is_told_whole():
    made = read(TEXT)
    names = {each.instruction.name for each in launches(made)}
    found = costs(made, {"fsdp": 8}, ROOFLINE)
    waits = {name for name in names if made.instructions[name].opcode.endswith("-done")}
    inside = {"inner-scatter"}  # of the async pair that starts it, which is what is scheduled
    assert names - waits - inside <= found.keys() and min(found.values()) >= 2.0
