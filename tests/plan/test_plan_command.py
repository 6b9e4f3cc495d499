"""`halfbyte plan`, without compiling: clusters, meshes, memory, budgets, and what is said where something is wrong."""

import dataclasses
import gzip
import importlib
import json
import re
import shlex
import time
from dataclasses import asdict

import pytest

from halfbyte.cli.main import main
from halfbyte.cli.train import parse
from halfbyte.devices import device_by_name
from halfbyte.io import dataclass_json
from halfbyte.plan import evaluate_plan, make_cluster, parse_tokens, place_run, profile_from_config
from halfbyte.plan.cluster_model import axes_across_racks, layout_error
from halfbyte.plan.plan_outcome import break_even_overhead
from halfbyte.plan.step_placement import REMAT_LINEARS
from halfbyte.recipes import recipe
from halfbyte.study.arms import Arm
from halfbyte.study.equivalence_test import EquivalenceMargin
from halfbyte.study.study_plan import StudyPlan
from halfbyte.train import phases
from halfbyte.train.precision_manifest import build_precision_manifest
from halfbyte.train.run_presets import run_config

KEYS = """fits memory native_fp4_gemms gemm_flops gemm_flops_needed collectives operand_bytes step_time_s
    tflops_per_device tokens_per_s_per_device exposed_communication_s speedup_vs band calibration_residual""".split()


@pytest.fixture(autouse=True)
def no_plugin(monkeypatch):
    for module in ("halfbyte.plan.compiled_step", "halfbyte.plan.layout_search", "halfbyte.plan.plan_outcome"):
        monkeypatch.setattr(importlib.import_module(module), "can_compile", lambda: False)


def plan(capfd, *flags):
    code = main(["plan", *flags, "--json"])
    out, err = capfd.readouterr()
    return code, json.loads(out) if code in (0, 3) else None, err


def test_every_figure_of_every_recipe(capfd, tmp_path):
    html, trace = (tmp_path / name for name in ("p.html", "p.json.gz"))
    code, data, _ = plan(
        capfd, "llama3.1-405b", "--device", "gb300", "--count", "128", "--recipe", "nvfp4", "--versus", "fp8,bf16",
        "--tokens", "15T", "--price", "6", "--html", str(html), "--trace", str(trace),
    )  # fmt: skip
    assert code == 0 and list(data["recipes"]) == ["nvfp4", "fp8", "bf16"]
    for row in data["recipes"].values():
        assert not [key for key in KEYS if key not in row]
        assert sum(row["memory"][part] for part in ("weights", "optimizer", "gradients", "residuals", "activations",
                   "workspace")) == pytest.approx(row["memory"]["total"])  # fmt: skip
        assert row["gemm_flops"] == pytest.approx(row["gemm_flops_needed"], rel=1e-6)
        assert "nothing was compiled" in " ".join(row["remarks"])
        low, high = row["band"]["tflops_per_device"]
        assert low < row["tflops_per_device"] < high == pytest.approx(1.2 * row["tflops_per_device"])
    four, eight = data["recipes"]["nvfp4"], data["recipes"]["fp8"]
    assert four["native_fp4_gemms"] == (3 * 3 + 2) * 126 and eight["native_fp4_gemms"] == 0
    assert four["operand_bytes_compulsory"] < four["operand_bytes"] and eight["operand_bytes_compulsory"] is None
    assert four["speedup_vs"]["fp8"] == pytest.approx(eight["step_time_s"] / four["step_time_s"])
    days = data["budget"]["nvfp4"]["days"]
    assert days == pytest.approx(15e12 / (128 * four["tokens_per_s_per_device"]) / 86_400)
    assert data["budget"]["nvfp4"]["cost"] == pytest.approx(days * 24 * 128 * 6)
    assert "<script" not in html.read_text() and "nvfp4" in html.read_text()
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    ends = [e["ts"] + e["dur"] for e in events if e["ph"] == "X" and e["pid"] == 0]
    assert max(ends) == pytest.approx(1e6 * four["step_time_s"], rel=1e-3)


