"""Oracles: a program written by hand, intervals counted by hand, and a real trace of this machine."""

import ctypes
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from halfbyte.hlo import op_category, parse_hlo
from halfbyte.hlo.trace_breakdown import (
    EventClassifier,
    TraceEvent,
    device_events,
    merge_intervals,
    step_time_breakdown,
    time_fractions,
)
from halfbyte.train import ProfileCapture, ProfileConfig

PROGRAM = """HloModule jit_step, is_scheduled=true

FileNames
1 "/a/halfbyte/ops/attention.py"
2 "/a/halfbyte/formats/quantization.py"
3 "/a/jax/core.py"
4 "/a/halfbyte/models/llama.py"
5 "/a/halfbyte/ops/operand.py"

FunctionNames
1 "f"
2 "attention_block"
3 "round_to_bfloat16"
4 "quantize_operand"

FileLocations
1 {file_name_id=1 function_name_id=1 line=10}
2 {file_name_id=2 function_name_id=1 line=10}
3 {file_name_id=3 function_name_id=1 line=10}
4 {file_name_id=4 function_name_id=2 line=10}
5 {file_name_id=5 function_name_id=3 line=10}
6 {file_name_id=5 function_name_id=4 line=10}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=3 parent_frame_id=5}
4 {file_location_id=2 parent_frame_id=1}
5 {file_location_id=4 parent_frame_id=1}
6 {file_location_id=5 parent_frame_id=1}
7 {file_location_id=6 parent_frame_id=1}

%fused (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %round = f32[8]{0} floor(%p), metadata={op_name="jit(step)/floor" stack_frame_id=2}
}

%fused.dot (q: f32[8,8]) -> f32[8,8] {
  %q = f32[8,8]{1,0} parameter(0)
  ROOT %dot.7 = f32[8,8]{1,0} dot(%q, %q), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  %fusion.1 = f32[8]{0} fusion(%a), kind=kLoop, calls=%fused
  %fusion.2 = f32[8,8]{1,0} fusion(%a), kind=kOutput, calls=%fused.dot
  %scores = f32[8,8]{1,0} dot(%a, %a), metadata={op_name="jit(step)/dot" stack_frame_id=1}
  %norm = f32[8]{0} multiply(%a, %a), metadata={op_name="jit(step)/mul" stack_frame_id=5}
  %cast = bf16[8]{0} convert(%a), metadata={op_name="jit(step)/convert_element_type" stack_frame_id=6}
  %codes = u8[8]{0} convert(%a), metadata={op_name="jit(step)/convert_element_type" stack_frame_id=7}
  %gemm.3 = (f32[8,8]{1,0}, s8[4]{0}) custom-call(%a), custom_call_target="__cudnn$blockScaledDot"
  %rms = f32[8]{0} custom-call(%a), custom_call_target="mosaic_gpu", metadata={op_name="jit(f)/rms_norm/mpmd_map"}
  %tops = f32[8]{0} custom-call(%a), custom_call_target="mosaic_gpu", metadata={op_name="f/rms_norm_maxima/mpmd_map"}
  %ar = f32[8]{0} all-reduce-start(%a), to_apply=%fused
  %loop = f32[8]{0} while(%a), condition=%fused, body=%fused
  ROOT %add.9 = f32[8]{0} add(%a, %a)
}
"""


@pytest.mark.parametrize(
    "name, expected",
    [
        ("fusion.1", "quantize"),
        ("fusion.2", "gemm"),
        ("scores", "attention"),
        ("norm", "other"),  # the model's attention_block is norms and linears too
        ("cast", "other"),  # a bf16 linear's weight is not quantized
        ("codes", "quantize"),
        ("gemm.3", "gemm"),
        ("rms", "other"),
        ("tops", "quantize"),  # operands are made by them
        ("ar", "communication"),
        ("loop", None),
        ("add.9", "other"),
    ],
)
def test_categories(name, expected):
    program = parse_hlo(PROGRAM)
    assert op_category(program, program.instructions[name]) == expected


