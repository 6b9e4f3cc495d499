"""The radar on a running model with experts: healthy, and with faults in the operands of their GEMMs. Oracle: what was
planted.

The faults are in one program, which asks at every call which of them it has: compiling it is what a probe costs.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from radar_model import CONFIG, batch_of

from halfbyte import models
from halfbyte.evaluation.inspection import Telemetry
from halfbyte.evaluation.radar import Radar
from halfbyte.models import moe
from halfbyte.ops import expert_tiles, grouped_linear
from halfbyte.recipes import recipe
from halfbyte.train import read_rows, resolve_policy, run_mesh
from halfbyte.train.train_state import StepSnapshot

MODEL = CONFIG.model.replace(
    embed=64, mlp=64, layers=1, kv_heads=4, qk_norm=True, experts=4, experts_per_token=1, norm_topk=True,
    shared_experts=1,
)  # fmt: skip
MOE = dataclasses.replace(CONFIG, model=MODEL, recipe="nvfp4", policy="mlp")
FAULTS = ("healthy", "one_amax", "a_run_of_two_experts", "a_block_of_two_experts", "an_offset_16_off", "tail_rows")
SITES = {f"mlp/{of}_{name}" for of in ("expert", "shared") for name in ("gate", "up", "down")}


class Planted:
    """The operands of experts with the fault `now`."""

    def __init__(self, monkeypatch):
        self.now = "healthy"
        homes = {"_amaxes": grouped_linear, "hadamard_transform": grouped_linear, "padded_group_sizes": expert_tiles}
        real = {name: getattr(home, name) for name, home in homes.items()}
        places, spread = moe.row_of_pair, moe.dispatch_tokens

        def late(x, *, axis, points):
            made = real["hadamard_transform"](jnp.roll(x, points // 2, axis), axis=axis, points=points)
            return jnp.roll(made, -points // 2, axis)

        def amaxes(*given):
            return self.either("one_amax", lambda made: jnp.full_like(made, jnp.max(made)), real["_amaxes"](*given))

        def transformed(x, *, axis, points):
            made = real["hadamard_transform"](x, axis=axis, points=points)
            return self.either("a_run_of_two_experts", lambda _: late(x, axis=axis, points=points), made)

        def whole(counts, tile):
            return self.either("a_block_of_two_experts", lambda _: counts, real["padded_group_sizes"](counts, tile))

        def placed(chosen, *given):
            made = places(chosen, *given)
            return self.either("an_offset_16_off", lambda row: row + jnp.where(chosen == 2, 16, 0), made)

        def spread_out(x, rows, room):
            filled = lambda made: jnp.where(jnp.any(made != 0, 1, keepdims=True), made, x[:1])  # noqa: E731
            return self.either("tail_rows", filled, spread(x, rows, room))

        for name, fault in (("_amaxes", amaxes), ("hadamard_transform", transformed), ("padded_group_sizes", whole)):
            monkeypatch.setattr(homes[name], name, fault)
        monkeypatch.setattr(moe, "row_of_pair", placed)
        monkeypatch.setattr(moe, "dispatch_tokens", spread_out)

    def either(self, fault, spoil, made):
        found = jax.pure_callback(lambda: np.bool_(self.now == fault), jax.ShapeDtypeStruct((), jnp.bool_))
        return jnp.where(found, spoil(made), made)


@pytest.fixture(scope="module")
def moment():
    """Experts 0 and 1 have one router, so that 1 has no rows."""
    params = models.init(MODEL, jax.random.key(0))
    router = params["layers"]["mlp"]["router"]
    params["layers"]["mlp"]["router"] = router.at[..., 1].set(router[..., 0])
    mesh = run_mesh(dataclasses.replace(MOE, mesh="data=1"), jax.devices()[:1])
    return StepSnapshot(1, MOE, resolve_policy(MODEL, "mlp", recipe("nvfp4")), mesh, params, batch_of(0, rows=2))


def test_faults_in_operands_of_experts_are_seen_in_a_running_model(moment, monkeypatch, tmp_path):
    planted, radar = Planted(monkeypatch), Radar(1, tmp_path)
    for planted.now in FAULTS:
        lines = radar.observe(moment)
        assert any("RADAR ALARM" in line for line in lines) == (planted.now != "healthy"), (planted.now, lines)
    gemms = read_rows(tmp_path / "radar.jsonl")[0]["gemms"]
    assert len(gemms) == 6 * 4 and {g["site"] for g in gemms} == SITES
    assert all(g["gain"] == pytest.approx(g["recipe_gain"], abs=2e-3) for g in gemms)
    planted.now, telemetry = "healthy", Telemetry(1, tmp_path)
    telemetry._programs[moment.resolved] = radar._programs[moment.resolved]._replay
    telemetry.observe(moment)
    assert {o["site"] for o in read_rows(tmp_path / "telemetry.jsonl")[0]["operands"]} == SITES
