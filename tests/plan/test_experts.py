"""Plans of models with experts. Oracle: pairs, rows and bytes counted by hand."""

import dataclasses
import json
import sys

import pytest

import halfbyte.plan.compiled_step  # noqa: F401 (the module is changed below)
from halfbyte import models
from halfbyte.cli.main import main
from halfbyte.devices import device_by_name
from halfbyte.distributed import parse_mesh
from halfbyte.hlo import HloParseError, parse_hlo
from halfbyte.plan import evaluate_plan, make_cluster, place_run, profile_from_config
from halfbyte.plan.layout_search import enumerate_layouts
from halfbyte.plan.plan_outcome import plan_remarks
from halfbyte.plan.simulator import event_seconds, events_of_program, iter_events
from halfbyte.plan.step_placement import ExpertRowLoad, balanced_expert_load
from halfbyte.train import phases
from halfbyte.train.precision_manifest import build_precision_manifest
from halfbyte.train.run_presets import run_config
from hlo import condition_of, opening_of

LOOP = """\
%body (b: (s32[], bf16[128,64], bf16[64,32])) -> (s32[], bf16[128,64], bf16[64,32]) {
  %b = (s32[], bf16[128,64]{1,0}, bf16[64,32]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%b), index=0
  %x = bf16[128,64]{1,0} get-tuple-element(%b), index=1
  %w = bf16[64,32]{1,0} get-tuple-element(%b), index=2
  %dot = bf16[128,32]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="dot" stack_frame_id=1}
  ROOT %t = (s32[], bf16[128,64]{1,0}, bf16[64,32]{1,0}) tuple(%i, %x, %w)
}

ENTRY %main (x: bf16[1024,64], w: bf16[4,64,32], v: bf16[64,32], y: bf16[128,64]) -> bf16[1024,32] {
  %x0 = bf16[1024,64]{1,0} parameter(0)
  %w0 = bf16[4,64,32]{2,1,0} parameter(1)
  %v0 = bf16[64,32]{1,0} parameter(2)
  %y0 = bf16[128,64]{1,0} parameter(3)
  %zero = s32[] constant(0)
  %start = (s32[], bf16[128,64]{1,0}, bf16[64,32]{1,0}) tuple(%zero, %y0, %v0)
  %loop = (s32[], bf16[128,64]{1,0}, bf16[64,32]{1,0}) while(%start), condition=%condition, body=%body, metadata={op_name="while" stack_frame_id=1}
  ROOT %out = bf16[1024,32]{1,0} custom-call(%x0, %w0), custom_call_target="mosaic_gpu_v2", metadata={op_name="gemm" stack_frame_id=1}
}
"""  # noqa: E501
STEP = opening_of("ops/grouped_linear.py", "one") + condition_of("(s32[], bf16[128,64]{1,0}, bf16[64,32]{1,0})") + LOOP


@pytest.fixture
def no_plugin(monkeypatch):
    monkeypatch.setattr(sys.modules["halfbyte.plan.compiled_step"], "can_compile", lambda: False)


def eight():
    on = make_cluster(device_by_name("h200"), 8)
    return place_run(run_config("qwen3-30b-a3b"), on)[0], on


def test_an_even_load_in_tiles_that_are_half_full_at_the_end():
    config, _ = eight()
    pairs = 8 * 4096 * 8
    assert balanced_expert_load(config, 8) == ExpertRowLoad(pairs / 8, (pairs + 128 * 127 / 2) / 8)
    assert balanced_expert_load(dataclasses.replace(config, accumulate=2, batch=16), 8) == balanced_expert_load(
        config, 8
    )
    assert balanced_expert_load(run_config("llama3-8b"), 8).filled == 1.0


def test_room_that_no_row_fills_is_not_multiplied():
    """Our kernel has room for 1,024 rows of four experts, and XLA's loop turns once for each tile: 300 rows are there,
    which fill 384."""
    program, load = parse_hlo(STEP), ExpertRowLoad(300, 384)
    found = {
        each.name: (each, times)
        for each, times in iter_events(events_of_program(program, {}, {}, load))
        if each.what == "gemm"
    }
    kernel, once = found["out"]
    assert (kernel.flops, once, kernel.format, kernel.purpose) == (2 * 384 * 64 * 32, 1, "grouped bf16", "experts")
    assert kernel.moved == 2 * (384 * 64 + 4 * 64 * 32 + 1024 * 32)  # y is written whole
    tile, times = found["dot"]
    assert (tile.flops, times, tile.purpose) == (2 * 128 * 64 * 32, 3, "experts")


