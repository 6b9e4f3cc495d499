"""A run directory or a Hugging Face folder as a model that can be generated from, scored and exported: its config,
verified weights, and tokenizer.
"""

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
from halfbyte.inputs import check_whole, printable, read_json
from halfbyte.interchange.folder import Folder, is_folder
from halfbyte.interchange.hf_config import config_from_hf
from halfbyte.interchange.importing import LONGEST_WINDOW
from halfbyte.interchange.loading import check_tensors, load_params, stored_as
from halfbyte.interchange.tokenizer_files import folder_tokenizer
from halfbyte.recipe import Recipe, recipe, step_key
from halfbyte.recipe.own import refuse_changed
from halfbyte.sharding import Rules, make_mesh, parse_mesh
from halfbyte.train import TrainConfig, phases, resolve
from halfbyte.train.claim import IMPORTED
from halfbyte.train.precision import phase_at
from halfbyte.train.preflight import check_room
from halfbyte.train.reading import ORIGIN, RunDirectory, open_directory
from halfbyte.train.resume import guarded_changes, stored_config

FOLDER_POLICY = "all_linear"
LONGEST_TRAINED = 1 << 20  # tokens of a row, that a run may say it was trained on: windows of scoring are as long


@dataclasses.dataclass(frozen=True)
class LoadedRun:
    """A model and the recipe of its forward pass: of a run at one step, or of a folder (without `run` and `step`)."""

    directory: Path
    run: RunDirectory | None
    model: LanguageModel
    step: int | None
    recipe: str

    @property
    def config(self) -> TrainConfig | None:
        """The run's config."""
        return self.run.config if self.run else None

    @property
    def params(self) -> Any:
        """Its weights."""
        return self.model.params

    @property
    def tokenizer(self) -> Any:
        return self.model.tokenizer

    def describe(self) -> str:
        """One line for people."""
        size = models.count_params(self.model.config)
        step = "" if self.step is None else f"step {self.step}, "
        return printable(f"{self.directory}: {self.model.config.name}, {size:,} parameters, {step}{self.recipe}")


def open_model(
    directory: str | Path, *, recipe_name: str = "", mesh: str = "", rules: Rules, step: int | None = None,
    compute_dtype: str = "",
) -> LoadedRun:  # fmt: skip
    """The model of a run, at its newest whole checkpoint or at that of `step`, or of a Hugging Face folder; on one
    device or on `mesh` by `rules`. The forward pass runs under `recipe_name`; without it, under the recipe that the run
    trained with at that step, or in bf16.
    """
    directory = Path(directory)
    how = models.Context(mesh=some_mesh(mesh) if mesh else None, rules=rules)
    if not is_folder(directory):
        return _open_run(open_directory(directory), how, recipe_name, step, compute_dtype)
    if step is not None:
        raise ValueError(f"{directory} is a folder of one model; it has no --step")
    return _open_folder(directory, how, recipe_name, compute_dtype)


def _open_folder(directory: Path, how: models.Context, recipe_name: str, compute_dtype: str) -> LoadedRun:
    """NVFP4 weights are what their codes stand for, so that under bf16 the forward pass is the weight-only one
    (W4A16).
    """
    chosen = recipe(recipe_name or "bf16")
    with Folder(directory) as folder:
        config = config_from_hf(folder.config, printable(directory.resolve().name))
        models.check_mesh(config, how.mesh, rules=how.rules)
        tokenizer = folder_tokenizer(folder)
        params = load_params(folder, config, mesh=how.mesh, rules=how.rules)
        stored = stored_as(folder)
    policy = resolve(config, FOLDER_POLICY, chosen) if chosen.quantized else None
    dtype = jnp.dtype(compute_dtype or "bfloat16")
    context = dataclasses.replace(how, policy=policy, key=step_key(0, 0), compute_dtype=dtype)
    model = LanguageModel(config, params, tokenizer, context, min(config.max_seq, LONGEST_WINDOW))
    return LoadedRun(directory, None, model, None, f"{stored}, forward in {chosen.name}")


