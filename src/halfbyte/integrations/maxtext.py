"""Halfbyte's recipes in MaxText's trainer, of which no file changes.

    python3 -m halfbyte.integrations.maxtext src/maxtext/configs/base.yml quantization=te_nvfp4 ...

is `python3 -m maxtext.trainers.pre_train.train` with every value `te_*` of `quantization` served by the recipe of that
name. `halfbyte_recipe=` (a name, or FILE.py:NAME) and `halfbyte_policy=` are taken out of the arguments. In a launcher
of one's own, call `install(policy="mlp")` before MaxText's `train.main`.

Three functions of MaxText are wrapped:

- `quantizations.configure_quantization` returns None for `te_*`: MaxText builds its model without Transformer Engine.
- `train.train_step` adds the step and each row's microbatch to the batch. MaxText passes neither to the loss function,
  and no state that reaches it changes at every step (scanned layers drop their counts of random numbers).
- `train.loss_fn` is `apply_recipe` of itself, with the key of that step and microbatch.
"""

import collections
import functools
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from halfbyte.ops.adapters import RewriteReport, apply_recipe
from halfbyte.recipes import (
    Policy,
    as_recipe,
    layer_key,
    maxtext_aliases,
    policy,
    policy_names,
    read_policy_text,
    recipe,
    step_key,
)

TRAIN, QUANTIZATIONS = "maxtext.trainers.pre_train.train", "maxtext.layers.quantizations"
SIGNATURES = {  # of MaxText 0.2.5
    (QUANTIZATIONS, "configure_quantization"): ("config", "quant_mode_str"),
    (TRAIN, "train_step"): (
        "model", "config", "state_mesh_shardings", "params_shardings", "state", "data", "dropout_rng",
    ),
    (TRAIN, "loss_fn"): ("model", "config", "data", "dropout_rng", "params", "sparsity_state", "is_train"),
}  # fmt: skip
PLACE = "halfbyte_step_and_microbatch"  # int32[batch, 2] in the batch
OPTIONS = ("halfbyte_recipe", "halfbyte_policy")
OTHER_POLICY = """\
  MaxText's own te_* recipes also quantize the attention projections
  (halfbyte_policy=all_linear); the default policy here is mlp, as in the
  published NVFP4 runs"""


@dataclass(frozen=True)
class Settings:
    """What `install` was called with. `recipe` None: the recipe that `quantization` names."""

    policy: str = "mlp"
    recipe: str | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        self.policy_of(self.recipe or "te_nvfp4")

    def recipe_of(self, config: Any) -> str | None:
        """Returns the recipe of this MaxText config, None if its `quantization` is MaxText's own."""
        name = str(getattr(config.quantization, "value", config.quantization) or "")
        if self.recipe is None and (not name.startswith("te_") or name == "te_no_quant"):
            return None
        if self.recipe is not None and name and not name.startswith("te_"):
            raise ValueError(
                f"halfbyte_recipe={self.recipe} and quantization={name}: a model has one quantization; remove one of "
                "the two"
            )
        for field in ("use_qwix_quantization", "enable_diloco"):
            if getattr(config, field, False):
                raise ValueError(f"{field}=true is not supported with Halfbyte's recipes; set {field}=false")
        if self.recipe is None and name not in maxtext_aliases():
            names = ", ".join(sorted(maxtext_aliases()))
            raise ValueError(f"quantization={name}: Halfbyte has no recipe of this name; use one of {names}")
        chosen = self.recipe or name
        as_recipe(chosen, "quantization").check_supported_outside_trainer(f"quantization={chosen}")
        return chosen

    def policy_of(self, name: str) -> Policy:
        """Returns the policy in the recipe `name`. Paths of its text are looked up below MaxText's `layers` scopes."""
        text = read_policy_text(self.policy)
        found = policy(text, recipe(name))
        if text in policy_names() or text.startswith("{") or ".py:" in text:
            return found
        named = {rule.pattern for known in policy_names() for rule in policy(known, recipe(name)).rules}
        rules = (
            rule
            if rule.pattern in named
            else replace(rule, pattern=f"*layers*/{rule.pattern.removeprefix('layers/')}*")
            for rule in found.rules
        )
        return Policy(found.name, tuple(rules))


def install(policy: str = "mlp", recipe: str | None = None, seed: int | None = None) -> None:
    """Wraps MaxText's functions; call it once, before MaxText's `train.main`.

    Args:
        policy: which linears are quantized: a name, rules (`mlp/*; layers[-2:]=bf16`), or @FILE.
        recipe: a recipe by name or as FILE.py:NAME; None for the one that MaxText's `quantization` names.
        seed: of the random bits; None for MaxText's `init_weights_seed`.

    Raises:
        ModuleNotFoundError: MaxText is not installed.
        ValueError: a function to be wrapped has other parameters than in the MaxText that this module was written for.
    """
    settings = Settings(policy, recipe, seed)
    functions = _check_signatures()
    wrappers = (_without_transformer_engine, _with_place, _rewritten)
    for ((module, name), original), wrap in zip(functions.items(), wrappers, strict=True):
        setattr(importlib.import_module(module), name, functools.wraps(original)(wrap(original, settings)))