@pytest.mark.slow
def test_every_device_that_is_planned_for_has_an_energy(capfd):
    """At most its limit, all the time. B300 had none, and nothing said why."""
    limits = {"h100": 0.7, "b200": 1.0, "b300": 1.1, "gb300": 1.4}  # kW
    for chip, kilowatts in limits.items():
        _, data, err = plan(capfd, "llama3-8b", "--device", chip, "--count", "8", "--tokens", "1T")
        found = data["budget"]["nvfp4"]
        assert found["megawatt_hours_at_most"] == pytest.approx(found["days"] * 24 * 8 * kilowatts / 1e3)
        assert f"at most {found['megawatt_hours_at_most']:,.0f} MWh" in " ".join(err.split())


def report_of(folder, *, overhead, above=0):
    """What `halfbyte parity --baseline fp8 --policy mlp` leaves, with this overhead of nvfp4; on all linears 3%."""
    arms = [Arm("fp8", "baseline", {"recipe": "fp8"}), Arm("nvfp4", "candidate", {"recipe": "nvfp4"}),
            Arm("nvfp4@all_linear", "candidate", {"recipe": "nvfp4", "policy": "all_linear"}),
            Arm("fp8-twin", "twin", {"recipe": "fp8", "precision.noise_seed": 1})]  # fmt: skip
    base = dataclasses.replace(run_config("demo"), policy="mlp")
    found = {"plan": StudyPlan(base, tuple(arms), (0,), EquivalenceMargin(0.5, True)).to_json()}
    means = dict(zip((arm.name for arm in arms), (None, overhead, 3.0, 70.0), strict=True))
    found["arms"] = [
        {**asdict(arm), "token_overhead": means[arm.name] and {"mean": means[arm.name], "above": above}} for arm in arms
    ]
    path = folder / "report.json"
    path.write_text(json.dumps(found))
    return str(path)


@pytest.mark.slow(fast_cases=["90.0-0-mlp-gains1", "1.0-1-mlp-gains3"])
@pytest.mark.parametrize("overhead, above, policy, gains", [
    (1.0, 0, "mlp", {"fp8": True, "bf16": None}),  # the study had no bf16
    (90.0, 0, "mlp", {"fp8": False, "bf16": None}),
    (90.0, 0, "all_linear", {"fp8": None, "bf16": None}),  # fp8 was run on the MLPs alone
    (1.0, 1, "mlp", {"fp8": None, "bf16": None}),  # one seed never got there
])  # fmt: skip
def test_a_faster_step_that_needs_more_tokens_may_be_no_gain(capfd, tmp_path, overhead, above, policy, gains):
    flags = ["llama3-8b", "--device", "gb300", "--count", "8", "--recipe", "te_nvfp4", "--versus", "fp8,bf16"]
    report = report_of(tmp_path, overhead=overhead, above=above)
    code, data, err = plan(capfd, *flags, "--policy", policy, "--tokens", "1T", "--parity", report)
    if above:
        assert code == 2 and "holds no arm with a token overhead" in " ".join(err.split())
        return
    assert {row["against"]: row["gain"] for row in data["break_even"]} == gains
    charged = {"mlp": overhead / 100, "all_linear": 0.03}[policy]  # its own policy's
    assert data["budget"]["te_nvfp4"]["token_overhead"] == pytest.approx(charged)
    assert data["budget"]["te_nvfp4"]["tokens"] == pytest.approx(1e12 * (1 + charged))
    assert data["budget"]["fp8"]["token_overhead"] == {"mlp": 0.0, "all_linear": None}[policy]
    assert data["budget"]["bf16"]["token_overhead"] is None  # not charged, and said
    assert err.count("does not say how many more it needs") == {"mlp": 1, "all_linear": 2}[policy]


def test_what_is_no_parity_report_is_refused(capfd, tmp_path):
    (tmp_path / "report.json").write_text('{"arms": [{"name": "nvfp4"}]}')
    code, _, err = plan(capfd, "llama3-8b", "--parity", str(tmp_path / "report.json"))
    assert code == 2 and "is no report.json of `halfbyte parity`" in " ".join(err.split())


