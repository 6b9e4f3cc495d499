"""GEMMs, collectives, overlap and traffic of a GPU program. Oracle: the text of gpu_program.py, counted by hand."""

import pytest
from gpu_program import TEXT
from overlaps import overlap
from step_traffic import Traffic, flops_by_kind, traffic_of_launches

from halfbyte.hlo import (
    HloParseError,
    data_movement_kind,
    find_attention_calls,
    find_collectives,
    find_gemms,
    op_category,
    parse_hlo,
)

EACH = 2 * 64 * 128 * 256
MESH = {"data": 1, "fsdp": 8, "context": 1, "tensor": 1}


@pytest.fixture(scope="module")
def program():
    return parse_hlo(TEXT)


def test_flops_by_kind(program):
    once = dict.fromkeys(("block-scaled", "cublas-f8", "cublas", "mosaic"), EACH)
    assert flops_by_kind(find_gemms(program)) == {**once, "triton": 3 * 2 * EACH}


def test_what_the_hardware_multiplies(program):
    found = {gemm.instruction.name: gemm.format for gemm in find_gemms(program)}
    bf16 = dict.fromkeys(("plain", "own", "gemm_fusion.1", "after"), "bf16")
    assert found == {"fp4": "fp4", "f8": "fp8", **bf16}


@pytest.mark.parametrize(
    "old, new, match",
    [
        ("jit(step)/gemm/mpmd_map", "jit(step)/anonymous/mpmd_map", "own calls a Mosaic kernel without a name"),
        ("%v = f4e2m1fn[256,128]", "%v = f4e2m1fn[256,64]", "fp4: .* is no block-scaled GEMM"),
        ("%own = bf16[64,256]", "%own = bf16[64,255]", "own: .* is no GEMM of two matrices"),
        ('{"known_trip_count":{"n":"3"}}', "{}", "the loop loop .*no known trip count"),
        ('"__cublas$gemm"', '"__cublas$gemm2"', "plain calls '__cublas\\$gemm2'"),
        ("%out = bf16[64,256]{1,0} copy(%own)", "%out = bf16[64,256] convolution(%a, %w)", "out is a convolution"),
    ],
)  # fmt: skip
def test_a_gemm_that_cannot_be_placed_is_an_error(old, new, match):
    assert old in TEXT
    with pytest.raises(HloParseError, match=match):
        find_gemms(parse_hlo(TEXT.replace(old, new)))


def test_collectives(program):
    found = {each.instruction.name: each for each in find_collectives(program, MESH)}
    gather, waiting, scatter = (found[name] for name in ("ag.start", "ag2.start", "rs.start"))
    assert (gather.kind, gather.execution_count, gather.asynchronous) == ("all-gather", 3, True)
    assert (gather.axes, gather.array_bytes_per_call, gather.dtypes) == (("fsdp",), 8 * 64 * 128 * 2, ("bf16",))
    assert not waiting.asynchronous
    assert (scatter.kind, scatter.asynchronous) == ("reduce-scatter", True)
    assert (scatter.array_bytes, scatter.wire_bytes_per_call) == (512 * 64 * 4, 512 * 64 * 4 * 7 / 8)


def test_overlap_counts_what_runs_between_start_and_done(program):
    found = {each.collective.instruction.name: each for each in overlap(program, MESH)}
    assert found["ag.start"].flops == EACH
    assert found["ag2.start"].gemms == ()  # synchronous: the GEMM behind its start does not run beside it
    assert found["rs.start"].flops == 2 * EACH + 3 * 2 * EACH  # two calls, and all of the loop


def test_attention(program):
    (found,) = find_attention_calls(program)
    assert found.flops == 2 * 2 * 2 * 8 * 64 * 64 * 32 // 2  # two products, half of each
    beside = {each.collective.instruction.name: each.attention for each in overlap(program, MESH)}
    assert beside["rs.start"] == (found,) and not beside["ag.start"]
    whole = TEXT.replace("__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward").replace("CAUSAL", "NO_MASK")
    assert find_attention_calls(parse_hlo(whole))[0].flops == 5 * 2 * 2 * 8 * 64 * 64 * 32
    with pytest.raises(HloParseError, match="fmha .* does not say the shape of its scores"):
        find_attention_calls(parse_hlo(TEXT.replace("mask_type", "mask")))


ALONE = """  %alone.start = (bf16[64,128]{1,0}, bf16[64,128]{1,0}) all-gather-start(%a), channel_id=9, replica_groups=GROUPS, dimensions={0}
  %alone.done = bf16[64,128]{1,0} all-gather-done(%alone.start)
  %self = bf16[64,128]{1,0} collective-permute(%a), channel_id=10, source_target_pairs={{0,0},{1,1},{2,2},{3,3},{4,4},{5,5},{6,6},{7,7}}
"""  # noqa: E501


@pytest.mark.parametrize("groups", ["{{0},{1},{2},{3},{4},{5},{6},{7}}", "[8,1]<=[8]", "mesh['axis_0'=8] {}"])
def test_a_group_of_one_device_is_no_collective(groups, program):
    text = TEXT.replace("  %rs.start", ALONE.replace("GROUPS", groups) + "  %rs.start")
    assert len(find_collectives(parse_hlo(text), MESH)) == len(find_collectives(program, MESH)) > 0


