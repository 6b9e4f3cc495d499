"""Fits the free numbers of halfbyte.plan.calibration to published steps and prints them with each row's error.

    python benchmarks/plan_fit.py

Runs on a CPU in seconds: steps are those of the analytic model. docs/plan.md has the rows and their errors, each row
left out of its own fit.
"""

import dataclasses
import functools
import json
import math
from collections.abc import Sequence

from scipy.optimize import least_squares

from halfbyte import models
from halfbyte.devices import device
from halfbyte.plan import cluster, simulate
from halfbyte.plan.analytic import step
from halfbyte.plan.calibration import Fitted
from halfbyte.plan.linears import linear_gemms
from halfbyte.plan.schedule import Event
from halfbyte.train import TrainConfig


@dataclasses.dataclass(frozen=True)
class Row:
    """A published step: MaxText with Transformer Engine, sequences of 8192, in TFLOP/s per GPU. Vendor figures, not
    reproduced.
    """

    model: str
    device: str
    count: int
    recipe: str
    tflops: float


ROWS = tuple(
    Row(model, name, count, recipe, tflops)
    for model, name, count, fp8, nvfp4 in (
        ("llama3-8b", "gb200", 4, 1497, 2017),
        ("llama3-8b", "gb300", 4, 1759, 2301),
        ("llama3.1-405b", "gb200", 128, 1557, 2241),
        ("llama3.1-405b", "gb300", 128, 2103, 3633),
    )
    for recipe, tflops in (("fp8", fp8), ("nvfp4", nvfp4))
)


def config_of(row: Row) -> TrainConfig:
    """Returns the step that stands for a row, under the assumptions of `calibration.ASSUMED`."""
    mesh = "fsdp=4" if row.count == 4 else "dcn.fsdp=2,fsdp=64"
    batch = 4 * row.count if row.model == "llama3-8b" else row.count
    return TrainConfig(
        name="row", model=models.preset(row.model), recipe=row.recipe, policy="all_linear", mesh=mesh, data="synthetic",
        batch=batch, seq=8192, remat="full" if (row.model, row.device) == ("llama3.1-405b", "gb200") else "quantized",
    )  # fmt: skip


def predicted(row: Row, by: Fitted) -> float:
    """Returns the simulated TFLOP/s per GPU."""
    events, flops = _work_of(row)
    return flops / simulate(events, by.rates(device(row.device)), queued=False).seconds / 1e12


@functools.cache
def _work_of(row: Row) -> tuple[tuple[Event, ...], float]:
    """Returns the events of a row's step and the FLOPs per device as MaxText counts them."""
    config, on = config_of(row), cluster(device(row.device), row.count)
    tokens = config.batch * config.seq / row.count
    return step(config, on, linear_gemms(config, on.device)), tokens * models.flops_per_token(config.model, config.seq)


def fit(rows: Sequence[Row]) -> Fitted:
    """Returns the numbers nearest to `rows`. One that no row depends on keeps its initial value."""
    initial = dataclasses.astuple(Fitted(0.65, 0.65, 0.8))
    solution = least_squares(
        lambda p: [math.log(predicted(row, Fitted(*p)) / row.tflops) for row in rows], initial, bounds=(0.2, 1.0)
    )
    return Fitted(*(round(float(value), 3) for value in solution.x))


def main() -> None:
    fitted = fit(ROWS)
    errors = {}
    for row in ROWS:
        without = fit([other for other in ROWS if other != row])
        errors[f"{row.model} {row.count} {row.device} {row.recipe}"] = round(
            predicted(row, without) / row.tflops - 1, 3
        )
    print(json.dumps({"fitted": dataclasses.asdict(fitted), "error of each row, left out": errors}, indent=1))


if __name__ == "__main__":
    main()
