"""A run directory as a model that can be generated from and scored: its config, verified weights, and tokenizer."""

import dataclasses
import math
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, SingleDeviceSharding

from halfbyte import data, models
from halfbyte.checkpoint import Checkpoints, DamagedCheckpoint, Restored
from halfbyte.evaluation import LanguageModel
from halfbyte.inputs import check_whole, read_json
from halfbyte.recipe import Recipe, recipe, step_key
from halfbyte.sharding import Rules, make_mesh, parse_mesh
from halfbyte.train import TrainConfig, jsonconfig, phases, resolve
from halfbyte.train.precision import phase_at


@dataclasses.dataclass(frozen=True)
class LoadedRun:
    """A run, its model at one step, and the recipe of its forward pass."""

    directory: Path
    config: TrainConfig
    model: LanguageModel
    step: int
    recipe: str

    def describe(self) -> str:
        """One line for people."""
        size = models.count_params(self.config.model)
        return f"{self.directory}: {self.config.model.name}, {size:,} parameters, step {self.step}, {self.recipe}"


def open_run(
    directory: str | Path, *, recipe_name: str = "", mesh: str = "", rules: Rules, step: int | None = None
) -> LoadedRun:
    """The newest whole checkpoint of the run (or that of `step`), on one device or on `mesh` by `rules`.

    The forward pass runs under the recipe that the run trained with at that step, or under `recipe_name`.
    """
    directory = Path(directory)
    config = read_config(directory)
    chosen = recipe(recipe_name) if recipe_name else None
    tokenizer, seq = read_tokenizer(directory, config)
    grid = some_mesh(mesh) if mesh else None
    models.check_mesh(config.model, grid, rules=rules)
    restored = restore_params(directory, config, mesh=grid, rules=rules, step=step)
    chosen = chosen or trained_with(config, restored.step)
    context = models.Context(
        policy=resolve(config.model, config.policy, chosen) if chosen.quantized else None,
        key=step_key(config.seed, restored.step),
        mesh=grid,
        rules=rules,
        backend=config.precision.backend,
        compute_dtype=jnp.dtype(config.precision.compute_dtype),
    )
    model = LanguageModel(config.model, restored.items["params"], tokenizer, context, seq)
    return LoadedRun(directory, config, model, restored.step, chosen.name)


def some_mesh(text: str) -> Mesh:
    """A mesh over as many of the local devices as `text` names: scoring need not use them all."""
    shape = parse_mesh(text)
    return make_mesh(shape, jax.local_devices()[: math.prod(shape.values())])


def read_config(directory: Path) -> TrainConfig:
    """config.json of a run directory."""
    path = directory / "config.json"
    if not path.is_file():
        what = "there is no such directory" if not directory.is_dir() else "it holds no config.json"
        raise ValueError(f"{directory} is not a run: {what}; `halfbyte train --run-dir {directory}` makes one")
    return jsonconfig.load(TrainConfig, path)


def trained_with(config: TrainConfig, step: int) -> Recipe:
    """The recipe under which the run took its step number `step`."""
    return phase_at(phases(config), min(max(step, 1), config.steps) - 1).recipe


def restore_params(
    directory: Path, config: TrainConfig, *, mesh: Mesh | None, rules: Rules, step: int | None
) -> Restored:
    """Weights alone, verified. A damaged newest checkpoint is named, and the one before it is used."""
    folder = directory / "checkpoints"
    if not folder.is_dir():
        raise ValueError(f"{directory} has no checkpoint yet; train it first (`halfbyte train --run-dir {directory}`)")
    abstract = models.abstract_params(config.model, mesh, rules)
    if mesh is None:
        here = SingleDeviceSharding(jax.local_devices()[0])
        abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here), abstract)
    store = Checkpoints(folder, say=lambda text: print(text, file=sys.stderr, flush=True))
    try:
        return _restore(store, directory, {"params": abstract}, step)
    finally:
        store.close()


def _restore(store: Checkpoints, directory: Path, abstract: dict[str, Any], step: int | None) -> Restored:
    if step is None:
        restored = store.restore_latest(abstract)
        if restored is None:
            raise ValueError(f"{directory} has no checkpoint yet; train it first")
        return restored
    if step not in store.steps():
        kept = ", ".join(map(str, store.steps())) or "none"
        raise ValueError(f"{directory} has no checkpoint of step {step}; it keeps {kept}")
    try:
        return store.restore(step, abstract)
    except DamagedCheckpoint as damage:
        raise ValueError(f"checkpoint {directory / 'checkpoints' / str(step)} is damaged: {damage}") from None


def read_tokenizer(directory: Path, config: TrainConfig) -> tuple[data.Tokenizer, int]:
    """(the run's tokenizer, the length it was trained on): from the run directory, else from its data."""
    facts, text = directory / "data.json", directory / "tokenizer.json"
    if facts.is_file() and text.is_file():
        stored = read_json(facts)
        try:
            tokenizer = data.load_tokenizer(text, eos=stored["eos"], bos=stored["bos"])
            check_whole("seq", stored["seq"], least=1)
        except (KeyError, TypeError) as error:
            raise ValueError(f"{facts}: not what a run writes ({error}); copy the run again") from None
        return tokenizer, stored["seq"]
    if config.data == "synthetic":
        raise ValueError(f"{directory} was trained on synthetic tokens, so there is no tokenizer to read text with")
    dataset = open_data(config)
    return dataset.tokenizer(), config.seq or dataset.seq_len


def open_data(config: TrainConfig) -> Any:
    """The data set of a run, as it was trained on."""
    from halfbyte.train import open_source

    return open_source(config).dataset
