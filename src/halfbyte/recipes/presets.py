"""Published recipes by name, each derived from a similar one, and recipes that combine the operands of two.

`nvfp4+bf16_backward` is nvfp4 with the backward operands of bf16: 4 bits in the forward pass only.
`bf16+nvfp4_weights` is bf16 with the weights of nvfp4: weight-only quantization as in serving (W4A16).
"""

from __future__ import annotations

import dataclasses
import difflib

from halfbyte.formats import E2M1, FP8, FP8_E5M2, MXFP4, MXFP4_FLOOR, MXFP8, MXFP8_FLOOR, NVFP4, BlockFormat
from halfbyte.recipes.operand_policy import FORWARD_ROLE_OF, GEMM_ROLES, GRADIENT_ROLES, ROLES, WEIGHT_ROLES, Recipe
from halfbyte.recipes.user_recipes import is_user_defined, load_entry_point, load_user_recipe

FORWARD_ROLES = ("fprop_x", "fprop_w")
BACKWARD_ROLES = ("dgrad_dy", "dgrad_w", "wgrad_x", "wgrad_dy")
PARTS = {
    "forward": FORWARD_ROLES,
    "backward": BACKWARD_ROLES,
    "weights": WEIGHT_ROLES,
    "both": FORWARD_ROLES + BACKWARD_ROLES,
}


def mix_recipes(base: Recipe, other: Recipe, part: str) -> Recipe:
    """Returns `base` with the forward, backward or weight operands (or both) of `other`.

    A backward operand that requantizes the forward one reads the tensor itself if the forward operand is not quantized.
    """
    if part == "both":
        return other
    if base.amax_history_len != other.amax_history_len:
        raise ValueError(
            f"{base.name} with the {part} of {other.name}: a history of maxima (delayed scaling) is that of all three "
            "tensors of a linear; take both parts of one recipe, or fp8"
        )
    operands = base.operands() | {role: getattr(other, role) for role in PARTS[part]}
    for backward, forward in FORWARD_ROLE_OF.items():
        if not operands[forward].format.quantized:
            operands[backward] = dataclasses.replace(operands[backward], source="as_is")
    remainder = (other if part == "forward" else base).remainder  # of x, in the forward pass
    return dataclasses.replace(base, name=f"{base.name}+{other.name}_{part}", remainder=remainder, **operands)


def parse_mixed_recipe(name: str) -> tuple[str, str, str] | None:
    """Returns (base, other, part) of a name in the form of `mix_recipes`, None for any other name."""
    base, plus, suffix = name.rpartition("+")
    other, _, part = suffix.rpartition("_")
    return (base, other, part) if plus and base and other and part in ("forward", "backward", "weights") else None


_PRESETS: dict[str, Recipe] = {}
_BASE_NAMES: dict[str, str] = {}

# Not a published format: E2M1 with the per-tensor scale of FP8, so that most of a tensor rounds to zero.
FP4_ONE_SCALE = BlockFormat("fp4_one_scale", E2M1, None, FP8.scale)

# MaxText's name of a recipe -> ours.
_ALIASES = {
    "te_no_quant": "bf16",
    "te_fp8_currentscaling": "fp8",
    "te_fp8_delayedscaling": "fp8_delayed",
    "te_mxfp8": "mxfp8",
    "te_nvfp4": "nvfp4",
    "te_nvfp4_no_rht": "nvfp4_no_rht",
}

# Recipe of earlier versions -> replacement, for the error.
REMOVED = {"averis": "nvfp4_no_rht is the nearest recipe"}


def derive_preset(name: str, base: Recipe, description: str, changes: dict) -> Recipe:
    """Register and return a preset: `base` with `changes`."""
    derived = dataclasses.replace(base, name=name, description=description, **changes)
    _PRESETS[name], _BASE_NAMES[name] = derived, base.name
    return derived


def _formats(base: Recipe, format: BlockFormat, gradient: BlockFormat) -> dict:
    return {
        role: dataclasses.replace(operand, format=gradient if role in GRADIENT_ROLES else format)
        for role, operand in base.operands().items()
    }


bf16 = Recipe("bf16", description="no quantization: bfloat16 operands, float32 accumulation")
_PRESETS["bf16"] = bf16

fp8 = derive_preset(
    "fp8", bf16, "one current scale a tensor: E4M3 forward, E5M2 for the gradient dy", _formats(bf16, FP8, FP8_E5M2)
)
mxfp8 = derive_preset(
    "mxfp8", fp8, "blocks of 32, E8M0 scales rounded up as Transformer Engine does, E4M3", _formats(fp8, MXFP8, MXFP8)
)
mxfp8_floor = derive_preset(
    "mxfp8_floor",
    mxfp8,
    "mxfp8 with scales rounded down, the rule of the OCP text: block maxima may saturate",
    mxfp8.with_operands(ROLES, format=MXFP8_FLOOR),
)

