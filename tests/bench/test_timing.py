"""The measurements of `halfbyte bench`: counting, ratios, and that none is given where bits differ."""

import dataclasses

import gpu_program

from halfbyte import bench, conformance, ops
from halfbyte.cli.main import main
from halfbyte.ops.passes import Passes


def row(name: str, milliseconds: float | None, remat: str = "none") -> bench.Measured:
    return bench.Measured(name, "mlp", remat, "", milliseconds=milliseconds)


def test_gemms_are_counted_by_what_multiplies() -> None:
    assert bench.count_gemms(gpu_program.TEXT) == {"fp4": 1, "f8": 1, "bf16": 2, "own": 1}


def test_ratios_are_to_bf16_of_the_same_remat() -> None:
    rows = [row("bf16", 100.0), row("nvfp4", 125.0), row("bf16", 200.0, "full"), row("nvfp4", 160.0, "full")]
    assert [r.ratio for r in bench.compare(rows)] == [1.0, 0.8, 1.0, 1.25]


def test_ratios_of_unequal_batches_are_of_the_time_a_sequence_takes() -> None:
    rows = [dataclasses.replace(row("bf16", 100.0), batch=10), dataclasses.replace(row("nvfp4", 100.0), batch=8)]
    assert [r.ratio for r in bench.compare(rows)] == [1.0, 0.8]


def test_no_ratio_without_a_baseline_or_a_time() -> None:
    assert bench.compare([row("nvfp4", 100.0)])[0].ratio is None
    assert bench.compare([row("bf16", 100.0), row("nvfp4", None)])[1].ratio is None


class Broken(Passes):
    """Passes whose first operand is off by a factor."""

    def quantize(self, x, requests):
        first, *rest = super().quantize(x, requests)
        return [dataclasses.replace(first, array=first.values() * 2), *rest]


def test_a_backend_that_differs_is_found_and_no_ratio_is_printed(monkeypatch, capsys) -> None:
    broken = dataclasses.replace(ops.BACKENDS["carrier"], passes=Broken())
    monkeypatch.setitem(ops.BACKENDS, "carrier", broken)
    monkeypatch.setattr(bench, "measure", lambda config, **_: row(config.recipe, 10.0))
    monkeypatch.setattr(conformance, "operands_agree", lambda r: AGREE(r, tokens=32, features=128))
    assert main(["bench", "demo", "--recipes", "bf16,mxfp8", "--seq", "32"]) == 3
    shown = capsys.readouterr().out
    assert "carrier DIFFER" in shown and "no ratio is given" in shown and "1.000" not in shown


AGREE = conformance.operands_agree