@pytest.mark.slow
def test_four_bits_on_hopper_are_emulated(capfd):
    code, data, _ = plan(capfd, "llama3-8b", "--device", "h200", "--count", "8", "--versus", "fp8,bf16")
    row = data["recipes"]["nvfp4"]
    assert code == 0 and "emulated: no speed-up is predicted; fp8 is" in " ".join(row["remarks"])
    assert row["speedup_vs"]["bf16"] <= 1.0 < data["recipes"]["fp8"]["speedup_vs"]["bf16"]
    assert row["native_fp4_gemms"] == 0


@pytest.mark.slow(fast_cases=["gb300-nvfp4+bf16_forward", "h200-halfbyte"])
@pytest.mark.parametrize("chip, name", [
    ("gb300", "nvfp4"), ("gb300", "mxfp4"), ("gb300", "nvfp4_fwd_mxfp8_bwd"), ("gb300", "nvfp4+bf16_forward"),
    ("gb300", "ue5m3"), ("gb300", "halfbyte"), ("h200", "halfbyte"), ("h200", "fp8"),
])  # fmt: skip
def test_what_the_manifest_calls_native_is(capfd, name, chip):
    """GEMM by GEMM: mxfp4 is emulated everywhere, a pass may be in 8 or 16 bits, and x may be multiplied twice."""
    flags = ["--device", chip, "--count", "8", "--batch", "8", "--policy", "all_linear", "--recipe", name]
    code, data, _ = plan(capfd, "llama3-8b", *flags, "--remat", "quantized")
    base = dataclasses.replace(run_config("llama3-8b"), policy="all_linear", mesh="fsdp=8", data="synthetic", batch=8)
    phase = phases(config := dataclasses.replace(base, recipe=name))[0]
    manifest = build_precision_manifest(
        config, phase.resolved(config), phase.recipe, seq=8192, device=device_by_name(chip)
    )
    native = [(site, gemm) for site in manifest.sites for gemm, found in site.gemms.items()
              if found.bits == 4 and found.execution == "native"]  # fmt: skip
    again = REMAT_LINEARS["quantized"]
    pieces = 2 if recipe(name).remainder else 1
    calls = sum(
        (site.layers[1] - site.layers[0]) * (pieces * (1 + (site.path in again)) if gemm == "fprop" else 1)
        for site, gemm in native
    )
    row = data["recipes"][name]
    assert code == 0 and row["problems"] == [] and row["native_fp4_gemms"] == calls
    assert row["gemm_flops"] == pytest.approx(row["gemm_flops_needed"], rel=1e-6)
    assert ("is emulated" in " ".join(row["remarks"])) == (manifest.share_4bit > 0 and not native)


@pytest.mark.slow
def test_what_does_not_fit_says_by_how_much_and_what_helps(capfd):
    code, data, _ = plan(
        capfd, "llama3.1-405b", "--device", "h100", "--count", "8", "--mesh", "fsdp=8", "--remat", "full"
    )
    row = data["recipes"]["nvfp4"]
    (said,) = row["problems"]
    over = (row["memory"]["total"] - row["memory"]["limit"]) / 2**30
    assert code == 3 and not row["fits"]
    assert f"{over:.1f} GiB too much" in said and "take more and --mesh ...,tensor=4" in said


def test_what_cannot_fit_is_not_compiled_and_names_the_least_count(capfd, monkeypatch):
    """405B on 8 GB300: 567 GiB of weights and moments each, of 254. On 64, by hand: 12 bytes of state and 4 of gradient
    of 405.9e9 / 64 parameters, 126 streams of 8192 x 16384 in bfloat16, and less than 40 GiB of a layer; on 32 it is
    189 GiB of these, 31.5 and 24 of a layer, which 1.15 makes too much.
    """
    monkeypatch.setattr("halfbyte.plan.compiled_step.can_compile", lambda: True)
    monkeypatch.setattr("halfbyte.plan.plan_outcome.can_compile", lambda: True)
    monkeypatch.setattr("halfbyte.devices.check_cuda_compiler", lambda: None)
    monkeypatch.setattr("halfbyte.plan.compiled_step.profile_compiled_step", lambda *_: pytest.fail("compiled"))
    begun = time.process_time()
    code, data, err = plan(capfd, "llama3.1-405b", "--device", "gb300", "--count", "8", "--remat", "full")
    assert code == 3 and time.process_time() - begun < 5
    row = data["recipes"]["nvfp4"]
    state = (row["memory"]["weights"] + row["memory"]["optimizer"]) / 2**30
    assert state == pytest.approx(567, abs=1) and not row["compiled"]
    assert "--count 64 --batch 64 --remat full is the next that fits" in row["problems"][0]
    assert "every program of this run needs more memory" in " ".join(err.split())


