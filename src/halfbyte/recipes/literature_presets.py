"""Presets from the literature after the published NVFP4 recipe, each defined by its difference from a similar preset.

docs/league.md has their equations and sources.
"""

from dataclasses import replace

from halfbyte import formats
from halfbyte.recipes.operand_policy import FORWARD_ROLE_OF, GRADIENT_ROLES, ROLES, WEIGHT_ROLES, OperandPolicy
from halfbyte.recipes.presets import BACKWARD_ROLES, FORWARD_ROLES, bf16, derive_preset, fp8, mxfp4, nvfp4

NOT_GRADIENTS = tuple(role for role in ROLES if role not in GRADIENT_ROLES)

nvfp4_1d_weights = derive_preset(
    "nvfp4_1d_weights",
    nvfp4,
    "nvfp4 with weights in blocks of 16, as activations: fprop and dgrad see different weights",
    nvfp4.with_operands(WEIGHT_ROLES, block="1d"),
)
nvfp4_unbiased = derive_preset(
    "nvfp4_unbiased",
    nvfp4,
    "nvfp4 whose stochastic gradients have the mean of the gradient: scales x 17/16, bytes at midpoints",
    nvfp4.with_operands(GRADIENT_ROLES, format=formats.NVFP4_1716, rounding="midpoint"),
)
nvfp4_row = derive_preset(
    "nvfp4_row",
    nvfp4_1d_weights,
    "nvfp4_1d_weights with a float32 scale for each row (token, output, feature) instead of one a tensor",
    nvfp4_1d_weights.with_operands(ROLES, format=formats.NVFP4_ROW),
)
nvfp4_4over6_mse = derive_preset(
    "nvfp4_4over6_mse",
    nvfp4_1d_weights,
    "activations and weights under the better of two scales a block: its maximum becomes 6 or 4, by squared error",
    nvfp4_1d_weights.with_operands(NOT_GRADIENTS, format=formats.NVFP4_46_MSE),
)
nvfp4_4over6_mae = derive_preset(
    "nvfp4_4over6_mae",
    nvfp4_4over6_mse,
    "the same by absolute error: Transformer Engine's measure",
    nvfp4_4over6_mse.with_operands(NOT_GRADIENTS, format=formats.NVFP4_46_MAE),
)
nvfp4_4over6_sr = derive_preset(
    "nvfp4_4over6_sr",
    nvfp4_4over6_mse,
    "four over six in all six operands; for gradients by the expected error of a stochastic rounding: unbiased",
    nvfp4_4over6_mse.with_operands(GRADIENT_ROLES, format=formats.NVFP4_46_SR, rounding="midpoint"),
)
ue5m3 = derive_preset(
    "ue5m3",
    nvfp4,
    "block scales in unsigned E5M3, which reach 2^-17; no Hadamard transform",
    nvfp4.with_operands(ROLES, format=formats.NVFP4_UE5M3, hadamard=False)
    | nvfp4.with_operands(GRADIENT_ROLES, format=formats.NVFP4_UE5M3, hadamard=False, rounding="midpoint"),
)
nvfp4_fwd_mxfp8_bwd = derive_preset(
    "nvfp4_fwd_mxfp8_bwd",
    nvfp4,
    "NVFP4 in the forward pass, MXFP8 in the backward pass",
    {role: OperandPolicy(formats.MXFP8) for role in BACKWARD_ROLES},
)
amd_mxfp4 = derive_preset(
    "amd_mxfp4",
    mxfp4,
    "mxfp4 with gradients to nearest: the Hadamard transform of wgrad, with fixed signs, is all that is added",
    mxfp4.with_operands(GRADIENT_ROLES, rounding="rne"),
)

_backward = OperandPolicy(formats.NVFP4_EDEN, rounding="away", hadamard=True, hadamard_size=128, signs="fresh")
quartet2 = derive_preset(
    "quartet2",
    bf16,
    "Quartet II: forward four over six; backward MS-EDEN, chance in the scales, 128-point Hadamard with fresh signs",
    {role: OperandPolicy(formats.NVFP4_QUARTET, rounding="away") for role in FORWARD_ROLES}
    | dict.fromkeys(BACKWARD_ROLES, _backward)
    | {role: replace(_backward, source="requantize_forward") for role in FORWARD_ROLE_OF},
)
_tetra = OperandPolicy(formats.NVFP4_TETRA_SR, rounding="midpoint", hadamard=True, signs="fresh")
tetrajet2 = derive_preset(
    "tetrajet2",
    bf16,
    "TetraJet-v2 without its outlier split: scales of 128 neighbours, all backward operands stochastic and transformed",
    {role: OperandPolicy(formats.NVFP4_TETRA) for role in FORWARD_ROLES}
    | dict.fromkeys(BACKWARD_ROLES, _tetra)
    | {role: replace(_tetra, source="requantize_forward") for role in FORWARD_ROLE_OF},
)

nvfp4_remainder = derive_preset(
    "nvfp4_remainder",
    nvfp4,
    "nvfp4 whose fprop multiplies x in two pieces, each in 4 bits: Q(x), and Q of what that leaves over",
    {"remainder": True},
)
halfbyte = derive_preset(
    "halfbyte",
    nvfp4_4over6_mse,
    "the league's best: four over six, x in two 4-bit pieces, dgrad and wgrad from the forward operands, unbiased dy",
    nvfp4_4over6_mse.with_operands(tuple(FORWARD_ROLE_OF), source="requantize_forward")
    | nvfp4_unbiased.with_operands(GRADIENT_ROLES)
    | {"remainder": True},
)
fp8_delayed = derive_preset(
    "fp8_delayed",
    fp8,
    "fp8 scaled by the largest magnitude of the 1,024 steps before: Transformer Engine's delayed scaling",
    {"amax_history_len": 1024},
)

LEAGUE = (
    nvfp4_1d_weights, nvfp4_unbiased, nvfp4_row, nvfp4_4over6_mse, nvfp4_4over6_mae, nvfp4_4over6_sr, ue5m3,
    nvfp4_fwd_mxfp8_bwd, amd_mxfp4, quartet2, tetrajet2, nvfp4_remainder, halfbyte, fp8_delayed,
)  # fmt: skip
"""All presets of this module."""
