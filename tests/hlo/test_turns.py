"""Loops whose turns XLA has forgotten, and what else a step that accumulates or has a context axis holds. Oracle:
turns, FLOPs, bytes and axes counted by hand.
"""

import pytest

from halfbyte.hlo import HloParseError, execution_counts, find_collectives, find_gemms, instruction_bytes, parse_hlo

STEP = """HloModule jit_step, is_scheduled=true

%less (l0: s32[]) -> pred[] {
  %l0 = s32[] parameter(0)
  %limit = s32[] constant(LIMIT)
  ROOT %compare = pred[] compare(%l0, %limit), direction=DIRECTION
}

%more (m0: s32[]) -> s32[] {
  %m0 = s32[] parameter(0)
  %by = s32[] constant(BY)
  ROOT %sum = s32[] add(%m0, %by)
}

%dus (u0: f32[8,64], u1: s32[], u2: f32[64]) -> f32[8,64] {
  %u0 = f32[8,64]{1,0} parameter(0)
  %u1 = s32[] parameter(1)
  %u2 = f32[64]{0} parameter(2)
  %none = s32[] constant(0)
  %row = f32[1,64]{1,0} bitcast(%u2)
  ROOT %put = f32[8,64]{1,0} dynamic-update-slice(%u0, %row, %u1, %none)
}

%body (b: (f32[8,64], s32[], bf16[32,32], f32[64])) -> (f32[8,64], s32[], bf16[32,32], f32[64]) {
  %b = (f32[8,64]{1,0}, s32[], bf16[32,32]{1,0}, f32[64]{0}) parameter(0)
  %stack = f32[8,64]{1,0} get-tuple-element(%b), index=0
  %i = s32[] get-tuple-element(%b), index=1
  %x = bf16[32,32]{1,0} get-tuple-element(%b), index=2
  %v = f32[64]{0} get-tuple-element(%b), index=3
  %copied = s32[] copy(%i)
  %send = (bf16[32,32]{1,0}, bf16[32,32]{1,0}) collective-permute-start(%x), channel_id=1, source_target_pairs={{0,3},{1,2},{2,1},{3,0},{4,7},{5,6},{6,5},{7,4}}
  %dot = bf16[32,32]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %sent = bf16[32,32]{1,0} collective-permute-done(%send)
  %kept = f32[8,64]{1,0} fusion(%stack, %i, %v), kind=kLoop, calls=%dus
  %next = s32[] fusion(%copied), kind=kLoop, calls=%more
  ROOT %out = (f32[8,64]{1,0}, s32[], bf16[32,32]{1,0}, f32[64]{0}) tuple(%kept, %next, %dot, %v)
}

%condition (c: (f32[8,64], s32[], bf16[32,32], f32[64])) -> pred[] {
  %c = (f32[8,64]{1,0}, s32[], bf16[32,32]{1,0}, f32[64]{0}) parameter(0)
  %at = s32[] get-tuple-element(%c), index=1
  ROOT %go = pred[] fusion(%at), kind=kLoop, calls=%less
}

ENTRY %main (s: f32[8,64], x: bf16[32,32], v: f32[64]) -> f32[8,64] {
  %s = f32[8,64]{1,0} parameter(0)
  %a = bf16[32,32]{1,0} parameter(1)
  %w = f32[64]{0} parameter(2)
  %first = s32[] constant(START)
  %begin = s32[] copy(%first)
  %start = (f32[8,64]{1,0}, s32[], bf16[32,32]{1,0}, f32[64]{0}) tuple(%s, %begin, %a, %w)
  %loop = (f32[8,64]{1,0}, s32[], bf16[32,32]{1,0}, f32[64]{0}) while(%start), condition=%condition, body=%body, backend_config={"known_induction_variable":{"tuple_index":"1"}}
  ROOT %end = f32[8,64]{1,0} get-tuple-element(%loop), index=0
}
"""  # noqa: E501
MESH = {"data": 1, "fsdp": 2, "context": 4, "tensor": 1}


def step(start=0, limit=3, by=1, direction="LT", text=STEP):
    for name, value in {"START": start, "LIMIT": limit, "BY": by, "DIRECTION": direction}.items():
        text = text.replace(f"({name})", f"({value})").replace(f"={name}", f"={value}")
    return parse_hlo(text)


@pytest.mark.parametrize(
    "start, limit, by, direction, turns",
    [(0, 3, 1, "LT", 3), (1, 4, 1, "LT", 3), (0, 4, 1, "LE", 5), (0, 7, 2, "LT", 4), (5, 3, 1, "LT", 0)],
)  # fmt: skip
def test_turns_are_those_of_the_counter(start, limit, by, direction, turns):
    (gemm,) = find_gemms(step(start, limit, by, direction))
    assert (gemm.execution_count, gemm.flops) == (turns, turns * 2 * 32**3)


@pytest.mark.parametrize(
    "changed", [{"by": 0}, {"by": -1}, {"direction": "GT"}, {"direction": "NE"}, {"limit": "{ 1, 2 }"}]
)
def test_a_loop_without_a_counter_that_can_be_followed_is_an_error(changed):
    with pytest.raises(HloParseError, match="no known trip count"):
        list(execution_counts(step(**changed)))


def test_a_stated_count_comes_first():
    stated = STEP.replace('"known_induction', '"known_trip_count":{"n":"9"},"known_induction')
    (gemm,) = find_gemms(parse_hlo(stated))
    assert gemm.execution_count == 9


def test_a_permutation_within_an_axis_is_along_it():
    (sent,) = find_collectives(step(), MESH)
    assert (sent.axes, sent.execution_count, sent.asynchronous, sent.wire_bytes_per_call) == (
        ("context",),
        3,
        True,
        2 * 32 * 32,
    )
    (crossing,) = find_collectives(step(), {"data": 1, "fsdp": 4, "context": 2, "tensor": 1})
    assert crossing.axes == ("fsdp", "context")


def test_what_is_updated_in_place_moves_its_part():
    program = step()
    assert instruction_bytes(program, program.instructions["kept"]) == (4 * 64 + 4, 4 * 64)


def test_trip_count_of_a_condition_that_adds_to_the_counter():
    """The loop ends when i + 2 < 7 is false: five iterations from 0."""
    text = STEP.replace("compare(%l0, %limit)", "compare(%ahead, %limit)").replace(
        "  %limit = s32[]", "  %two = s32[] constant(2)\n  %ahead = s32[] add(%l0, %two)\n  %limit = s32[]"
    )
    (gemm,) = find_gemms(step(limit=7, text=text))
    assert gemm.execution_count == 5


def test_array_written_into_itself_is_read_whole():
    """The update is the array itself: what is written in place is also read."""
    text = STEP.replace("dynamic-update-slice(%u0, %row, %u1, %none)", "dynamic-update-slice(%u0, %u0, %u1, %none)")
    program = step(text=text)
    read, _ = instruction_bytes(program, program.instructions["kept"])
    assert read >= 8 * 64 * 4
