"""Policies as text: the value of `--policy`, or the content of a file.

    all_linear; layers[-4:]=bf16; mlp/down=mxfp8

Rules are separated by `;` or line breaks. Later rules are exceptions to earlier ones: the **last** rule that matches a
linear decides. A linear that no rule matches stays in bf16. A rule is WHERE or WHERE=RECIPE; without a recipe it takes
the run's.

    WHERE    a named policy (mlp, all_linear, mlp_mxfp8, paper, ...), or [layers[START:STOP]/]GLOB
    GLOB     attention/q, mlp/*, */down, *        under layers/, which may be left out; `*` crosses slashes
    START    a layer (negative: from the end) or a fraction with a point (0.25, -0.15); empty: the first
    STOP     the same, not included; empty: the last. layers[7] is one layer

`@FILE` reads the text from a file, in which `#` starts a comment.
"""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

from halfbyte.io import read_text
from halfbyte.recipes.layer_policy import (
    ATTENTION_PATTERNS,
    LAYERS,
    MIXED_POLICY_RECIPES,
    MLP_PATTERNS,
    LayerBound,
    Policy,
    Rule,
    named_rules,
    policy_names,
)
from halfbyte.recipes.operand_policy import Recipe
from halfbyte.recipes.presets import as_recipe
from halfbyte.recipes.presets import recipe as recipe_of
from halfbyte.recipes.user_recipes import (
    is_user_defined,
    load_entry_point,
    load_object_from_file,
    recipe_from_fields,
    recipe_to_text,
)

MAX_POLICY_BYTES = 64 << 10
LAYER_RANGE_PATTERN = re.compile(r"^layers\[([^\]]*)\](?:/(.+))?$")


def read_policy_text(text: str) -> str:
    """Returns the text of a policy. For `@FILE` it is the file without comments and blank lines, other text is returned
    unchanged."""
    if not text.startswith("@"):
        return text
    path = Path(text[1:])
    if not path.is_file():
        raise ValueError(f"policy: there is no file {path}; give rules (`mlp/*=nvfp4`), a name, or @FILE")
    lines = (line.partition("#")[0].strip() for line in read_text(path, most=MAX_POLICY_BYTES).splitlines())
    return "; ".join(line.rstrip(";").strip() for line in lines if line)


def policy(text: str, default: Recipe | str) -> Policy:
    """Returns the policy that `text` names or describes. Rules without a recipe have `default`."""
    default = as_recipe(default, "policy")
    if is_user_defined(text):
        return load_user_policy(text, default)
    plugin_value = load_entry_point(text, "policy")
    if plugin_value is not None:
        return _as_policy(plugin_value, text, default)
    rule_texts = [rule_text.strip() for rule_text in text.split(";") if rule_text.strip()]
    if not rule_texts:
        raise ValueError(f"policy is empty; give a name ({', '.join(policy_names())}) or rules such as mlp/*=nvfp4")
    rules = [
        rule for rule_text in rule_texts for rule in reversed(_rules(rule_text, default, alone=len(rule_texts) == 1))
    ]
    return Policy(text, tuple(reversed(rules)))  # the first match wins in a Policy, the last one in a text


def load_user_policy(text: str, default: Recipe) -> Policy:
    """Returns the policy that the text names by file or contains as JSON. A function in a file is called with the run's
    recipe."""
    if text.startswith("{"):
        values = json.loads(text)
        return Policy(values["name"], tuple(_read_rule(rule) for rule in values["rules"]))
    return _as_policy(load_object_from_file(text, "policy"), text, default)


def _as_policy(value: Any, text: str, default: Recipe) -> Policy:
    result = value(default) if callable(value) else value
    if not isinstance(result, Policy):
        raise ValueError(
            f"policy {text}: must be a halfbyte.Policy, or a function from a recipe to one, got {result!r}"
        )
    return result


def policy_to_text(value: Policy) -> str:
    """Returns the policy as JSON text, from which `policy` returns an equal one."""
    rules = [
        [rule.pattern, rule.recipe and json.loads(recipe_to_text(rule.recipe)), rule.layers] for rule in value.rules
    ]
    return json.dumps({"name": value.name, "rules": rules}, sort_keys=True)


def _read_rule(values: list[Any]) -> Rule:
    pattern, fields, layers = values
    return Rule(pattern, fields and recipe_from_fields(fields), layers and (layers[0], layers[1]))


def _rules(part: str, default: Recipe, *, alone: bool) -> list[Rule]:
    where, equals, name = (word.strip() for word in part.partition("="))
    if equals and not name:
        raise ValueError(f"policy: rule {part!r} names no recipe after '='")
    recipe = recipe_of(name) if name else default
    if where in MIXED_POLICY_RECIPES:
        attention_recipe = recipe_of(MIXED_POLICY_RECIPES[where]) if _is_4_bit(recipe) else recipe
        return [
            Rule(MLP_PATTERNS, recipe, implied=not alone),
            Rule(ATTENTION_PATTERNS, attention_recipe, implied=not alone),
        ]
    if where in policy_names():
        return [dataclasses.replace(rule, implied=not alone) for rule in named_rules(where, recipe)]
    match = LAYER_RANGE_PATTERN.match(where)
    if match:
        return [Rule(_under_layers(match[2] or "*"), recipe, _bounds(match[1], part))]
    if re.fullmatch(r"[\w*?/\[\]!-]+", where) and "layers[" not in where:
        if "/" not in where and "*" not in where:
            raise ValueError(
                f"no policy named {where!r}; the policies are {', '.join(policy_names())}, "
                "and rules have paths such as mlp/down, attention/*, layers[-4:]"
            )
        return [Rule(_under_layers(where), recipe)]
    raise ValueError(
        f"policy: cannot read rule {part!r}; a rule is WHERE=RECIPE with WHERE such as mlp/*, attention/q, "
        f"layers[-4:], layers[0:2]/mlp/down or {', '.join(policy_names())}"
    )


def _is_4_bit(recipe: Recipe) -> bool:
    element = recipe.fprop_x.format.element
    return element is not None and element.bits == 4


def _under_layers(glob: str) -> str:
    return glob if glob.startswith(LAYERS) else LAYERS + glob


def _bounds(text: str, part: str) -> tuple[LayerBound, LayerBound]:
    start, colon, stop = (word.strip() for word in text.partition(":"))
    first = _bound(start, part)
    if colon:
        return first, _bound(stop, part)
    if not isinstance(first, int):
        raise ValueError(f"policy: rule {part!r}: layers[...] takes one layer or START:STOP, got {text!r}")
    return first, None if first == -1 else first + 1


def _bound(word: str, part: str) -> LayerBound:
    if not word:
        return None
    try:
        return float(word) if "." in word else int(word)
    except ValueError:
        raise ValueError(
            f"policy: rule {part!r}: a bound is a layer (3, -4) or a fraction of the layers (0.25), got {word!r}"
        ) from None
