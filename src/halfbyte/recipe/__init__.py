"""Who is quantized, how, and with which random bits."""

import sys
from types import ModuleType

from halfbyte.recipe.blends import PARTS, blend
from halfbyte.recipe.keys import (
    DRAWN,
    LinearKey,
    layer_key,
    operand_words,
    role_key,
    signs_key,
    site_key,
    site_keys,
    step_key,
)
from halfbyte.recipe.layers import ATTENTION, MLP, Policy, RecipeMap, Resolved, Rule, Segment, policy_names
from halfbyte.recipe.league import LEAGUE
from halfbyte.recipe.operands import AGAIN, GEMMS, GRADIENTS, ROLES, WEIGHTS, OperandPolicy, Recipe, difference
from halfbyte.recipe.own import is_own, pin, spell_recipe
from halfbyte.recipe.presets import aliases, as_recipe, neighbour, recipe, recipe_names
from halfbyte.recipe.rules import policy, read_policy, spell_policy


class _CallableRoom(ModuleType):
    """`halfbyte.recipe` is this room and also a public function: calling the room calls the function."""

    def __call__(self, name: str) -> Recipe:
        return recipe(name)


sys.modules[__name__].__class__ = _CallableRoom