def test_codes_of_experts_are_counted_in_fp4():
    """Our kernel of Blackwell, in a program: two codes a byte, an expert's matrix with what is summed last."""
    codes = LOOP.replace("bf16[1024,64]", "f4e2m1fn[1024,64]").replace("bf16[4,64,32]", "f4e2m1fn[4,32,64]")
    program = parse_hlo(STEP.replace(LOOP, codes))
    (found,) = (
        each
        for each, _ in iter_events(events_of_program(program, {}, {}, ExpertRowLoad(300, 384)))
        if each.name == "out"
    )
    assert (found.flops, found.format) == (2 * 384 * 64 * 32, "grouped fp4")
    assert found.moved == (384 * 64 + 4 * 64 * 32) / 2 + 2 * 1024 * 32


# Parts of the dense peak of a GB300 that GEMMs reach, FP4 its part of that (docs/plan.md)
REACHED = {"fp4": 0.671 * 0.64, "bf16": 0.671}


@pytest.mark.slow(fast_cases=["bf16-auto-768-bf16"])
@pytest.mark.parametrize("recipe, backend, mlp, unit", [
    ("nvfp4", "auto", 768, "fp4"), ("nvfp4_no_rht", "auto", 768, "fp4"),
    ("nvfp4", "emulated", 768, "bf16"), ("nvfp4", "auto", 704, "bf16"),  # tiles by name; no multiple of 128
    ("mxfp8", "auto", 768, "bf16"), ("bf16", "auto", 768, "bf16"),
])  # fmt: skip
def test_experts_run_at_the_rate_of_the_unit_that_the_manifest_names(recipe, backend, mlp, unit):
    on, base = make_cluster(device_by_name("gb300"), 8), run_config("qwen3-30b-a3b")
    config, _ = place_run(dataclasses.replace(
        base, recipe=recipe, model=dataclasses.replace(base.model, mlp=mlp),
        precision=dataclasses.replace(base.precision, backend=backend),
    ), on)  # fmt: skip
    (phase,) = phases(config)
    manifest = build_precision_manifest(config, phase.resolved(config), phase.recipe, seq=config.seq, device=on.device)
    said = [gemm for site in manifest.sites if "/expert_" in site.path for gemm in site.gemms.values()]
    assert len(said) == 9 and {gemm.runs_in for gemm in said} == {{"fp4": "nvfp4"}.get(unit, unit)}

    planned = evaluate_plan(config, on, profile_from_config(config, on))
    experts = [each for each, _ in iter_events(planned.step_profile.events) if each.purpose == "experts"]
    assert len(experts) == 3 * 4 and {each.format for each in experts} == {f"grouped {unit}"}  # full remat
    peak = {"fp4": 15e15, "bf16": 2.5e15}[unit]
    each = experts[0]
    assert event_seconds(each, planned.rates) == pytest.approx(each.flops / (REACHED[unit] * peak))
    native = 12 * config.model.layers if unit == "fp4" else 0
    assert planned.step_profile.native == planned.step_profile.native_expected == native
    remark = " ".join(plan_remarks(planned))
    assert ("counted at 6,442 TFLOP/s, the rate of dense FP4 GEMMs" in remark) == (unit == "fp4")
    assert ("experts are multiplied in bfloat16" in remark) == (unit == "bf16")


def test_mfu_of_experts_in_fp4_is_of_their_own_peak():
    on = make_cluster(device_by_name("gb300"), 8)
    config, _ = place_run(run_config("qwen3-30b-a3b"), on)
    planned = evaluate_plan(config, on, profile_from_config(config, on))
    ideal = sum(
        times * each.flops / (15e15 if each.purpose == "experts" else 2.5e15)  # attention's linears are bf16
        for each, times in iter_events(planned.step_profile.events) if each.what in ("gemm", "attention")
    )  # fmt: skip
    assert planned.mfu == pytest.approx(ideal / planned.shared.seconds)


def test_the_manifest_is_built_once(capfd, no_plugin, monkeypatch):
    built = []
    monkeypatch.setattr(
        "halfbyte.plan.analytic_step.build_precision_manifest",
        lambda *a, **k: built.append(a) or build_precision_manifest(*a, **k),
    )
    assert main(["plan", "qwen3-30b-a3b", "--device", "gb300", "--count", "8", "--recipe", "nvfp4", "--json"]) == 0
    assert "kernel that no card has run" in capfd.readouterr()[0] and len(built) == 1