def test_traffic(program):
    found = {launch.instruction.name: each for launch, each in traffic_of_launches(program)}
    assert found["row.read"] == Traffic(64 * 4 + 4, 64 * 4, 1)  # one row of four, and its number
    assert found["stack.next"] == Traffic(4 + 64 * 4, 64 * 4, 1)  # the new row alone
    assert found["early.start"] == found["stack.next"] and "early.done" not in found  # as JAX 0.11 compiles it
    assert found["pass"] == Traffic(64 * 128 * 2, 64 * 128 // 2 + 64 * 8, 1)
    assert found["gemm_fusion.1"] == Traffic(3 * 2 * (64 * 128 + 128 * 256), 3 * 2 * 64 * 256, 3)
    assert not {"ag.start", "ag.done", "inner-scatter"} & set(found)


IN_STACKS = """HloModule step, is_scheduled=true

ENTRY %main (g: bf16[2,16,3,16], at: s32[1], stack: bf16[5,2,16,3,16]) -> s32[2,1] {
  %g = bf16[2,16,3,16]{3,2,1,0} parameter(0)
  %at = s32[1]{0} parameter(1)
  %stack = bf16[5,2,16,3,16]{4,3,2,1,0} parameter(2)
  %write = (s32[2,1]{1,0}, bf16[5,2,16,3,16]{4,3,2,1,0}) custom-call(%g, %at, %stack), custom_call_target="__gpu$xla.gpu.triton", output_to_operand_aliasing={{1}: (2, {})}
  %kept = bf16[5,2,16,3,16]{4,3,2,1,0} get-tuple-element(%write), index=1
  ROOT %read = s32[2,1]{1,0} custom-call(%kept, %g, %at), custom_call_target="__gpu$xla.gpu.triton"
}
"""  # noqa: E501


def test_of_a_loop_s_stack_a_kernel_has_one_layer():
    found = {launch.instruction.name: each for launch, each in traffic_of_launches(parse_hlo(IN_STACKS))}
    layer = 2 * 16 * 3 * 16 * 2
    assert found["write"] == Traffic(layer + 4, 8 + layer, 1)  # the stack is written in place, and not read
    assert found["read"] == Traffic(2 * layer + 4, 8, 1)


WITHOUT_TILES = """HloModule step, is_scheduled=true

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %ab = f32[] add(%a, %b)
}

%sliced (s: bf16[5,16,3], i: s32[]) -> bf16[1,16,3] {
  %s = bf16[5,16,3]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %zero = s32[] constant(0)
  ROOT %part = bf16[1,16,3]{2,1,0} dynamic-slice(%s, %next, %zero, %zero), dynamic_slice_sizes={1,16,3}
}

%summed (s: f32[5,16], i: s32[]) -> f32[] {
  %s.1 = f32[5,16]{1,0} parameter(0)
  %i.1 = s32[] parameter(1)
  %zero.1 = s32[] constant(0)
  %row = f32[1,16]{1,0} dynamic-slice(%s.1, %i.1, %zero.1), dynamic_slice_sizes={1,16}
  %none = f32[] constant(0)
  ROOT %total = f32[] reduce(%row, %none), dimensions={0,1}, to_apply=%sum
}

ENTRY %main (stack: bf16[5,16,3], rows: f32[5,16], at: s32[], numbers: s32[1]) -> bf16[48] {
  %stack = bf16[5,16,3]{2,1,0} parameter(0)
  %rows = f32[5,16]{1,0} parameter(1)
  %at = s32[] parameter(2)
  %numbers = s32[1]{0} parameter(3)
  %slice = bf16[1,16,3]{2,1,0} fusion(%stack, %at), kind=kLoop, calls=%sliced
  %top = f32[] fusion(%rows, %at), kind=kInput, calls=%summed
  %flat = bf16[48]{0} bitcast(%slice)
  %gemm = bf16[16,16]{1,0} custom-call(%stack, %rows), custom_call_target="mosaic_gpu_v2"
  ROOT %pass = bf16[48]{0} custom-call(%stack, %flat, %numbers), custom_call_target="mosaic_gpu_v2"
}
"""


def test_of_a_stack_a_kernel_without_tiles_reads_one_layer():
    found = {launch.instruction.name: each for launch, each in traffic_of_launches(parse_hlo(WITHOUT_TILES))}
    layer = 16 * 3 * 2
    assert found["pass"] == Traffic(2 * layer + 4, layer, 1)
    assert found["gemm"] == Traffic(5 * layer + 5 * 16 * 4, 16 * 16 * 2, 1)  # what has tiles reads whole arrays


def test_a_slice_whose_place_is_computed_is_a_move_and_a_sum_of_one_is_not():
    step = parse_hlo(WITHOUT_TILES)
    assert data_movement_kind(step, step.instructions["slice"]) == "slice"
    assert data_movement_kind(step, step.instructions["top"]) is None


@pytest.mark.parametrize(
    "name, expected",
    [
        ("gemm_fusion.1", "gemm"), ("fp4", "gemm"), ("own", "gemm"), ("pass", "quantize"), ("row.read", "quantize"),
        ("ag.start", "communication"), ("ag.done", "communication"), ("stack.next", "other"), ("loop", None),
    ],
)  # fmt: skip
def test_categories(program, name, expected):
    assert op_category(program, program.instructions[name]) == expected


def test_an_unscheduled_program_says_nothing_of_overlap():
    with pytest.raises(HloParseError, match="not scheduled"):
        overlap(parse_hlo(TEXT.replace("is_scheduled=true", "is_scheduled=false")), MESH)
