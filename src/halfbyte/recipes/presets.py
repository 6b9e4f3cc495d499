"""The published recipes, each written as what it changes in its neighbour."""

from __future__ import annotations

import dataclasses
import difflib

from halfbyte.formats import E2M1, FP8, FP8_E5M2, MXFP4, MXFP4_FLOOR, MXFP8, MXFP8_FLOOR, NVFP4, BlockFormat
from halfbyte.recipe.blends import blend, split_blend
from halfbyte.recipe.operands import GEMMS, GRADIENTS, ROLES, WEIGHTS, Recipe
from halfbyte.recipe.own import from_package, is_own, own_recipe

_PRESETS: dict[str, Recipe] = {}
_NEIGHBOUR: dict[str, str] = {}

# No published format: E2M1 as FP8 is scaled, so that most of a tensor rounds to zero.
FP4_ONE_SCALE = BlockFormat("fp4_one_scale", E2M1, None, FP8.scale)

# MaxText's names for the same recipes, so that a MaxText user's command carries over.
_ALIASES = {
    "te_no_quant": "bf16",
    "te_fp8_currentscaling": "fp8",
    "te_fp8_delayedscaling": "fp8_delayed",
    "te_mxfp8": "mxfp8",
    "te_nvfp4": "nvfp4",
    "te_nvfp4_no_rht": "nvfp4_no_rht",
}

# A recipe of earlier versions -> what to do instead.
REMOVED = {"averis": "nvfp4_no_rht is the nearest recipe"}


def preset(name: str, base: Recipe, description: str, changes: dict) -> Recipe:
    made = dataclasses.replace(base, name=name, description=description, **changes)
    _PRESETS[name], _NEIGHBOUR[name] = made, base.name
    return made


def _formats(base: Recipe, format: BlockFormat, gradient: BlockFormat) -> dict:
    return {
        role: dataclasses.replace(operand, format=gradient if role in GRADIENTS else format)
        for role, operand in base.operands().items()
    }


bf16 = Recipe("bf16", description="no quantization: bfloat16 operands, float32 accumulation")
_PRESETS["bf16"] = bf16

fp8 = preset(
    "fp8", bf16, "one current scale a tensor: E4M3 forward, E5M2 for the gradient dy", _formats(bf16, FP8, FP8_E5M2)
)
mxfp8 = preset(
    "mxfp8", fp8, "blocks of 32, E8M0 scales rounded up as Transformer Engine does, E4M3", _formats(fp8, MXFP8, MXFP8)
)
mxfp8_floor = preset(
    "mxfp8_floor",
    mxfp8,
    "mxfp8 with scales rounded down, the rule of the OCP text: block maxima may saturate",
    mxfp8.with_operands(ROLES, format=MXFP8_FLOOR),
)