def test_a_loop_of_anything_else_must_say_how_often_it_turns():
    with pytest.raises(HloParseError, match="no known trip count"):
        events_of_program(parse_hlo(STEP.replace("ops/grouped_linear", "ops/mlp")), {}, {}, ExpertRowLoad(300, 384))


def sides(rows):
    """A computation that multiplies so many rows."""
    return (
        f"%rows{rows} (p: bf16[{rows},64], q: bf16[64,32]) -> bf16[{rows},32] {{\n"
        f"  %p{rows} = bf16[{rows},64]{{1,0}} parameter(0)\n  %q{rows} = bf16[64,32]{{1,0}} parameter(1)\n"
        f"  ROOT %dot{rows} = bf16[{rows},32]{{1,0}} dot(%p{rows}, %q{rows}), lhs_contracting_dims={{1}}, "
        f'rhs_contracting_dims={{0}}, metadata={{op_name="dot" stack_frame_id=1}}\n}}\n\n'
    )


@pytest.mark.parametrize("order", [(1024, 128), (128, 1024)])
def test_of_programs_for_few_and_for_all_rows_the_first_counts(order):
    text = STEP.replace("ops/grouped_linear", "models/moe").replace("%body (b:", sides(128) + sides(1024) + "%body (b:")
    called = f"true_computation=%rows{order[0]}, false_computation=%rows{order[1]}"
    branch = f"  %two = bf16[128,32]{{1,0}} conditional(%zero, %x0, %v0), {called}"
    branch += ', metadata={op_name="cond" stack_frame_id=1}\n  %start ='
    found = events_of_program(parse_hlo(text.replace("  %start =", branch)), {}, {}, ExpertRowLoad(300, 384))
    assert [each.name for each, _ in iter_events(found) if each.name.startswith("dot1")] == ["dot128"]


@pytest.mark.slow
def test_every_recipe_of_a_model_with_experts_has_an_answer(capfd, no_plugin):
    flags = ["--device", "h200", "--count", "8", "--recipe", "nvfp4", "--versus", "bf16,fp8", "--json"]
    assert main(["plan", "qwen3-30b-a3b", *flags]) == 0
    rows = json.loads(capfd.readouterr()[0])["recipes"]
    assert all(row["fits"] and not row["problems"] for row in rows.values())
    row, (config, _) = rows["nvfp4"], eight()
    assert 1.01 < row["gemm_flops"] / row["gemm_flops_needed"] < 1.03
    sites = {(each["site"], each["format"]): each["flops"] for each in row["gemms"]}
    pairs, model = 8 * 4096 * 8, config.model
    filled = balanced_expert_load(config, 8).filled
    assert sites["experts", "grouped bf16"] == pytest.approx(
        4 * 3 * 2 * pairs * model.embed * model.mlp * model.layers * filled / 8, rel=1e-6
    )
    sent = [each for each in row["collectives"] if each["kind"] == "ragged-all-to-all"]
    assert sum(each["bytes"] for each in sent) == 6 * model.layers * pairs * model.embed * 2 / 8
    assert {(each["link"], *each["axes"]) for each in sent} == {("nvlink", "expert")}
    assert "even load" in " ".join(row["remarks"]) and row["native_fp4_gemms_expected"] == 0


def test_experts_are_cut_where_they_rest_and_nowhere_else():
    config, on = eight()
    experts = sum(spec.size for spec in models.flat_param_specs(config.model).values() if spec.kind == "experts")
    rest = models.count_params(config.model) - experts
    assert profile_from_config(config, on).memory["weights"] == 4 * (experts / 8 + rest)
    fsdp = profile_from_config(dataclasses.replace(config, mesh="fsdp=8"), on)
    assert fsdp.memory["weights"] == 4 * (experts + rest) / 8
    assert fsdp.memory["activations"] > 2 * 8 * 4096 * 8 * 2 * 2 * config.model.embed  # room for all pairs, twice


@pytest.mark.slow
def test_a_search_knows_the_axis_of_experts():
    config, on = eight()
    assert {"expert=8", "fsdp=2,expert=4", "fsdp=8"} <= {each.mesh for each in enumerate_layouts(config, on)}
    dense, _ = place_run(run_config("llama3-8b"), on)
    assert not any("expert" in parse_mesh(each.mesh) for each in enumerate_layouts(dense, on))