def test_what_fsdp_cannot_fit_names_a_mesh_that_fits(capfd):
    """405B in FP8 on 1,024 H100: shards over more than 256 are smaller than a tile, so that more devices do not help.
    Oracle: the command's own answer to the flags that it names."""
    asked = "llama3.1-405b", "--device", "h100", "--count", "1024", "--recipe", "fp8"
    code, data, _ = plan(capfd, *asked)
    flags = re.search(
        r"by shapes (--mesh \S+ --batch \d+ --remat full) fits these", data["recipes"]["fp8"]["problems"][0]
    )
    assert code == 3 and "tensor=" in flags[1]
    code, data, _ = plan(capfd, *asked, *flags[1].split())
    assert code == 0 and data["recipes"]["fp8"]["fits"]


def test_first_line_says_that_nothing_was_compiled(capfd):
    main(
        ["plan", "llama3-8b", "--device", "gb300", "--count", "8", "--versus", "fp8", "--tokens", "1T", "--price", "2"]
    )
    lines = [line for stream in capfd.readouterr() for line in stream.splitlines() if line.strip()]
    assert lines[0].startswith("nothing was compiled, an analytic model answers, for want of the compiler plugin")
    text = " ".join(" ".join(lines).split())
    assert "in the unit of --price" in text and "MWh for the GPUs without hosts, network and cooling" in text


def test_budget_has_the_band_of_the_step(capfd):
    _, data, err = plan(capfd, "llama3-8b", "--device", "gb300", "--count", "8", "--mesh", "fsdp=8", "--tokens", "1T")
    found = data["budget"]["nvfp4"]
    low, high = found["days_band"]
    assert (low, high) == (pytest.approx(found["days"] / 1.2), pytest.approx(found["days"] / 0.8))
    assert f"{found['days']:.1f} days ({low:.1f} to {high:.1f}) to 1e+12 tokens" in " ".join(err.split())


@pytest.mark.parametrize("recipe, mesh, works", [
    ("fp8", "dcn.fsdp=128,fsdp=8", "dcn.data=4,dcn.fsdp=32,fsdp=8"),  # kernels cast shards of 64 rows and more
    ("nvfp4", "dcn.fsdp=64,fsdp=16", "dcn.fsdp=128,fsdp=8"),  # 16 leave a board of 8
])  # fmt: skip
def test_refused_mesh_comes_with_one_that_works(capfd, recipe, mesh, works):
    flags = ("--device", "h100", "--count", "1024", "--recipe", recipe)
    code, _, err = plan(capfd, "llama3.1-405b", *flags, "--mesh", mesh)
    assert code == 2 and f"--mesh {works} works" in " ".join(err.split())
    on = make_cluster(device_by_name("h100"), 1024)
    config = dataclasses.replace(run_config("llama3.1-405b"), recipe=recipe, data="synthetic")
    placed, said = place_run(config, on)
    assert placed.mesh == works and not layout_error(placed, on) and said[0].startswith("mesh: FSDP over")


def test_preset_mesh_that_would_leave_a_board_becomes_one_that_says_so():
    """64 H100 are 8 boards: fsdp=64 of the preset, which is for a rack, is refused by `train`."""
    on = make_cluster(device_by_name("h100"), 64)
    assert "would leave a slice of 8" in layout_error(run_config("llama3.1-70b"), on)
    assert place_run(run_config("llama3.1-70b"), on)[0].mesh == "dcn.fsdp=8,fsdp=8"


