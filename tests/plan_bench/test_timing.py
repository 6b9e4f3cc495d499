"""The measurements of `halfbyte bench`: counting, ratios, and that none is given where bits differ."""

import dataclasses
import json
import signal

import gpu_program
import pytest

from halfbyte import ops, plan
from halfbyte.cli.bench import gemm_shares
from halfbyte.cli.main import main
from halfbyte.devices import device_by_name
from halfbyte.ops.quantize_passes import QuantizePasses
from halfbyte.plan import step_timing
from halfbyte.plan.step_placement import EXPERT_LINEARS
from halfbyte.train import build_precision_manifest, phases, run_mesh
from halfbyte.train.run_presets import run_config


def row(name: str, milliseconds: float | None, remat: str = "none") -> step_timing.StepMeasurement:
    return step_timing.StepMeasurement(name, "mlp", remat, "", milliseconds=milliseconds)


def test_gemm_flops_are_counted_by_format() -> None:
    """The loop's two GEMMs run three times: seven of the ten calls are bf16, one of them outside the loop."""
    each = 2 * 64 * 128 * 256
    calls = {"fp4": 1, "fp8": 1, "bf16": 7, "bf16 by our kernel": 1}
    work = step_timing.gemm_calls_and_flops(gpu_program.TEXT)
    assert work == {name: {"calls": count, "flops": count * each} for name, count in calls.items()}
    assert gemm_shares(work) == "fp4 10.0%, fp8 10.0%, bf16 70.0%, bf16 by our kernel 10.0%"


@pytest.mark.slow
def test_gemms_of_experts_are_counted_under_an_even_load(quick_compiles, monkeypatch) -> None:
    """On a CPU loops over the tiles that have rows multiply; how many these are no program says. A tile has 16 rows: 64
    pairs for each of 8 experts are too few for larger ones."""
    monkeypatch.setattr(step_timing, "_time", lambda *_, **__: ([1.0], None, {"loss": 0.0}))
    monkeypatch.setattr(step_timing, "create_state", lambda *_: None)
    base = run_config("moe-demo")
    model = dataclasses.replace(base.model, layers=1)
    config = dataclasses.replace(base, model=model, recipe="nvfp4", data="synthetic", batch=8, seq=32, mesh="")
    found = step_timing.measure_step(config, seq=32)
    pairs, needed = 8 * 32 * 2, plan.needed_flops(config)
    filling = sum(needed[path] for path in EXPERT_LINEARS) * 8 * (16 - 1) / 2 / pairs
    total = (sum(needed.values()) + filling) / run_mesh(config).size
    assert found.note == "" and sum(work["flops"] for work in found.gemms.values()) == pytest.approx(total, rel=0.02)
    assert "%" in gemm_shares(found.gemms)


def test_shares_are_of_flops_and_not_of_calls() -> None:
    assert gemm_shares({"bf16": {"calls": 9, "flops": 10}, "fp4": {"calls": 1, "flops": 30}}) == "bf16 25.0%, fp4 75.0%"
    assert gemm_shares({}) == ""


def test_ratios_are_to_bf16_of_the_same_remat() -> None:
    rows = [row("bf16", 100.0), row("nvfp4", 125.0), row("bf16", 200.0, "full"), row("nvfp4", 160.0, "full")]
    assert [r.ratio for r in step_timing.with_speed_ratio(rows)] == [1.0, 0.8, 1.0, 1.25]


def test_ratios_of_unequal_batches_are_of_the_time_a_sequence_takes() -> None:
    rows = [dataclasses.replace(row("bf16", 100.0), batch=10), dataclasses.replace(row("nvfp4", 100.0), batch=8)]
    assert [r.ratio for r in step_timing.with_speed_ratio(rows)] == [1.0, 0.8]


def test_no_ratio_without_a_baseline_or_a_time() -> None:
    assert step_timing.with_speed_ratio([row("nvfp4", 100.0)])[0].ratio is None
    assert step_timing.with_speed_ratio([row("bf16", 100.0), row("nvfp4", None)])[1].ratio is None


