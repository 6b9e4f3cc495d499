"""What is kept of a compiled step, and its memory by category. Oracle: bytes counted by hand, calls of the compiler."""

import dataclasses
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

import halfbyte.plan.compiled_step  # noqa: F401 (the module is changed below)
from halfbyte.devices import device_by_name
from halfbyte.hlo import parse_hlo
from halfbyte.plan import evaluate_plan, make_cluster, place_run, problems, profile_from_config, profile_step
from halfbyte.plan.analytic_step import analytic_memory, fp4_calls, planned_gemms
from halfbyte.plan.compiled_step import _memory, report_compile_progress
from halfbyte.plan.plan_outcome import plan_remarks
from halfbyte.plan.simulator import StepEvent
from halfbyte.train.run_presets import run_config
from hlo import OPENING, condition_of

MODULE = sys.modules["halfbyte.plan.compiled_step"]
LOOP = """\
%body (b: (s32[], bf16[4,64,8], f32[4,8,8])) -> (s32[], bf16[4,64,8], f32[4,8,8]) {
  ROOT %b = (s32[], bf16[4,64,8]{2,1,0}, f32[4,8,8]{2,1,0}) parameter(0)
}

ENTRY %main (w: f32[4,8,8], k: bf16[4,64,8]) -> f32[4,8,8] {
  %w = f32[4,8,8]{2,1,0} parameter(0)
  %zero = s32[] constant(0)
  %empty = bf16[4,64,8]{2,1,0} custom-call(), custom_call_target="AllocateBuffer"
  %scratch = (f32[8], s8[100]{0}) custom-call(%w), custom_call_target="__cublas$gemm"
  %start = (s32[], bf16[4,64,8]{2,1,0}, f32[4,8,8]{2,1,0}) tuple(%zero, %empty, %w)
  %loop = (s32[], bf16[4,64,8]{2,1,0}, f32[4,8,8]{2,1,0}) while(%start), condition=%condition, body=%body
  ROOT %out = f32[4,8,8]{2,1,0} get-tuple-element(%loop), index=2
}
"""
STEP = OPENING + condition_of("(s32[], bf16[4,64,8]{2,1,0}, f32[4,8,8]{2,1,0})") + LOOP


def silent(_):
    pass


@pytest.fixture
def eight():
    on = make_cluster(device_by_name("gb200"), 8)
    return place_run(run_config("llama3-8b"), on)[0], on


def test_memory_by_category_adds_up(eight):
    weights = 4 * 8 * 8 * 4
    config = dataclasses.replace(eight[0], model=dataclasses.replace(eight[0].model, layers=4))
    parts = _memory(3 * weights + 10_000, parse_hlo(STEP), config, weights=weights, state=3 * weights)
    assert sum(parts.values()) == 3 * weights + 10_000
    assert (parts["weights"], parts["optimizer"], parts["gradients"]) == (weights, 2 * weights, weights)
    assert (parts["residuals"], parts["workspace"]) == (2 * 4 * 64 * 8, 100)  # the stack that is no parameter


@pytest.mark.parametrize("accumulate, sums", [(1, 1), (2, 2), (4, 2)])
def test_shapes_hold_the_sum_of_gradients_next_to_those_of_a_microbatch(eight, accumulate, sums):
    """Of the 8,030,261,248 parameters of Llama 3 8B an eighth: weights, two moments and gradients, all in float32."""
    parameters = 8_030_261_248 / 8
    memory = analytic_memory(dataclasses.replace(eight[0], accumulate=accumulate))
    assert memory["weights"] == 4 * parameters and memory["optimizer"] == 8 * parameters
    assert memory["gradients"] == sums * 4 * parameters