@pytest.mark.parametrize("flags, said", [
    (("--device", "gb30"), "did you mean gb300"),
    (("--device", "cpu"), "has no links"),
    (("--device", "spark"), "plan for one of h100, h200, b200, gb200, b300, gb300"),
    (("--count", "100"), "take 96 or 104"),
    (("--count", "3"), "take 1 or 2 or 4"),
    (("--mesh", "fsdp=64"), "needs 64 devices, and --count is 128"),
    (("--mesh", "fspd=128"), "did you mean 'fsdp'"),
    (("--recipe", "nvfp5"), "nvfp5"),
    (("--tokens", "many"), "15T"),
    (("--batch", "-1"), "batch must be 0 (the preset's) or more"),
    (("--batch", "33"), "no multiple of 128"),
    (("--layers", "-3"), "layers must be 0 (all) or more, got -3"),
    (("--reduce-dtype", "int8"), "precision.reduce_dtype must be one of float32, bfloat16, got 'int8'"),
    (("--price", "6"), "takes its --tokens"),
    (("--search", "--versus", "fp8", "--html", "page.html"), "without --versus and --html"),
    (("--search", "--xla-flags", "own-turn"), "without --xla-flags"),
    (("--xla-flags", "own-turn"), "[plan]'"),
    (("--search", "--minutes", "nan"), "minutes must be 0 or more"),
])  # fmt: skip
def test_impossible_questions_are_one_paragraph(capfd, flags, said):
    code, _, err = plan(capfd, "llama3.1-405b", *flags)
    assert code == 2 and said in " ".join(err.split()) and "Traceback" not in err


@pytest.mark.parametrize("name, count, rack", [
    ("gb300", 128, 64), ("gb300", 8192, 64), ("gb300", 72, 72), ("gb300", 144, 72), ("gb200", 8, 8), ("h200", 64, 8),
    ("h200", 1, 1),
    ("gb300", 576, 64),  # nine racks of 64 rather than eight of 72: meshes have powers of two
])  # fmt: skip
def test_racks(name, count, rack):
    found = make_cluster(device_by_name(name), count)
    assert (found.rack, found.hosts * found.per_host) == (rack, count)


def test_what_was_assumed_is_said_for_what_was_not_given():
    preset, on = run_config("llama3.1-405b"), make_cluster(device_by_name("gb300"), 8192)
    config, said = place_run(preset, on)
    assert (config.mesh, config.batch) == ("dcn.data=64,dcn.fsdp=2,fsdp=64", 64 * preset.batch) and len(said) == 2
    config, said = place_run(preset, on, batch=16384)
    assert config.batch == 16384 and len(said) == 1 and "64 times" in said[0]
    assert place_run(preset, on, mesh=config.mesh, batch=16384) == (config, ())


def test_an_axis_that_leaves_a_rack_crosses_it():
    on = make_cluster(device_by_name("gb300"), 128)
    assert axes_across_racks("fsdp=128", on) == axes_across_racks("dcn.fsdp=2,fsdp=64", on) == {"fsdp": (64, 2)}
    assert axes_across_racks("dcn.data=2,fsdp=16,tensor=4", on) == {"data": (1, 2), "fsdp": (16, 1), "tensor": (4, 1)}


def test_needed_tokens_are_a_ratio_of_both_overheads():
    """bf16 needs 1.25x of the tokens of the baseline, fp8 1.5x: fp8 needs 1.2x of those of bf16 and no 25% more."""
    on = make_cluster(device_by_name("h200"), 8)
    config, _ = place_run(run_config("llama3-8b"), on)
    fp8, bf16 = (
        evaluate_plan(each, on, profile_from_config(each, on))
        for each in (dataclasses.replace(config, recipe=name) for name in ("fp8", "bf16"))
    )
    (row,) = break_even_overhead(fp8, [fp8, bf16], {("fp8", config.policy): 0.5, ("bf16", config.policy): 0.25})
    assert row["needs_more_tokens"] == pytest.approx(0.2)
    assert row["gain"] is (bf16.shared.seconds / fp8.shared.seconds > 1.2)


def test_every_recipe_is_looked_up_before_the_first_is_compiled(capfd, monkeypatch):
    monkeypatch.setattr("halfbyte.plan.profile_step", lambda *_, **__: pytest.fail("compiled"))
    code, _, err = plan(capfd, "llama3-8b", "--device", "h200", "--count", "8", "--versus", "nvfp5")
    assert code == 2 and "nvfp5" in err