def _check_signatures() -> dict[tuple[str, str], Callable[..., Any]]:
    """Returns MaxText's functions without the wrappers of an earlier `install`."""
    if importlib.util.find_spec("maxtext") is None:
        raise ModuleNotFoundError(
            "MaxText is not installed: run `pip install maxtext` with Python 3.12 or later (docs/from-maxtext.md)"
        )
    functions: dict[tuple[str, str], Any] = {}
    differences = []
    for (module, name), parameters in SIGNATURES.items():
        function = getattr(importlib.import_module(module), name, None)
        functions[module, name] = inspect.unwrap(function) if function else None
        found = tuple(inspect.signature(function).parameters) if function else None
        if found != parameters:
            has = "is missing" if found is None else f"takes ({', '.join(found)})"
            differences.append(f"{module}.{name} {has}, expected ({', '.join(parameters)})")
    if differences:
        raise ValueError(
            f"this MaxText is not known to Halfbyte: {'; '.join(differences)}; install maxtext==0.2.5, or a newer "
            "Halfbyte"
        )
    return functions


def _without_transformer_engine(configure: Callable[..., Any], settings: Settings) -> Callable[..., Any]:
    def configured(config: Any, *args: Any, **kwargs: Any) -> Any:
        return None if settings.recipe_of(config) else configure(config, *args, **kwargs)

    return configured


def _with_place(train_step: Callable[..., Any], settings: Settings) -> Callable[..., Any]:
    def placed(model: Any, config: Any, *arguments: Any, **rng: Any) -> Any:
        mesh, params, state, data, *rest = arguments
        if settings.recipe_of(config):
            rows = jnp.arange(data["inputs"].shape[0], dtype=jnp.int32)
            microbatch = rows % config.gradient_accumulation_steps  # MaxText reshapes to [rows, microbatches]
            step = jnp.full_like(rows, state.optimizer.step.get_value())
            data = {**data, PLACE: jnp.stack([step, microbatch], axis=1)}
        return train_step(model, config, mesh, params, state, data, *rest, **rng)

    return placed


def _rewritten(loss_fn: Callable[..., Any], settings: Settings) -> Callable[..., Any]:
    shown: set[str] = set()

    def rewritten(
        model: Any, config: Any, data: Mapping[str, Any], dropout_rng: Any, params: Any, sparsity_state: Any = None,
        is_train: bool = True,
    ) -> Any:  # fmt: skip
        name = settings.recipe_of(config)
        if name is None:
            return loss_fn(model, config, data, dropout_rng, params, sparsity_state, is_train)
        data = dict(data)
        place = data.pop(PLACE, None)
        if place is None and is_train:
            raise ValueError(
                "the loss function was called without a step, so all steps would round with the same random bits; "
                "Halfbyte supports MaxText's pre-training trainer (maxtext.trainers.pre_train.train)"
            )
        step, microbatch = (0, 0) if place is None else (place[0, 0], place[0, 1])
        seed = config.init_weights_seed if settings.seed is None else settings.seed
        key = layer_key(step_key(seed, step), microbatch)

        def loss(model: Any, data: Mapping[str, Any]) -> Any:
            return loss_fn(model, config, data, dropout_rng, params, sparsity_state, is_train)

        def show(report: RewriteReport) -> None:
            text = summarize_report(report, name, settings.policy)
            if text not in shown and jax.process_index() == 0:
                shown.add(text)
                print(text, file=sys.stderr, flush=True)

        return apply_recipe(loss, settings.policy_of(name), key=key, show=show)(model, data)

    return rewritten


def summarize_report(report: RewriteReport, name: str, policy: str) -> str:
    """Returns a line per kind of dot, layers of one name counted together: the recipe, or why it stays as it is."""
    groups: collections.Counter[tuple[bool, str, str]] = collections.Counter()
    for site in report.sites:
        where = re.sub(r"(?<=[/_])\d+(?=/)", "*", site.path.partition("#")[0]) if site.path else "(no weight)"
        parts = site.path and re.search(r"/(w[io]_\d+)/", site.path)  # the number is no layer's
        where = re.sub(r"/w[io]_\*/", f"/{parts[1]}/", where) if parts else where
        outcome = f"in {site.recipe}" if site.recipe else f"left: {_without_path(site.skip_reason)}"
        groups[not site.recipe, where, outcome + (f" ({site.forward_only})" if site.forward_only else "")] += (
            site.num_executions
        )
    head = f"halfbyte: recipe {name}, policy {policy}: {len(report.replaced)} dots replaced, {len(report.skipped)} left"
    lines = [f"  {where} x{count}: {outcome}" for (_, where, outcome), count in sorted(groups.items())]
    if not report.replaced:
        lines.append("  NO DOT RUNS IN THE RECIPE: this model trains in MaxText's own precision")
    return "\n".join([head, *lines, OTHER_POLICY])


def _without_path(reason: str) -> str:
    return re.sub(r"^no rule matches [^;]*", "no rule matches", reason)


def split_arguments(argv: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Returns MaxText's arguments, and the values of Halfbyte's own by name."""
    ours = {}
    for argument in argv:
        name, equals, value = argument.partition("=")
        if name in OPTIONS and equals and value:
            ours[name] = value
        elif name.startswith("halfbyte_"):
            raise ValueError(f"{argument}: the options are {' and '.join(f'{option}=' for option in OPTIONS)}")
    return [argument for argument in argv if not argument.startswith("halfbyte_")], ours


def main(argv: Sequence[str]) -> None:
    """Runs MaxText's trainer with Halfbyte's recipes."""
    try:
        theirs, ours = split_arguments(argv)
        install(ours.get("halfbyte_policy", "mlp"), ours.get("halfbyte_recipe"))
    except (ModuleNotFoundError, ValueError) as error:
        sys.exit(f"halfbyte: {error}")
    from absl import app

    app.run(importlib.import_module(TRAIN).main, argv=["train", *theirs])


if __name__ == "__main__":
    main(sys.argv[1:])
