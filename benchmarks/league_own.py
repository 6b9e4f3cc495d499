"""Recipes that the league's first results suggest, one for each question on docs/evidence/league/README.md."""

import dataclasses

from halfbyte.formats import NVFP4_46_MSE, NVFP4_1716
from halfbyte.recipe import AGAIN, GRADIENTS, ROLES, OperandPolicy, Recipe, recipe

nvfp4, plain = recipe("nvfp4"), OperandPolicy()


def changed(name: str, neighbour: Recipe, **operands: OperandPolicy) -> Recipe:
    return dataclasses.replace(neighbour, name=name, description="", **operands)


one_d = recipe("nvfp4_no_2d")
four_six = recipe("nvfp4_4over6_mse")
mixed = recipe("nvfp4+mxfp8_backward")
SAME_46 = changed(
    "same_4over6", four_six, **four_six.with_operands(tuple(AGAIN), source="forward"),
    **four_six.with_operands(GRADIENTS, format=NVFP4_1716, rounding="midpoint"),
)  # fmt: skip
OWN = (
    changed("same_mxfp8_bwd", mixed, **mixed.with_operands(tuple(AGAIN), source="forward")),
    SAME_46,
    changed("same_x", nvfp4, **nvfp4.with_operands(("wgrad_x",), source="forward")),
    changed("x_4over6", nvfp4, **nvfp4.with_operands(("fprop_x",), format=NVFP4_46_MSE)),
    changed("x_alone", nvfp4, fprop_w=plain, dgrad_w=plain),
    changed("w_alone", nvfp4, fprop_x=plain),
    dataclasses.replace(SAME_46, name="remainder_4over6", remainder=True),
    changed("nvfp4_bare", one_d, **one_d.with_operands(ROLES, rounding="rne", hadamard=False)),
)  # fmt: skip