@pytest.mark.parametrize(
    "instruction, kernel, expected",
    [
        ("fusion.1", "loop_floor_fusion", "quantize"),  # as a trace names it
        ("", "fusion_2", "gemm"),  # a kernel in a CUDA graph is named after its instruction
        ("loop", "fusion_1", "quantize"),
        ("", "nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_NTN", "gemm"),
        ("", "cudnn_generated_fort_native_sdpa_sm90_flash_fprop", "attention"),
        ("", "ncclDevKernel_AllGather_RING_LL", "communication"),
        ("", "quantize_rows_columns_hadamard", "quantize"),
        ("", "splitKreduce_kernel", "gemm"),
        ("", "MemcpyD2D", "other"),
        ("loop", "loop", None),
    ],
)
def test_events_are_placed_by_instruction_then_by_kernel(instruction, kernel, expected):
    assert EventClassifier(parse_hlo(PROGRAM))(TraceEvent(instruction, kernel, 0.0, 1.0)) == expected


@pytest.mark.parametrize("module, expected", [("jit_step", "quantize"), ("jit_other", "other"), ("", "quantize")])
def test_another_modules_instruction_of_the_same_name_is_not_this_programs(module, expected):
    event = TraceEvent("fusion.1", "loop_floor_fusion", 0.0, 1.0, module=module)
    assert EventClassifier(parse_hlo(PROGRAM))(event) == expected


def test_merge():
    assert merge_intervals([(3, 4), (0, 2), (1, 2.5)]) == [(0, 2.5), (3, 4)]


def test_hidden_communication_is_not_counted_twice():
    found = time_fractions({"gemm": [(0, 4)], "communication": [(3, 6)], "other": [(8, 9)]}, (0, 10))
    assert found == pytest.approx(
        {"gemm": 0.4, "quantize": 0.0, "attention": 0.0, "other": 0.1, "communication": 0.2, "idle": 0.3}
    )


@pytest.mark.slow
def test_a_real_trace_counts_matmuls_and_products_as_what_they_are(tmp_path):
    """Which takes longer is the machine's: the oracle is how long the trace says that each has run."""
    said = []
    step = jax.jit(lambda x: x @ x / 300.0).lower(jnp.ones((300, 300))).compile()
    capture = ProfileCapture(ProfileConfig("xprof", 2, 3), tmp_path, say=said.append)
    x = jnp.ones((300, 300))
    for number in range(1, 5):
        capture.before_step(number, x)
        x = step(x)
        capture.after_step(number, x, step.as_text)
    trace = next(tmp_path.rglob("*.xplane.pb"))
    (events,) = device_events(trace).values()
    product = re.search(r"ENTRY.*ROOT %(\S+) = ", step.as_text(), re.S)[1]  # the last instruction
    seconds = {"gemm": 0.0, "other": 0.0}
    for event in events:
        seconds["other" if event.instruction == product else "gemm"] += event.stop - event.start
    whole = max(event.stop for event in events) - min(event.start for event in events)
    assert seconds["gemm"] > 0 and seconds["other"] > 0
    assert {name: capture.shares[name] * whole for name in seconds} == pytest.approx(seconds)
    assert sum(capture.shares.values()) == pytest.approx(1.0, abs=1e-6)
    assert "gemm" in said[-1]
    assert step_time_breakdown(trace, step.as_text()) == capture.shares


def test_a_program_that_cannot_be_read_is_said_and_ends_nothing(tmp_path):
    said = []
    capture = ProfileCapture(ProfileConfig("xprof", 1, 1), tmp_path, say=said.append)
    capture.before_step(1, None)
    capture.after_step(1, jax.jit(jnp.sin)(jnp.ones(8)), lambda: "HloModule nothing")
    assert capture.shares == {} and "no breakdown of step time: the text holds no ENTRY" in said[-1]


def test_a_captured_program_has_no_cuda_graphs(tmp_path):
    on, off = (ProfileCapture(ProfileConfig(how), tmp_path, say=print) for how in ("xprof", "off"))
    assert on.compiler_options == {"xla_gpu_enable_command_buffer": ""} and off.compiler_options == {}