def test_a_search_ranks_layouts_and_says_where_the_preset_is(capfd):
    code, data, err = plan(capfd, "llama3-8b", "--device", "h200", "--count", "2", "--layers", "2", "--search")
    times = [float(row["step_time_s"]) for row in data["layouts"]]
    assert code == 0 and times == sorted(times) and data["preset_rank"] >= 1
    assert data["best"].startswith("halfbyte train llama3-8b") and "would not win" in data["pipelines"]
    assert "the preset's layout is not compiled" in " ".join(err.split()) and data["ranked"] == 0  # all are bounds


def test_layouts_are_legible_in_80_columns(capfd, monkeypatch):
    """Nothing is cut: each number, dtype and remat in full, a mesh over two lines."""
    monkeypatch.setattr(importlib.import_module("halfbyte.cli.console"), "PIPED_WIDTH", 80)
    code = main(["plan", "llama3-8b", "--device", "gb300", "--count", "128", "--layers", "2", "--search"])
    table = capfd.readouterr().out.partition("layouts, batch")[2].partition("the preset's")[0]
    assert code == 0 and "…" not in table and max(map(len, table.splitlines())) <= 80
    assert {"bfloat16", "float32", "none"} <= set(table.split()) and "fsdp=64" in table
    assert re.search(r"^ \d+\.\d{3} ", table, re.MULTILINE)


def test_longest_events_are_rows_of_a_terminal_of_80_columns(capfd, monkeypatch):
    """A compiled step names functions of sixty characters: a row has file and line, and its time on its first line."""
    source = "kernels/blackwell_grouped_gemm.py:131:mlp_with_stacked_residuals.<locals>.products"
    rows = [{"what": what, "purpose": "attention linears", "source": source, "seconds": 0.5}
            for what in ("gemm fp8", "attention backward", "exposed communication")]  # fmt: skip
    monkeypatch.setattr(importlib.import_module("halfbyte.plan.plan_report"), "longest_events", lambda found: rows)
    monkeypatch.setattr(importlib.import_module("halfbyte.cli.console"), "PIPED_WIDTH", 80)
    assert main(["plan", "llama3-8b", "--device", "h200", "--count", "8", "--recipe", "fp8"]) == 0
    table = capfd.readouterr().out.partition("what takes longest")[2].splitlines()
    for row in rows:
        (line,) = (line for line in table if line.strip().startswith(row["what"]))
        assert line.split()[-1] == "500.0" and len(line) <= 80
    assert "…" not in "".join(table) and "locals" not in "".join(table)


DEMO = run_config("demo")
RULES = "all_linear; layers[-1:]=bf16"


@pytest.mark.slow(fast_cases=["directory"])
@pytest.mark.parametrize("started", ["name", "file", "directory"])
def test_the_best_layout_is_a_command_that_trains_it(capfd, tmp_path, started):
    """Oracle: what `halfbyte train` reads in the words that a shell makes of it. The run is not what its name says."""
    own = dataclasses.replace(DEMO, model=dataclasses.replace(DEMO.model, embed=64), policy=RULES)
    dataclass_json.save_config(own, tmp_path / "config.json")
    at = {"name": "demo", "file": str(tmp_path / "config.json"), "directory": str(tmp_path)}[started]
    code, data, _ = plan(
        capfd, at, "--device", "h200", "--count", "1", "--layers", "3", "--policy", RULES, "--search", "--minutes", "0"
    )
    assert code == 0
    best, base = data["layouts"][0], DEMO if started == "name" else own
    laid = parse(shlex.split(data["best"])[2:]).run
    assert laid.model == dataclasses.replace(base.model, layers=3)
    assert (laid.policy, laid.mesh, laid.remat, laid.accumulate) == (
        RULES, best["mesh"], best["remat"], best["accumulate"]
    )  # fmt: skip
    assert (laid.recipe, laid.batch, laid.seq) == ("nvfp4", base.batch, base.seq)


@pytest.mark.parametrize("text, tokens", [("15T", 15e12), ("300b", 3e11), ("1000", 1000), ("1.5T", 1.5e12)])
def test_tokens(text, tokens):
    assert parse_tokens(text) == tokens