nvfp4 = preset(
    "nvfp4",
    bf16,
    "the published recipe: 2D weight blocks, stochastic gradients, Hadamard in WGRAD",
    _formats(bf16, NVFP4, NVFP4)
    | {role: dataclasses.replace(bf16.fprop_w, format=NVFP4, block="2d") for role in WEIGHTS}
    | {
        "dgrad_dy": dataclasses.replace(bf16.dgrad_dy, format=NVFP4, rounding="stochastic"),
        "wgrad_x": dataclasses.replace(bf16.wgrad_x, format=NVFP4, hadamard=True),
        "wgrad_dy": dataclasses.replace(bf16.wgrad_dy, format=NVFP4, hadamard=True, rounding="stochastic"),
    },
)
nvfp4_no_rht = preset(
    "nvfp4_no_rht", nvfp4, "nvfp4 without the Hadamard transforms", nvfp4.with_operands(GEMMS["wgrad"], hadamard=False)
)
nvfp4_no_sr = preset(
    "nvfp4_no_sr", nvfp4, "nvfp4 with gradients rounded to nearest", nvfp4.with_operands(GRADIENTS, rounding="rne")
)
nvfp4_no_2d = preset(
    "nvfp4_no_2d",
    nvfp4,
    "nvfp4 with 1D weight blocks: fprop and dgrad see different weights",
    nvfp4.with_operands(WEIGHTS, block="1d"),
)
nvfp4_bf16_weights = preset(
    "nvfp4_bf16_weights",
    nvfp4,
    "nvfp4 with weights rounded to bfloat16 before they are quantized, as Transformer Engine does",
    nvfp4.with_operands(WEIGHTS, source="bfloat16"),
)
nvfp4_shared_scales = preset(
    "nvfp4_shared_scales",
    nvfp4,
    "nvfp4 with one weight scale for q, k and v and one for gate and up, as serving engines fuse them",
    {"shared_scales": True},
)
nvfp4_rht_everywhere = preset(
    "nvfp4_rht_everywhere",
    nvfp4,
    "nvfp4 with the Hadamard transform in all three GEMMs",
    nvfp4.with_operands(ROLES, hadamard=True),
)
nvfp4_sr_everywhere = preset(
    "nvfp4_sr_everywhere",
    nvfp4,
    "nvfp4 with all six operands rounded stochastically",
    nvfp4.with_operands(ROLES, rounding="stochastic"),
)
mxfp4 = preset(
    "mxfp4",
    nvfp4_no_2d,
    "the same ingredients on blocks of 32 with E8M0 scales, rounded up; they have no 2D form",
    nvfp4_no_2d.with_operands(ROLES, format=MXFP4),
)
mxfp4_floor = preset(
    "mxfp4_floor",
    mxfp4,
    "mxfp4 with scales rounded down, the rule of the OCP text: block maxima may saturate",
    mxfp4.with_operands(ROLES, format=MXFP4_FLOOR),
)
fp4_one_scale = preset(
    "fp4_one_scale",
    bf16,
    "broken on purpose: 4-bit elements under one scale a tensor, all rounded to nearest; a control that must fail",
    _formats(bf16, FP4_ONE_SCALE, FP4_ONE_SCALE),
)


def recipe(name: str) -> Recipe:
    """The recipe of that name, of that MaxText alias, of a blend (`nvfp4+bf16_backward`: nvfp4 forward only), of a file
    (`mine.py:half`), or of an installed package; ValueError with the nearest names if there is none."""
    if is_own(name):
        return own_recipe(name)
    mixed = split_blend(name)
    if mixed is not None:
        return blend(recipe(mixed[0]), recipe(mixed[1]), mixed[2])
    found = _PRESETS.get(_ALIASES.get(name, name))
    if found is None and (offered := from_package(name, "recipe")) is not None:
        # Configs and arms hold this name, whatever the package calls the recipe: it may be a preset's.
        return dataclasses.replace(as_recipe(offered, f"the package that offers {name}"), name=name)
    if name in REMOVED:
        raise ValueError(f"recipe {name} was removed; {REMOVED[name]}")
    if found is None:
        near = difflib.get_close_matches(name, [*_PRESETS, *_ALIASES], n=3, cutoff=0.4)
        hint = f"did you mean {', '.join(near)}? " if near else ""
        raise ValueError(f"no recipe named {name!r}; {hint}`halfbyte recipes` lists them all")
    return found


def as_recipe(value: Recipe | str, where: str) -> Recipe:
    """The recipe itself, or the one of that name; `where` begins the error if it is neither."""
    if isinstance(value, str):
        return recipe(value)
    if not isinstance(value, Recipe):
        raise TypeError(f"{where}: recipe must be a Recipe or a recipe's name, got {value!r}")
    return value


def recipe_names() -> list[str]:
    """Every preset's name, the simplest first."""
    order = ["bf16", "fp8", "mxfp8", "mxfp4"]
    return order + [name for name in _PRESETS if name not in order]


def aliases() -> dict[str, str]:
    """MaxText's name -> ours."""
    return dict(_ALIASES)


def neighbour(name: str) -> Recipe | None:
    """The recipe that the named preset is written as a change of; None for bf16."""
    base = _NEIGHBOUR.get(recipe(name).name)
    return None if base is None else _PRESETS[base]