GPU_TRACE = """
planes {
  name: "/device:GPU:0"
  event_metadata { key: 1 value { id: 1 name: "nvjet_sm90_tst_128x256" } }
  event_metadata { key: 2 value { id: 2 name: "loop_floor_fusion" } }
  event_metadata { key: 3 value { id: 3 name: "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma" } }
  event_metadata { key: 4 value { id: 4 name: "jit_step" } }
  stat_metadata { key: 1 value { id: 1 name: "hlo_op" } }
  lines {
    name: "Stream #7(Compute)"
    events { metadata_id: 1 offset_ps: 0 duration_ps: 4000000 stats { metadata_id: 1 str_value: "gemm.3" } }
    events { metadata_id: 2 offset_ps: 4000000 duration_ps: 1000000 stats { metadata_id: 1 str_value: "fusion.1" } }
    events { metadata_id: 3 offset_ps: 5000000 duration_ps: 3000000 }
    events { metadata_id: 1 offset_ps: 9000000 duration_ps: 1000000 stats { metadata_id: 1 str_value: "gemm.3" } }
  }
  lines {
    name: "XLA Modules"
    events { metadata_id: 4 offset_ps: 0 duration_ps: 20000000 stats { metadata_id: 1 str_value: "loop" } }
  }
}
planes {
  name: "/host:CPU"
  event_metadata { key: 1 value { id: 1 name: "enqueue" } }
  lines { name: "python" events { metadata_id: 1 offset_ps: 0 duration_ps: 90000000 } }
}
"""


def test_a_trace_of_a_gpu_is_read_from_its_streams(tmp_path):
    """10 us of one stream: 5 of GEMM, 1 of quantize, 3 of attention, 1 idle; lines that repeat them do not count."""
    trace = tmp_path / "gpu.xplane.pb"
    trace.write_bytes(jax.profiler.ProfileData.text_proto_to_serialized_xspace(GPU_TRACE))
    found = step_time_breakdown(trace, PROGRAM)
    assert found == pytest.approx(
        {"gemm": 0.5, "quantize": 0.1, "attention": 0.3, "other": 0.0, "communication": 0.0, "idle": 0.1}
    )


def test_a_range_that_never_comes_is_said_and_one_that_is_cut_short_ends(tmp_path, monkeypatch):
    called, said = [], []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda *_, **__: called.append("start"))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: called.append("stop"))
    for steps in (range(1, 4), range(5, 7), range(7, 9)):
        capture = ProfileCapture(ProfileConfig("xprof", 5, 7), tmp_path, say=said.append)
        for step in steps:
            capture.before_step(step, 0)
            capture.after_step(step, 0, str)
        capture.finish(steps[-1], 0, str)
    assert called == ["start", "stop"]
    assert [line.partition(" in ")[0].partition(":")[0] for line in said] == [
        "NOTHING WAS CAPTURED", "trace of steps 5 to 6", "NOTHING WAS CAPTURED",
    ]  # fmt: skip
    assert "ended at step 3 and did not run step 5" in said[0]


def test_profile_range_is_checked():
    with pytest.raises(ValueError, match="profile_start 5 and profile_stop 3"):
        ProfileConfig("xprof", 5, 3)


REFUSED = [
    "NOTHING IS CAPTURED: cudaProfilerStart failed with 5, disabled",
    "the captured range has no end: cudaProfilerStop failed with 5, disabled",
]


@pytest.mark.parametrize("code, told", [(0, []), (5, REFUSED)])
def test_what_cuda_refuses_is_said(code, told, tmp_path, monkeypatch):
    def text(number):
        return b"disabled"

    calls = {name: lambda: code for name in ("cudaProfilerStart", "cudaProfilerStop")}
    runtime = SimpleNamespace(**calls, cudaGetErrorString=text)
    monkeypatch.setattr(ctypes, "CDLL", lambda library: runtime)
    said = []
    capture = ProfileCapture(ProfileConfig("nsys", 1, 1), tmp_path, say=said.append)
    capture.before_step(1, None)
    capture.after_step(1, None, lambda: "")
    assert said[1:] == told  # behind the command to record with
