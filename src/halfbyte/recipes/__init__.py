"""Recipes (how the six operands of a linear are quantized), policies (which linear has which recipe) and PRNG keys."""

import sys
from types import ModuleType

from halfbyte.recipes.layer_policy import (
    ATTENTION_PATTERNS,
    MLP_PATTERNS,
    FrozenRecipeMap,
    LayerSegment,
    Policy,
    ResolvedPolicy,
    Rule,
    policy_names,
)
from halfbyte.recipes.literature_presets import LEAGUE
from halfbyte.recipes.operand_policy import (
    FORWARD_ROLE_OF,
    GEMM_ROLES,
    GRADIENT_ROLES,
    ROLES,
    WEIGHT_ROLES,
    OperandPolicy,
    Recipe,
    recipe_diff,
)
from halfbyte.recipes.policy_syntax import policy, policy_to_text, read_policy_text
from halfbyte.recipes.presets import PARTS, as_recipe, base_recipe, maxtext_aliases, mix_recipes, recipe, recipe_names
from halfbyte.recipes.prng_keys import (
    RANDOM_STREAMS,
    LinearKey,
    layer_key,
    role_key,
    signs_key,
    site_key,
    site_keys,
    step_key,
    stream_key_words,
)
from halfbyte.recipes.user_recipes import is_user_defined, pin_to_digest, recipe_to_text


class _CallableModule(ModuleType):
    """Makes the package callable: `halfbyte.recipes(name)` is `recipe(name)`."""

    def __call__(self, name: str) -> Recipe:
        return recipe(name)


sys.modules[__name__].__class__ = _CallableModule
