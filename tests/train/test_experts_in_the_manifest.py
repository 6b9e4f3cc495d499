"""Experts that the manifest calls native are given as codes by the step, and no others. Oracle: the operands of a
grouped linear, traced for the device that the manifest is of."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from halfbyte import ops
from halfbyte.devices import device_by_name
from halfbyte.models.config import EXPERT_SITES
from halfbyte.models.moe import moe_tile_layout
from halfbyte.ops.expert_tiles import ExpertTiles
from halfbyte.ops.grouped_linear import grouped_operands
from halfbyte.recipes import recipe
from halfbyte.train import PrecisionConfig, build_precision_manifest, phases
from halfbyte.train.run_presets import run_config

GATE = "layers/mlp/expert_gate"


def config_of(name, backend, mlp):
    base = run_config("qwen3-30b-a3b")
    model = base.model.replace(layers=2, embed=256, mlp=mlp, experts=8)
    return dataclasses.replace(
        base, model=model, recipe=name, mesh="fsdp=1", precision=PrecisionConfig(backend=backend)
    )


def wide(chosen):
    """The same with blocks of 256."""
    policies = {role: getattr(chosen, role) for role in ("fprop_x", "wgrad_x", "dgrad_dy", "wgrad_dy")}
    longer = {
        role: dataclasses.replace(
            p, hadamard=False, format=dataclasses.replace(p.format, name="long", block=256, hardware_unit=None)
        )
        for role, p in policies.items()
    }
    return dataclasses.replace(chosen, name="long", **longer)


@pytest.mark.slow(fast_cases=["gb300-nvfp4-emulated-384-None-False"])
@pytest.mark.parametrize("where, name, backend, mlp, down, native", [
    ("gb300", "nvfp4", "auto", 384, None, True), ("b200", "nvfp4_no_rht", "auto", 384, None, True),
    ("gb300", "nvfp4", "emulated", 384, None, False), ("gb300", "nvfp4", "auto", 320, None, False),
    ("gb300", "mxfp8", "auto", 384, None, False), ("h200", "nvfp4", "auto", 384, None, False),
    ("gb300", "nvfp4", "auto", 384, wide, False),  # down's runs make all tiles of the layer longer
])  # fmt: skip
def test_native_experts_of_the_manifest_get_codes(where, name, backend, mlp, down, native):
    config, gpu = config_of(name, backend, mlp), device_by_name(where)
    (phase,) = phases(config)
    resolved, chosen = phase.resolved(config), recipe(name)
    recipes = [chosen, chosen, down(chosen) if down else chosen]
    of_experts = {f"layers/mlp/{site}": each for site, each in zip(EXPERT_SITES, recipes, strict=True)}
    segments = tuple(dataclasses.replace(s, recipes={**s.recipes, **of_experts}) for s in resolved.segments)
    resolved = dataclasses.replace(resolved, segments=segments)
    manifest = build_precision_manifest(config, resolved, phase.recipe, seq=config.seq, device=gpu)
    (gate,) = (site for site in manifest.sites if site.path == GATE)

    def operands(x, w, dy, counts):
        tile, rows = moe_tile_layout(config.model, x.shape[0] // 16, recipes)
        x, dy = (jnp.zeros((rows, each.shape[1]), each.dtype) for each in (x, dy))
        tiles = dataclasses.replace(ExpertTiles.from_counts(counts, rows, tile), backend=backend)
        return grouped_operands(x, w, dy, tiles, recipe=chosen, key=jax.random.key(0))

    shapes = ((512, 256), "bfloat16"), ((8, 256, mlp), "float32"), ((512, mlp), "bfloat16"), ((8,), "int32")
    with ops.compile_for(gpu):
        found = jax.eval_shape(operands, *(jax.ShapeDtypeStruct(*each) for each in shapes))
    codes = {operand.scales is not None for operand in found.values()}
    assert codes == {gemm.multiplied_by == "native" for gemm in gate.gemms.values()} == {native}