nvfp4 = derive_preset(
    "nvfp4",
    bf16,
    "the published recipe: 2D weight blocks, stochastic gradients, Hadamard in WGRAD",
    _formats(bf16, NVFP4, NVFP4)
    | {role: dataclasses.replace(bf16.fprop_w, format=NVFP4, block="2d") for role in WEIGHT_ROLES}
    | {
        "dgrad_dy": dataclasses.replace(bf16.dgrad_dy, format=NVFP4, rounding="stochastic"),
        "wgrad_x": dataclasses.replace(bf16.wgrad_x, format=NVFP4, hadamard=True),
        "wgrad_dy": dataclasses.replace(bf16.wgrad_dy, format=NVFP4, hadamard=True, rounding="stochastic"),
    },
)
nvfp4_no_rht = derive_preset(
    "nvfp4_no_rht",
    nvfp4,
    "nvfp4 without the Hadamard transforms",
    nvfp4.with_operands(GEMM_ROLES["wgrad"], hadamard=False),
)
nvfp4_no_sr = derive_preset(
    "nvfp4_no_sr", nvfp4, "nvfp4 with gradients rounded to nearest", nvfp4.with_operands(GRADIENT_ROLES, rounding="rne")
)
nvfp4_no_2d = derive_preset(
    "nvfp4_no_2d",
    nvfp4,
    "nvfp4 with 1D weight blocks: fprop and dgrad see different weights",
    nvfp4.with_operands(WEIGHT_ROLES, block="1d"),
)
nvfp4_bf16_weights = derive_preset(
    "nvfp4_bf16_weights",
    nvfp4,
    "nvfp4 with weights rounded to bfloat16 before they are quantized, as Transformer Engine does",
    nvfp4.with_operands(WEIGHT_ROLES, source="bfloat16"),
)
nvfp4_shared_scales = derive_preset(
    "nvfp4_shared_scales",
    nvfp4,
    "nvfp4 with one weight scale for q, k and v and one for gate and up, as serving engines fuse them",
    {"shared_scales": True},
)
nvfp4_rht_everywhere = derive_preset(
    "nvfp4_rht_everywhere",
    nvfp4,
    "nvfp4 with the Hadamard transform in all three GEMMs",
    nvfp4.with_operands(ROLES, hadamard=True),
)
nvfp4_sr_everywhere = derive_preset(
    "nvfp4_sr_everywhere",
    nvfp4,
    "nvfp4 with all six operands rounded stochastically",
    nvfp4.with_operands(ROLES, rounding="stochastic"),
)
mxfp4 = derive_preset(
    "mxfp4",
    nvfp4_no_2d,
    "the same ingredients on blocks of 32 with E8M0 scales, rounded up; they have no 2D form",
    nvfp4_no_2d.with_operands(ROLES, format=MXFP4),
)
mxfp4_floor = derive_preset(
    "mxfp4_floor",
    mxfp4,
    "mxfp4 with scales rounded down, the rule of the OCP text: block maxima may saturate",
    mxfp4.with_operands(ROLES, format=MXFP4_FLOOR),
)
fp4_one_scale = derive_preset(
    "fp4_one_scale",
    bf16,
    "broken on purpose: 4-bit elements under one scale a tensor, all rounded to nearest; a control that must fail",
    _formats(bf16, FP4_ONE_SCALE, FP4_ONE_SCALE),
)


def recipe(name: str) -> Recipe:
    """Returns the recipe `name`; the ValueError for an unknown name suggests the nearest ones.

    A name is a preset, a MaxText alias, a mix (`nvfp4+bf16_backward`: nvfp4 forward only), a recipe in a file
    (`mine.py:half`), or a recipe of an installed package.
    """
    if is_user_defined(name):
        return load_user_recipe(name)
    mixed = parse_mixed_recipe(name)
    if mixed is not None:
        return mix_recipes(recipe(mixed[0]), recipe(mixed[1]), mixed[2])
    preset = _PRESETS.get(_ALIASES.get(name, name))
    if preset is None and (plugin_value := load_entry_point(name, "recipe")) is not None:
        # Configs and arms store this name. The recipe's name inside the package may be that of a preset.
        return dataclasses.replace(as_recipe(plugin_value, f"the package that offers {name}"), name=name)
    if name in REMOVED:
        raise ValueError(f"recipe {name} was removed; {REMOVED[name]}")
    if preset is None:
        suggestions = difflib.get_close_matches(name, [*_PRESETS, *_ALIASES], n=3, cutoff=0.4)
        hint = f"did you mean {', '.join(suggestions)}? " if suggestions else ""
        raise ValueError(f"no recipe named {name!r}; {hint}`halfbyte recipes` lists them all")
    return preset


def as_recipe(value: Recipe | str, where: str) -> Recipe:
    """Returns a recipe unchanged, or the one with that name. The error for any other value starts with `where`."""
    if isinstance(value, str):
        return recipe(value)
    if not isinstance(value, Recipe):
        raise TypeError(f"{where}: recipe must be a Recipe or a recipe's name, got {value!r}")
    return value


def recipe_names() -> list[str]:
    """Returns the names of the presets, the simplest first."""
    order = ["bf16", "fp8", "mxfp8", "mxfp4"]
    return order + [name for name in _PRESETS if name not in order]


def maxtext_aliases() -> dict[str, str]:
    """Returns MaxText's name of each recipe -> ours."""
    return dict(_ALIASES)


def base_recipe(name: str) -> Recipe | None:
    """Returns the preset from which the named one is derived, None for bf16."""
    base = _BASE_NAMES.get(recipe(name).name)
    return None if base is None else _PRESETS[base]
