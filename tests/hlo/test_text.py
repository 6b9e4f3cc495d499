"""Reading a module's text. Oracle: a text written by hand, in the forms that XLA prints."""

import pytest

from halfbyte.hlo import HloArray, HloParseError, SourceLine, execution_counts, find_gemms, parse_hlo

TEXT = """HloModule jit_step, is_scheduled=true, entry_computation_layout={(f32[8]{0})->f32[8]{0}}

FileNames
1 "/somewhere/lib/halfbyte/ops/norm.py"
2 "/somewhere/jax/core.py"

FunctionNames
1 "rms_norm"
2 "bind"

FileLocations
1 {file_name_id=1 function_name_id=1 line=10 end_line=10 column=4 end_column=9}
2 {file_name_id=2 function_name_id=2 line=77 end_line=77 column=4 end_column=9}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}


%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p = (s32[], /*index=1*/f32[8]{0:T(256)}) parameter(0)
  %x = f32[8]{0} get-tuple-element(%p), index=1
  %i = s32[] get-tuple-element(%p), index=0
  %sine = f32[8]{0} sine(%x), metadata={op_name="jit(step)/while/body/sin" stack_frame_id=2}
  ROOT %t = (s32[], f32[8]{0}) tuple(%i, %sine)
}

%condition (q: (s32[], f32[8])) -> pred[] {
  %q = (s32[], f32[8]{0}) parameter(0)
  ROOT %less = pred[] constant(true)
}

ENTRY %main (a: f32[8], b: f4e2m1fn[3,5]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  %b = f4e2m1fn[3,5]{1,0:E(4)} parameter(1)
  %large = f32[2,2]{1,0} constant({
    { 1, 2 },
    { 3, 4 }
  }), metadata={op_name="table"}
  %zero = s32[] constant(0)
  %start = (s32[], f32[8]{0}) tuple(%zero, %a)
  %loop = (s32[], f32[8]{0}) while(%start), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"7"}}
  ROOT %kernel = f32[8]{0} custom-call(f32[8]{0} %a, %b), custom_call_target="triton_kernel_call", metadata={op_name="jit(step)/k" source_file="/x/halfbyte/formats/qtensor.py" source_line=12}, backend_config={name = "a ) b", calls=%nothing}
}
"""  # noqa: E501


@pytest.fixture(scope="module")
def program():
    return parse_hlo(TEXT)


def test_computations_and_their_order(program):
    assert program.entry == "main" and program.scheduled
    assert list(program.computations) == ["body", "condition", "main"]
    names = "a b large zero start loop kernel".split()
    assert [found.name for found in program.computations["main"]] == names


def test_types_operands_and_calls(program):
    loop, kernel = program.instructions["loop"], program.instructions["kernel"]
    assert loop.results == (HloArray("s32", ()), HloArray("f32", (8,)))
    assert (loop.opcode, loop.operands, loop.known_trip_count) == ("while", ("start",), 7)
    assert set(loop.called_computations) == {"condition", "body"}
    assert (kernel.custom_call_target, kernel.operands) == ("triton_kernel_call", ("a", "b"))
    assert kernel.called_computations == () and kernel.root
    assert program.operand_arrays(kernel) == [HloArray("f32", (8,)), HloArray("f4e2m1fn", (3, 5))]
    assert program.instructions["b"].results[0].bytes == 8  # 15 elements of 4 bits


def test_sources_are_the_innermost_line_of_ours(program):
    assert program.instructions["sine"].source == SourceLine("ops/norm.py", 10, "rms_norm")
    assert program.instructions["kernel"].source == SourceLine("formats/qtensor.py", 12)
    assert "jit(step)/while/body/sin" in program.instructions["sine"].origin


def test_a_loop_is_walked_as_often_as_it_turns(program):
    found = {launch.instruction.name: launch for launch in execution_counts(program)}
    assert set(found) == {"sine", "kernel"}
    assert (found["sine"].execution_count, found["kernel"].execution_count) == (7, 1)


@pytest.mark.parametrize(
    "old, new, match",
    [
        ('"known_trip_count":{"n":"7"}', '"n":0', "the loop loop .*no known trip count"),
        ("f4e2m1fn[3,5]{1,0:E(4)}", "f5e1m2[3,5]{1,0}", "unknown element type 'f5e1m2'"),
        ("ENTRY %main", "%main", "no ENTRY computation"),
        ("body=%body,", "", "has no body"),
    ],
)
def test_what_cannot_be_read_is_an_error(old, new, match):
    with pytest.raises(HloParseError, match=match):
        list(execution_counts(parse_hlo(TEXT.replace(old, new))))


def test_turns_that_nobody_knows_matter_only_around_what_is_counted():
    unknown = parse_hlo(TEXT.replace('"known_trip_count":{"n":"7"}', '"n":0'))
    assert find_gemms(unknown) == []
    found = [launch.instruction.name for launch in execution_counts(unknown, matters=lambda part: part.opcode == "dot")]
    assert found == ["kernel"]


@pytest.mark.parametrize("sides", ["branch_computations={%one, %two}", "true_computation=%one, false_computation=%two"])
def test_a_branch_is_an_error_if_both_sides_do_something(sides):
    branch = f"  %b2 = f32[8]{{0}} conditional(%less2, %a, %a), {sides}\n"
    head, body = (
        "%{0} (p{0}: f32[8]) -> f32[8] {{\n",
        "  %p{0} = f32[8] parameter(0)\n  ROOT %r{0} = f32[8] {1}\n}}\n\n",
    )
    side = head + body
    lazy = side.format("one", "bitcast(%pone)") + side.format("two", "sine(%ptwo)")
    busy = side.format("one", "cosine(%pone)") + side.format("two", "sine(%ptwo)")
    text = TEXT.replace("  %zero = s32[]", branch + "  %zero = s32[]")
    found = {launch.instruction.name for launch in execution_counts(parse_hlo(text.replace("ENTRY", lazy + "ENTRY")))}
    assert "rtwo" in found
    both = parse_hlo(text.replace("ENTRY", busy + "ENTRY"))
    with pytest.raises(HloParseError, match="the branch b2 .*either of 2"):
        list(execution_counts(both))
    found = {
        launch.instruction.name
        for launch in execution_counts(both, branches=lambda _, found: found.called_computations[:1])
    }
    assert "rone" in found and "rtwo" not in found
