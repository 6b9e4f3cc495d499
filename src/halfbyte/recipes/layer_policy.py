"""Layer policies: map the path and layer number of each linear to a recipe, resolved to layer segments before tracing.

The first rule that matches a linear wins; a linear that no rule matches stays in bf16. A segment is a run of
consecutive layers whose linears have the same recipes. The model runs one scan per segment, over parameters that stay
stacked.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from halfbyte.recipes.operand_policy import Recipe
from halfbyte.recipes.presets import as_recipe, bf16

LAYERS = "layers/"  # paths under this prefix are stacked [layers, ...]; all others exist once

LayerBound = int | float | None


class FrozenRecipeMap(dict[str, Recipe]):
    """Path -> recipe, hashable, so that a resolved policy can be a static argument of a jitted function."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def _frozen(self, *args: object, **kwargs: object) -> None:
        raise TypeError("a resolved policy does not change; resolve another Policy")

    __setitem__ = __delitem__ = update = pop = popitem = clear = setdefault = __ior__ = _frozen  # type: ignore[assignment]

    def __reduce__(self) -> tuple:
        return FrozenRecipeMap, (dict(self),)


@dataclass(frozen=True)
class Rule:
    """Assigns `recipe` to the linears whose path matches the glob `pattern`, in all layers or in `layers` (start,
    stop).

    A recipe may be given by name. None means bf16 in models of this package, and no change in other models (bf16 would
    round a float32 router).

    A bound is a layer number (negative: from the end), a float (that fraction of the layers, rounded; negative: from
    the end) or None. A rule with `layers` matches no linear outside the layers. `*` crosses slashes. A rule of a named
    policy is `implied`: it is no error if other rules decide all of its linears.
    """

    pattern: str
    recipe: Recipe | None
    layers: tuple[LayerBound, LayerBound] | None = None
    implied: bool = False

    def __post_init__(self) -> None:
        if self.recipe is not None:
            object.__setattr__(self, "recipe", as_recipe(self.recipe, f"rule {self.pattern!r}"))
        if self.layers is not None:
            if not isinstance(self.layers, tuple) or len(self.layers) != 2:
                raise ValueError(f"rule {self.pattern!r}: layers must be (start, stop) or None, got {self.layers!r}")
            for bound in self.layers:
                if isinstance(bound, float) and not -1.0 <= bound <= 1.0:
                    raise ValueError(f"rule {self.pattern!r}: a fraction of the layers lies in -1..1, got {bound}")

    def matches(self, path: str) -> bool:
        """Returns True if the path matches the pattern, whatever the layer."""
        return fnmatch.fnmatchcase(path, self.pattern)

    def layer_range(self, num_layers: int) -> range:
        """Returns the layers that the rule covers in a model of `num_layers`."""
        start, stop = self.layers or (None, None)
        return range(num_layers)[slice(_layer(start, num_layers), _layer(stop, num_layers))]


@dataclass(frozen=True)
class LayerSegment:
    """Layers start..stop-1, and path -> recipe of their linears."""

    start: int
    stop: int
    recipes: FrozenRecipeMap


@dataclass(frozen=True)
class ResolvedPolicy:
    """A policy applied to one model: layer segments, and path -> recipe of the linears outside the layers."""

    policy: str
    segments: tuple[LayerSegment, ...]
    non_layer_recipes: FrozenRecipeMap

    def recipe_at(self, path: str, layer: int | None = None) -> Recipe:
        """Returns the recipe of one linear. `layer` is None outside the layers."""
        if layer is None:
            return self.non_layer_recipes[path]
        return next(s.recipes[path] for s in self.segments if s.start <= layer < s.stop)

    def __str__(self) -> str:
        segment_texts = [f"layers {s.start}..{s.stop - 1}: {_summary(s.recipes)}" for s in self.segments]
        outside = [f"outside: {_summary(self.non_layer_recipes)}"] * bool(self.non_layer_recipes)
        return "; ".join(segment_texts + outside)


