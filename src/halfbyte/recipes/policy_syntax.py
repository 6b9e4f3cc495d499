"""Policies as text: what a person types after `--policy`, or keeps in a file.

    all_linear; layers[-4:]=bf16; mlp/down=mxfp8

Rules are separated by `;` or by lines, and read like a list of exceptions: the **last** one that matches a linear
decides. A linear that none matches stays in bf16. A rule is WHERE or WHERE=RECIPE; without a recipe it takes the run's.

    WHERE    a named policy (mlp, all_linear, mlp_mxfp8, paper, ...), or [layers[START:STOP]/]GLOB
    GLOB     attention/q, mlp/*, */down, *        under layers/, which may be left out; `*` crosses slashes
    START    a layer (negative: from the end) or a fraction with a point (0.25, -0.15); empty: the first
    STOP     the same, not included; empty: the last. layers[7] is one layer

`@FILE` is the text of a file; `#` begins a comment there.
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
    """The policy itself: `@FILE` is read, comments and blank lines left out; other text comes back as it is."""
    if not text.startswith("@"):
        return text
    path = Path(text[1:])
    if not path.is_file():
        raise ValueError(f"policy: there is no file {path}; give rules (`mlp/*=nvfp4`), a name, or @FILE")
    lines = (line.partition("#")[0].strip() for line in read_text(path, most=MAX_POLICY_BYTES).splitlines())
    return "; ".join(line.rstrip(";").strip() for line in lines if line)


def policy(text: str, default: Recipe | str) -> Policy:
    """The policy that `text` names or describes, rules without a recipe in `default`."""
    default = as_recipe(default, "policy")
    if is_user_defined(text):
        return load_user_policy(text, default)
    offered = load_entry_point(text, "policy")
    if offered is not None:
        return _as_policy(offered, text, default)
    parts = [part.strip() for part in text.split(";") if part.strip()]
    if not parts:
        raise ValueError(f"policy is empty; give a name ({', '.join(policy_names())}) or rules such as mlp/*=nvfp4")
    rules = [rule for part in parts for rule in reversed(_rules(part, default, alone=len(parts) == 1))]
    return Policy(text, tuple(reversed(rules)))  # a Policy's first match wins, a text's last


def load_user_policy(text: str, default: Recipe) -> Policy:
    """The policy that the text names by file or spells out; a function of a file is given the run's recipe."""
    if text.startswith("{"):
        values = json.loads(text)
        return Policy(values["name"], tuple(_read_rule(rule) for rule in values["rules"]))
    return _as_policy(load_object_from_file(text, "policy"), text, default)


def _as_policy(value: Any, text: str, default: Recipe) -> Policy:
    made = value(default) if callable(value) else value
    if not isinstance(made, Policy):
        raise ValueError(f"policy {text}: must be a halfbyte.Policy, or a function from a recipe to one, got {made!r}")
    return made


def policy_to_text(made: Policy) -> str:
    """The policy as text that `policy` turns back into an equal one."""
    rules = [
        [rule.pattern, rule.recipe and json.loads(recipe_to_text(rule.recipe)), rule.layers] for rule in made.rules
    ]
    return json.dumps({"name": made.name, "rules": rules}, sort_keys=True)


def _read_rule(values: list[Any]) -> Rule:
    pattern, fields, layers = values
    return Rule(pattern, fields and recipe_from_fields(fields), layers and (layers[0], layers[1]))


def _rules(part: str, default: Recipe, *, alone: bool) -> list[Rule]:
    where, equals, name = (word.strip() for word in part.partition("="))
    if equals and not name:
        raise ValueError(f"policy: rule {part!r} names no recipe after '='")
    chosen = recipe_of(name) if name else default
    if where in MIXED_POLICY_RECIPES:
        higher = recipe_of(MIXED_POLICY_RECIPES[where]) if _is_4_bit(chosen) else chosen
        return [Rule(MLP_PATTERNS, chosen, implied=not alone), Rule(ATTENTION_PATTERNS, higher, implied=not alone)]
    if where in policy_names():
        return [dataclasses.replace(rule, implied=not alone) for rule in named_rules(where, chosen)]
    span = LAYER_RANGE_PATTERN.match(where)
    if span:
        return [Rule(_under_layers(span[2] or "*"), chosen, _bounds(span[1], part))]
    if re.fullmatch(r"[\w*?/\[\]!-]+", where) and "layers[" not in where:
        if "/" not in where and "*" not in where:
            raise ValueError(
                f"no policy named {where!r}; the policies are {', '.join(policy_names())}, "
                "and rules have paths such as mlp/down, attention/*, layers[-4:]"
            )
        return [Rule(_under_layers(where), chosen)]
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