@pytest.mark.slow
@pytest.mark.parametrize("recipe, mixed", [("bf16", False), ("nvfp4", False), ("fp8", True)])
def test_mfu_is_the_trainers(recipe, mixed, monkeypatch) -> None:
    """Against the peak of the formats that are multiplied: bf16's, emulated nvfp4 too, and between both for fp8."""
    h200 = device_by_name("h200")
    monkeypatch.setattr(step_timing, "lookup", lambda _: h200)
    config = dataclasses.replace(run_config("llama3-8b"), recipe=recipe, policy="all_linear")
    (phase, *_) = phases(config)
    trainers = build_precision_manifest(config, phase.resolved(config), phase.recipe, seq=8192, device=h200)
    with ops.compile_for(h200):
        found = step_timing._with_times(row(recipe, None), config, 8192, [0.25], 0.0)
    assert found.peak_tflops == trainers.peak(h200) / 1e12
    assert found.mfu == pytest.approx(found.tflops / found.peak_tflops)
    assert (found.peak_tflops > 1.2 * 989.5) if mixed else found.peak_tflops == pytest.approx(989.5)


class Broken(QuantizePasses):
    """Passes whose first operand is off by a factor."""

    def quantize(self, x, specs):
        first, *rest = super().quantize(x, specs)
        return [dataclasses.replace(first, array=first.values() * 2), *rest]


def test_a_backend_that_differs_is_found_and_no_ratio_is_printed(monkeypatch, capsys) -> None:
    broken = dataclasses.replace(ops.BACKENDS["emulated"], passes=(Broken(),))
    monkeypatch.setitem(ops.BACKENDS, "emulated", broken)
    monkeypatch.setattr(step_timing, "measure_step", lambda config, **_: row(config.recipe, 10.0))
    monkeypatch.setattr(ops, "backends_match_reference", lambda r: AGREE(r, tokens=32, features=128))
    assert main(["bench", "demo", "--recipes", "bf16,mxfp8", "--seq", "32"]) == 3
    shown = capsys.readouterr().out
    assert "emulated DIFFER" in shown and "no ratio is given" in shown and "1.000" not in shown


@pytest.mark.slow(fast_cases=["1"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_bench_that_is_stopped_keeps_the_rows_it_has(number, monkeypatch, capfd, tmp_path) -> None:
    """On stdout with --json, and in --out, where also a kill finds them."""

    def measure(config, **_):
        if config.remat == "none":
            return row(config.recipe, 10.0)
        assert [each["recipe"] for each in json.loads((tmp_path / "rows").read_text())["rows"]] == ["bf16", "nvfp4"]
        signal.raise_signal(number)
        raise AssertionError("the signal was lost")

    monkeypatch.setattr(step_timing, "measure_step", measure)
    monkeypatch.setattr(ops, "backends_match_reference", lambda r: {"emulated": True})
    flags = ["--recipes", "bf16,nvfp4", "--remat", "none,full", "--seq", "32", "--out", str(tmp_path / "rows")]
    assert main(["bench", "demo", *flags, "--json"]) == 1
    shown = json.loads(capfd.readouterr().out)
    assert [(each["recipe"], each["ratio"]) for each in shown["rows"]] == [("bf16", 1.0), ("nvfp4", 1.0)]
    assert shown["stopped"] and json.loads((tmp_path / "rows").read_text()) == shown


def test_a_bench_that_is_stopped_before_its_first_row_was_interrupted(monkeypatch, capsys) -> None:
    monkeypatch.setattr(step_timing, "measure_step", lambda config, **_: signal.raise_signal(signal.SIGTERM))
    monkeypatch.setattr(ops, "backends_match_reference", lambda r: {"emulated": True})
    assert main(["bench", "demo", "--recipes", "bf16", "--seq", "32"]) == 1
    assert "interrupted" in capsys.readouterr().err


AGREE = ops.backends_match_reference


@pytest.mark.slow(fast_cases=["flags1-steps must be 1 or more, got 0"])
@pytest.mark.parametrize("flags, said", [
    (("--unroll", "-2"), "unroll must be 0 (all layers) or more, got -2"),
    (("--steps", "0"), "steps must be 1 or more, got 0"),
    (("--repeats", "0"), "repeats must be 1 or more, got 0"),
    (("--remat", "none,some"), "remat must be one of"),
    (("--mesh", "fsdp=3"), "needs 3 devices"),
    (("--policy", "mpl"), "mpl"),
])  # fmt: skip
def test_what_cannot_be_measured_is_refused_before_anything_takes_long(capfd, monkeypatch, flags, said):
    monkeypatch.setattr("halfbyte.ops.backends_match_reference", lambda recipe: pytest.fail("bits were compared first"))
    assert main(["bench", "demo", "--recipes", "nvfp4", *flags]) == 2
    assert said in " ".join(capfd.readouterr().err.split())
