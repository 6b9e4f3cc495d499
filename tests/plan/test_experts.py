"""Plans of models with experts. Oracle: pairs, rows and bytes counted by hand."""

import dataclasses
import json
import sys

import pytest
from hlo import condition_of, opening_of

import halfbyte.plan.reading  # noqa: F401 (the module is changed below)
from halfbyte import models
from halfbyte.cli.main import main
from halfbyte.devices import device
from halfbyte.plan import by_hand, cluster, placed
from halfbyte.plan.load import Load, even_load
from halfbyte.plan.schedule import schedule, walk
from halfbyte.plan.search import layouts
from halfbyte.program import Unreadable, read
from halfbyte.runs import run_config
from halfbyte.sharding import parse_mesh

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
STEP = opening_of("ops/tiles.py", "one") + condition_of("(s32[], bf16[128,64]{1,0}, bf16[64,32]{1,0})") + LOOP


@pytest.fixture
def no_plugin(monkeypatch):
    monkeypatch.setattr(sys.modules["halfbyte.plan.reading"], "can_compile", lambda: False)


def eight():
    on = cluster(device("h200"), 8)
    return placed(run_config("qwen3-30b-a3b"), on)[0], on


def test_an_even_load_in_tiles_that_are_half_full_at_the_end():
    config, _ = eight()
    pairs = 8 * 4096 * 8
    assert even_load(config, 8) == Load(pairs / 8, (pairs + 128 * 127 / 2) / 8)
    assert even_load(dataclasses.replace(config, accumulate=2, batch=16), 8) == even_load(config, 8)
    assert even_load(run_config("llama3-8b"), 8).filled == 1.0


def test_room_that_no_row_fills_is_not_multiplied():
    """Our kernel has room for 1,024 rows of four experts, and XLA's loop turns once for each tile: 300 rows are there,
    which fill 384."""
    program, load = read(STEP), Load(300, 384)
    found = {each.name: (each, times) for each, times in walk(schedule(program, {}, {}, load)) if each.what == "gemm"}
    kernel, once = found["out"]
    assert (kernel.flops, once, kernel.format, kernel.purpose) == (2 * 384 * 64 * 32, 1, "grouped bf16", "experts")
    assert kernel.moved == 2 * (384 * 64 + 4 * 64 * 32 + 1024 * 32)  # y is written whole
    tile, times = found["dot"]
    assert (tile.flops, times, tile.purpose) == (2 * 128 * 64 * 32, 3, "experts")


def test_a_loop_of_anything_else_must_say_how_often_it_turns():
    with pytest.raises(Unreadable, match="no known trip count"):
        schedule(read(STEP.replace("ops/tiles", "ops/mlp")), {}, {}, Load(300, 384))


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
    text = STEP.replace("ops/tiles", "models/experts").replace("%body (b:", sides(128) + sides(1024) + "%body (b:")
    called = f"true_computation=%rows{order[0]}, false_computation=%rows{order[1]}"
    branch = f"  %two = bf16[128,32]{{1,0}} conditional(%zero, %x0, %v0), {called}"
    branch += ', metadata={op_name="cond" stack_frame_id=1}\n  %start ='
    found = schedule(read(text.replace("  %start =", branch)), {}, {}, Load(300, 384))
    assert [each.name for each, _ in walk(found) if each.name.startswith("dot1")] == ["dot128"]


def test_every_recipe_of_a_model_with_experts_has_an_answer(capfd, no_plugin):
    flags = ["--device", "h200", "--count", "8", "--recipe", "nvfp4", "--versus", "bf16,fp8", "--json"]
    assert main(["plan", "qwen3-30b-a3b", *flags]) == 0
    rows = json.loads(capfd.readouterr()[0])["recipes"]
    assert all(row["fits"] and not row["problems"] for row in rows.values())
    row, (config, _) = rows["nvfp4"], eight()
    assert 1.01 < row["gemm_flops"] / row["gemm_flops_needed"] < 1.03
    sites = {(each["site"], each["format"]): each["flops"] for each in row["gemms"]}
    pairs, model = 8 * 4096 * 8, config.model
    filled = even_load(config, 8).filled
    assert sites["experts", "grouped bf16"] == pytest.approx(
        4 * 3 * 2 * pairs * model.embed * model.mlp * model.layers * filled / 8, rel=1e-6
    )
    sent = [each for each in row["collectives"] if each["kind"] == "ragged-all-to-all"]
    assert sum(each["bytes"] for each in sent) == 6 * model.layers * pairs * model.embed * 2 / 8
    assert {(each["link"], *each["axes"]) for each in sent} == {("nvlink", "expert")}
    assert "even load" in " ".join(row["remarks"]) and row["native_fp4_gemms_expected"] == 0


def test_experts_are_cut_where_they_rest_and_nowhere_else():
    config, on = eight()
    experts = sum(spec.size for spec in models.declared(config.model).values() if spec.kind == "experts")
    rest = models.count_params(config.model) - experts
    assert by_hand(config, on).memory["weights"] == 4 * (experts / 8 + rest)
    fsdp = by_hand(dataclasses.replace(config, mesh="fsdp=8"), on)
    assert fsdp.memory["weights"] == 4 * (experts + rest) / 8
    assert fsdp.memory["activations"] > 2 * 8 * 4096 * 8 * 2 * 2 * config.model.embed  # room for all pairs, twice


def test_a_search_knows_the_axis_of_experts():
    config, on = eight()
    assert {"expert=8", "fsdp=2,expert=4", "fsdp=8"} <= {each.mesh for each in layouts(config, on)}
    dense, _ = placed(run_config("llama3-8b"), on)
    assert not any("expert" in parse_mesh(each.mesh) for each in layouts(dense, on))