@pytest.fixture
def compilations(monkeypatch, tmp_path):
    """What was compiled, in a cache of its own."""
    made = []
    monkeypatch.setenv("HALFBYTE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(MODULE, "can_compile", lambda: True)
    monkeypatch.setattr(
        MODULE, "profile_compiled_step", lambda *step: made.append(step) or profile_from_config(*step[:2])
    )
    return made


@pytest.mark.slow
def test_a_step_is_compiled_once(eight, compilations, monkeypatch):
    config, on = eight
    first = profile_step(config, on, say=silent)
    assert profile_step(config, on, say=silent) == first and len(compilations) == 1
    profile_step(dataclasses.replace(config, batch=64), on, say=silent)
    assert len(compilations) == 2
    profile_step(config, on, "own-turn", say=silent)
    assert [flags for *_, flags in compilations] == ["recommended", "recommended", "own-turn"]
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_autotune_level=0")  # the compiler would make another program
    profile_step(config, on, say=silent)
    assert len(compilations) == 4


@pytest.mark.slow
@pytest.mark.parametrize("damage", [
    lambda content: b"", lambda content: b"{ half", lambda content: b"{}", lambda content: content[:-1],
    lambda content: content.replace(b'\\"flops\\":1', b'\\"flops\\":9', 1), lambda content: content + b"1",
    lambda content: b"\xff" + content[1:],
])  # fmt: skip
def test_what_is_damaged_is_compiled_again(eight, compilations, tmp_path, damage):
    first = profile_step(*eight, say=silent)
    (file,) = tmp_path.rglob("*.json")
    whole = file.read_bytes()
    assert damage(whole) != whole
    file.write_bytes(damage(whole))
    assert profile_step(*eight, say=silent) == first and len(compilations) == 2
    assert profile_step(*eight, say=silent) == first and len(compilations) == 2


def test_a_cache_that_cannot_be_written_costs_no_answer(eight, compilations, tmp_path):
    (tmp_path / "cache").write_text("a file, and no folder")
    said = []
    assert profile_step(*eight, say=said.append) == profile_from_config(*eight)
    assert "HALFBYTE_CACHE" in said[-1]


def test_two_that_ask_at_once_compile_once(eight, compilations, monkeypatch):
    begun, go = threading.Event(), threading.Event()

    def compiled(*step):
        compilations.append(step)
        begun.set()
        assert go.wait(600)
        return profile_from_config(*step[:2])

    monkeypatch.setattr(MODULE, "profile_compiled_step", compiled)
    said = []
    with ThreadPoolExecutor() as pool:
        first = pool.submit(profile_step, *eight, say=silent)
        assert begun.wait(600)
        second = pool.submit(profile_step, *eight, say=lambda text: (said.append(text), go.set()))
        assert first.result() == second.result()
    assert len(compilations) == 1 and "waiting" in said[0]


def test_a_long_compilation_is_heard_of(monkeypatch):
    monkeypatch.setattr(MODULE, "PROGRESS_INTERVAL_S", 0.001)
    said, twice = [], threading.Event()

    def say(text):
        said.append(text)
        if len(said) > 2:
            twice.set()

    with report_compile_progress("it", say):
        assert twice.wait(600)
    assert "compiling it" in said[0] and "compiled" in said[-1]


def test_rows_that_fill_tiles_of_128_are_no_misplaced_program():
    """A width of 64: in its program, compiled for a GB300, XLA multiplies 452,984,832 FLOPs in 18 FP4 GEMMs of which
    half are needed."""
    base, on = run_config("demo"), make_cluster(device_by_name("gb300"), 1)
    model = dataclasses.replace(base.model, embed=64, mlp=192, layers=2, heads=4, head_dim=16)
    config = dataclasses.replace(base, model=model, seq=64, data="synthetic")
    expected = planned_gemms(config, on.device)
    needed = 3 * 3 * 2 * 2 * (8 * 64) * 64 * 192
    assert fp4_calls(expected) == 18 and sum(each.padding_flops for each in expected) == 452_984_832 - needed == needed

    read = profile_from_config(config, on)
    event = StepEvent("gemm", "mlp", "mlp", format="fp4", flops=needed)
    wasteful = dataclasses.replace(read, events=(*read.events, event), filling_flops=needed)
    assert list(problems(evaluate_plan(config, on, wasteful))) == []
    assert "no multiple of 128 make 45% more" in " ".join(plan_remarks(evaluate_plan(config, on, wasteful)))
    misplaced = dataclasses.replace(wasteful, filling_flops=0)
    (said,) = problems(evaluate_plan(config, on, misplaced))
    assert "1.450x" in said and "take another --mesh or --batch" in said


@pytest.mark.parametrize("fits", [True, False])
def test_what_xla_multiplies_again_for_want_of_memory_is_no_misplaced_program(fits):
    """Of 8B on one H100, XLA makes attention's GEMMs up to four times, and some in the backward pass alone; copies have
    names of theirs. 12% more FLOPs were called misplaced, on one device."""
    on = make_cluster(device_by_name("h200" if fits else "h100"), 1)
    config, _ = place_run(run_config("llama3-8b"), on, batch=1)
    plain = profile_from_config(config, on)
    names = ("dot.43", "dot.43.remat", "dot.43.remat2", "dot.32.remat2", "dot.7")
    made = [
        StepEvent("gemm", name, "attention linears", format="bf16", flops=plain.needed_flops / 10) for name in names
    ]
    again = dataclasses.replace(plain, events=(*plain.events, *made), needed_flops=1.3 * plain.needed_flops)
    assert again.remade_flops == pytest.approx(0.2 * plain.needed_flops)

    (said,) = problems(evaluate_plan(config, on, again))
    assert ("does not fit" in said) != fits and ("multiplies 15% of the FLOPs again; take --remat full" in said) == fits
    misplaced = dataclasses.replace(again, needed_flops=plain.needed_flops)
    assert "GEMMs multiply 1.300x" in list(problems(evaluate_plan(config, on, misplaced)))[1]


def test_what_a_size_keeps_from_the_units_is_not_expected_of_them():
    """gate and up sum over 208 in dgrad, down in fprop: no multiple of 32, so that no unit serves them."""
    base = run_config("demo")
    config = dataclasses.replace(base, model=dataclasses.replace(base.model, mlp=208), data="synthetic")
    assert fp4_calls(planned_gemms(config, device_by_name("gb300"))) == 0


@pytest.mark.parametrize("compiled_as_many_times", [1, 2])
def test_full_remat_is_named_where_it_may_be_faster(compiled_as_many_times):
    """A program twice as slow as the analytic step is slower than the analytic step under full remat, which saves less:
    by hand one stream of 80 layers for two and q, k, v and the output, 32.5 GiB of 70B with 8192 tokens.
    """
    on = make_cluster(device_by_name("h100"), 64)
    config, _ = place_run(dataclasses.replace(run_config("llama3.1-70b"), recipe="fp8"), on)
    read = profile_from_config(config, on)
    read = dataclasses.replace(read, compiled=True, events=read.events * compiled_as_many_times)
    remarks = " ".join(plan_remarks(evaluate_plan(config, on, read)))
    saved = 80 * 8192 * (2 * 8192 + 4 * (64 + 8) * 128) / 2**30
    assert ("--remat full may be faster" in remarks) == (compiled_as_many_times == 2)
    assert saved == pytest.approx(32.5) and (f"about {saved:.0f} of 67 GiB more" in remarks) == (
        compiled_as_many_times == 2
    )