def _open_run(
    run: RunDirectory, how: models.Context, recipe_name: str, step: int | None, compute_dtype: str
) -> LoadedRun:
    config = run.config
    chosen = forward_recipe(config, 0, recipe_name) if recipe_name else None
    tokenizer, seq = read_tokenizer(run)
    models.check_mesh(config.model, how.mesh, rules=how.rules)
    restored = restore_params(run, mesh=how.mesh, rules=how.rules, step=step)
    chosen = chosen or forward_recipe(config, restored.step, recipe_name)
    context = dataclasses.replace(
        how,
        policy=None if recipe_name and not chosen.quantized else resolve(config.model, config.policy, chosen),
        key=step_key(config.seed, restored.step),
        backend=config.precision.backend,
        compute_dtype=jnp.dtype(compute_dtype or config.precision.compute_dtype),
    )
    model = LanguageModel(config.model, restored.items["params"], tokenizer, context, seq)
    return LoadedRun(run.path, run, model, restored.step, chosen.name)


def some_mesh(text: str) -> Mesh:
    """A mesh over as many of the local devices as `text` names: scoring need not use them all."""
    shape = parse_mesh(text)
    return make_mesh(shape, jax.local_devices()[: math.prod(shape.values())])


def forward_recipe(config: TrainConfig, step: int, name: str) -> Recipe:
    """The named recipe; without a name, that under which the run took its step number `step`."""
    if not name:
        return phase_at(phases(config), min(max(step, 1), config.steps) - 1).recipe
    refuse_changed(config.recipe, name)
    return recipe(name)


def restore_params(run: RunDirectory, *, mesh: Mesh | None, rules: Rules, step: int | None) -> Restored:
    """Weights alone, verified, and with them what came with an imported model. A damaged newest checkpoint is named,
    and the one before it is used."""
    directory, model = run.path, run.config.model
    abstract = models.abstract_params(model, mesh, rules)
    if mesh is None:
        here = SingleDeviceSharding(jax.local_devices()[0])
        abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here), abstract)
    check_room(abstract)
    if (directory / IMPORTED).is_file():
        if step:
            raise ValueError(f"{directory} is an imported model; it has no checkpoint of step {step}")
        with Folder(directory / ORIGIN) as opened:
            check_tensors(opened, model)
            run.refuse_changes(origin=True)
            return Restored(0, {"params": load_params(opened, model, mesh=mesh, rules=rules)}, {})
    folder = directory / "checkpoints"
    if not folder.is_dir():
        raise ValueError(f"{directory} has no checkpoint yet; train it first (`halfbyte train --run-dir {directory}`)")
    run.refuse_changes(origin=True)  # the small files of a model that it began with
    name = run.identity.run if run.identity else None
    store = Checkpoints(folder, run=name, say=lambda text: print(printable(text), file=sys.stderr, flush=True))
    try:
        restored = _restore(store, directory, {"params": abstract}, step)
    finally:
        store.close()
    _check_model(run, restored)
    return restored


def _check_model(run: RunDirectory, restored: Restored) -> None:
    """The model that the checkpoint's own record tells of is that of config.json, which may be in no seal."""
    changes = guarded_changes(stored_config(restored), run.config)
    if listed := [line for line in changes if line.startswith("model.")]:
        raise ValueError(
            f"{run.path}: the checkpoint of step {restored.step} is of another model than config.json says "
            f"({'; '.join(listed[:3])}); restore the file from a copy"
        )


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


def read_tokenizer(run: RunDirectory) -> tuple[data.Tokenizer, int]:
    """(the run's tokenizer, the length it was trained on): from the run directory, else from its data."""
    facts, text = run.path / "data.json", run.path / "tokenizer.json"
    if facts.is_file() and text.is_file():
        stored = read_json(facts)
        try:
            tokenizer = data.load_tokenizer(text, eos=stored["eos"], bos=stored["bos"])
            check_whole("seq", stored["seq"], least=1, most=LONGEST_TRAINED)
        except (KeyError, TypeError) as error:
            raise ValueError(f"{facts}: not what a run writes ({error}); copy the run again") from None
        return tokenizer, stored["seq"]
    if run.config.data == "synthetic":
        raise ValueError(
            f"{run.path} has no tokenizer to read text with: it knows synthetic tokens, or was imported without one"
        )
    dataset = run.source().dataset
    return dataset.tokenizer(), run.config.seq or dataset.seq_len