@dataclass(frozen=True)
class Policy:
    """Rules in order: the first match wins, and a linear that no rule matches stays in bf16."""

    name: str
    rules: tuple[Rule, ...]

    def __str__(self) -> str:
        """Returns the name and a line per rule: pattern, layers and recipe."""
        lines = [f"policy {self.name}: the first match decides, bf16 elsewhere"]
        width = max((len(rule.pattern) for rule in self.rules), default=0)
        for rule in self.rules:
            start, stop = rule.layers or (None, None)
            bounds = ":".join("" if bound is None else str(bound) for bound in (start, stop))
            layers_text = "all layers" if rule.layers is None else f"layers[{bounds}]"
            lines.append(f"  {rule.pattern:<{width}}  {layers_text}: {rule.recipe.name if rule.recipe else 'bf16'}")
        return "\n".join(lines)

    def rule_for(self, path: str, layer: int | None, num_layers: int) -> Rule | None:
        """Returns the rule that decides one linear, None for bf16. `layer` is None outside the layers."""
        for rule in self.rules:
            covers_layer = rule.layers is None or (layer is not None and layer in rule.layer_range(num_layers))
            if covers_layer and rule.matches(path):
                return rule
        return None

    def resolve(self, paths: Sequence[str], num_layers: int) -> ResolvedPolicy:
        """Resolve the policy for linears with these paths. Raises ValueError for a rule that decides nothing."""
        layered = [path for path in paths if path.startswith(LAYERS)]
        sites: list[tuple[str, int | None]] = [(path, layer) for layer in range(num_layers) for path in layered]
        sites += [(path, None) for path in paths if not path.startswith(LAYERS)]
        rules = {site: self.rule_for(*site, num_layers) for site in sites}
        self._refuse_idle_rules(set(rules.values()), paths, num_layers)

        recipes = {site: (rule and rule.recipe) or bf16 for site, rule in rules.items()}
        by_layer = [FrozenRecipeMap({path: recipes[path, layer] for path in layered}) for layer in range(num_layers)]
        outside = FrozenRecipeMap({path: recipe for (path, layer), recipe in recipes.items() if layer is None})
        return ResolvedPolicy(self.name, tuple(_segments(by_layer)), outside)

    def _refuse_idle_rules(self, used: set[Rule | None], paths: Sequence[str], num_layers: int) -> None:
        for rule in self.rules:
            if rule in used:
                continue
            matched = [path for path in paths if rule.matches(path)]
            if not matched:
                reason = f"no linear has such a path; the paths are {', '.join(paths)}"
            elif rule.layers is not None and not rule.layer_range(num_layers):
                reason = f"its layers {rule.layers} are none of the model's {num_layers}"
            elif rule.implied:
                continue
            else:
                reason = f"other rules decide every linear that it matches ({', '.join(matched)})"
            raise ValueError(
                f"policy {self.name!r}: rule {rule.pattern!r} matches nothing: {reason}; change or remove the rule"
            )
        quantizing_rules = {rule for rule in self.rules if rule.recipe and rule.recipe.quantized}
        if quantizing_rules and not quantizing_rules & used:
            raise ValueError(
                f"policy {self.name!r} leaves nothing to quantize in {num_layers} layers: its other rules decide every "
                "linear; narrow them, or ask for the recipe bf16"
            )


# The paper's long runs keep the first 2 and the last 8 of 62 blocks in bf16 (arXiv 2509.25149).
PAPER_LAYERS = (2, -0.13)
MLP_PATTERNS, ATTENTION_PATTERNS = "layers/mlp/*", "layers/attention/*"
_POLICIES: dict[str, tuple[tuple[str, tuple[LayerBound, LayerBound] | None], ...]] = {
    "mlp": ((MLP_PATTERNS, None),),
    "all_linear": ((MLP_PATTERNS, None), (ATTENTION_PATTERNS, None)),
    "paper": ((MLP_PATTERNS, PAPER_LAYERS), (ATTENTION_PATTERNS, PAPER_LAYERS)),
    # Attention projections and the last 15% of blocks in bf16 (arXiv 2604.12374).
    "nemotron3": ((MLP_PATTERNS, (None, -0.15)),),
    "experts": (("layers/mlp/expert_*", None),),
}

MIXED_POLICY_RECIPES = {"mlp_mxfp8": "mxfp8", "mlp_fp8": "fp8"}
"""Policy -> recipe of its attention linears under a 4-bit recipe. Under any other recipe they have that of the MLP."""


def named_rules(name: str, recipe: Recipe) -> tuple[Rule, ...]:
    """Returns the rules of a named policy with its linears in `recipe`: `mlp` (as published; with experts these),
    `experts`, `all_linear`, `paper` (all linears except those of the first 2 and the last round(0.13 L) layers), or
    `nemotron3` (the MLP except that of the last round(0.15 L) layers)."""
    if name not in _POLICIES:
        raise ValueError(f"no policy named {name!r}; the policies are {', '.join(_POLICIES)}")
    return tuple(Rule(pattern, recipe, layers) for pattern, layers in _POLICIES[name])


def policy_names() -> list[str]:
    """Returns the name of every policy, the default first."""
    return [*_POLICIES, *MIXED_POLICY_RECIPES]


def _layer(bound: LayerBound, num_layers: int) -> int | None:
    """Returns a bound as a layer number. A fraction from the end is converted to a number from the front, because a
    negative one that rounds to 0 must mean the end."""
    if not isinstance(bound, float):
        return bound
    count = round(abs(bound) * num_layers)
    return num_layers - count if bound < 0 else count


def _segments(by_layer: list[FrozenRecipeMap]) -> Iterator[LayerSegment]:
    start = 0
    for layer in range(1, len(by_layer) + 1):
        if layer == len(by_layer) or by_layer[layer] != by_layer[start]:
            yield LayerSegment(start, layer, by_layer[start])
            start = layer


def _summary(recipes: FrozenRecipeMap) -> str:
    names: dict[str, list[str]] = {}
    for path, recipe in recipes.items():
        names.setdefault(recipe.name, []).append(path.removeprefix(LAYERS))
    return ", ".join(f"{name} ({' '.join(paths)})" for name, paths in names.items())
