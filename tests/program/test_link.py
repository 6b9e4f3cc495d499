"""Collectives that share a link. Oracle: seconds counted by hand; a GEMM and a gather last one second each."""

import pytest

from halfbyte.program import hidden_on_one_link, hidden_share, overlap, read

GATHER = (
    "(bf16[64,128]{1,0}, bf16[512,128]{1,0}) all-gather-start(%a), replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}"
)
DOT = "bf16[512,512]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
BYTES, FLOPS = 512 * 128 * 2 * 7 / 8, 2 * 512**3


def program(*schedule):
    lines = {
        **{f"g{i}": f"%g{i} = {GATHER}" for i in (1, 2)},
        **{f"d{i}": f"%d{i} = bf16[512,128]{{1,0}} all-gather-done(%g{i})" for i in (1, 2)},
        **{f"dot{i}": f"%dot.{i} = {DOT}" for i in (1, 2)},
    }
    body = "\n".join(f"  {lines[name]}" for name in schedule)
    return read(f"""HloModule jit_step, is_scheduled=true

ENTRY %main (a: bf16[64,128], x: bf16[512,512]) -> bf16[512,512] {{
  %a = bf16[64,128]{{1,0}} parameter(0)
  %x = bf16[512,512]{{1,0}} parameter(1)
{body}
  ROOT %out = bf16[512,512]{{1,0}} copy(%x)
}}
""")


@pytest.mark.parametrize("schedule, alone, together", [
    (["g1", "dot1", "d1", "g2", "dot2", "d2"], 1.0, 1.0),
    (["g1", "g2", "dot1", "dot2", "d1", "d2"], 1.0, 1.0),
    (["g1", "g2", "dot1", "d1", "d2", "dot2"], 1.0, 0.5),  # one GEMM cannot hide two
    (["g1", "g2", "dot1", "d2", "d1", "dot2"], 1.0, 0.5),  # both go on while one is waited for
    (["g1", "d1", "dot1", "g2", "dot2", "d2"], 0.5, 0.5),
])  # fmt: skip
def test_a_gemm_counts_once(schedule, alone, together):
    made = program(*schedule)
    found, rates = overlap(made, {"fsdp": 8}), {"flops_per_second": {"bf16": FLOPS}, "link": BYTES}
    assert hidden_share(found, **rates) == alone
    assert hidden_on_one_link(made, found, **rates) == pytest.approx(together)


def test_nothing_travels():
    assert hidden_on_one_link(program("dot1"), [], flops_per_second={"bf16": 1.0}, link=1.0) == 1.0
