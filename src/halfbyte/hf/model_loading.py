"""Opens a run directory or a Hugging Face folder as a model: its config, verified weights and tokenizer.

For generation, scoring and export (`open_model`), and for the initial weights of a run (`halfbyte train --init-from`).
"""

import dataclasses
import math
import shutil
import sys
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, SingleDeviceSharding

from halfbyte import data, models
from halfbyte.checkpoint import CheckpointManager, CorruptCheckpointError, RestoredCheckpoint
from halfbyte.data.tokenizer import MAX_TOKENIZER_BYTES, parse_tokenizer
from halfbyte.distributed import DEFAULT_RULES, LogicalAxisRules, make_mesh, parse_mesh
from halfbyte.evaluation import LanguageModel
from halfbyte.hf.exporter import TOKENIZER, folder_tokenizer
from halfbyte.hf.hf_config import config_from_hf
from halfbyte.hf.hf_folder import HF_CONFIG_FILE, SIDECAR_FILES, HfFolder, is_hf_folder, resolve_inside
from halfbyte.hf.import_model import MAX_DEFAULT_WINDOW, folder_config
from halfbyte.hf.load_weights import check_tensors, load_params, storage_description
from halfbyte.io import check_int, escape_control_chars, read_json, read_text
from halfbyte.models import Params
from halfbyte.recipes import Recipe, recipe, step_key
from halfbyte.recipes.user_recipes import check_program_unchanged
from halfbyte.train import TrainConfig, phases, resolve_policy
from halfbyte.train.precision_phases import phase_at
from halfbyte.train.preflight import check_fits_memory
from halfbyte.train.resume import guarded_changes, stored_config
from halfbyte.train.run_directory import ORIGIN, RunDirectory, open_run_directory
from halfbyte.train.run_identity import IMPORT_RECORD_FILE

DEFAULT_FOLDER_POLICY = "all_linear"
MAX_TRAINED_SEQ = 1 << 20  # accepted row length of a run, which is also its scoring window


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A model with the recipe of its forward pass, of a run at one step or of a folder (`run`, `step` are None)."""

    directory: Path
    run: RunDirectory | None
    model: LanguageModel
    step: int | None
    recipe: str

    @property
    def config(self) -> TrainConfig | None:
        """Returns the run's config; None for a folder."""
        return self.run.config if self.run else None

    @property
    def params(self) -> Any:
        """Returns the weights."""
        return self.model.params

    @property
    def tokenizer(self) -> Any:
        return self.model.tokenizer

    def describe(self) -> str:
        """Returns a one-line description."""
        size = models.count_params(self.model.config)
        step = "" if self.step is None else f"step {self.step}, "
        return escape_control_chars(
            f"{self.directory}: {self.model.config.name}, {size:,} parameters, {step}{self.recipe}"
        )


def open_model(
    directory: str | Path, *, recipe_name: str = "", mesh: str = "", rules: LogicalAxisRules, step: int | None = None,
    compute_dtype: str = "",
) -> LoadedModel:  # fmt: skip
    """Opens the model of a run or of a Hugging Face folder, on one device or on `mesh` by `rules`.

    `step`: checkpoint of the run; None: its newest complete one. The forward pass runs under `recipe_name`; without it,
    under the recipe that the run trained with at that step, or in bf16.
    """
    directory = Path(directory)
    ctx = models.ModelContext(mesh=mesh_over_local_devices(mesh) if mesh else None, rules=rules)
    if not is_hf_folder(directory):
        return _open_run(open_run_directory(directory), ctx, recipe_name, step, compute_dtype)
    if step is not None:
        raise ValueError(f"{directory} is a folder of one model; it has no --step")
    return _open_folder(directory, ctx, recipe_name, compute_dtype)


def _open_folder(directory: Path, ctx: models.ModelContext, recipe_name: str, compute_dtype: str) -> LoadedModel:
    """Opens a folder. NVFP4 weights are dequantized, so that bf16 gives the weight-only forward pass (W4A16)."""
    chosen = recipe(recipe_name or "bf16")
    with HfFolder(directory) as folder:
        config = config_from_hf(folder.config, escape_control_chars(directory.resolve().name))
        models.check_mesh(config, ctx.mesh, rules=ctx.rules)
        tokenizer = folder_tokenizer(folder)
        params = load_params(folder, config, mesh=ctx.mesh, rules=ctx.rules)
        stored = storage_description(folder)
    policy = resolve_policy(config, DEFAULT_FOLDER_POLICY, chosen) if chosen.quantized else None
    dtype = jnp.dtype(compute_dtype or "bfloat16")
    context = dataclasses.replace(ctx, policy=policy, key=step_key(0, 0), compute_dtype=dtype)
    model = LanguageModel(config, params, tokenizer, context, min(config.max_seq, MAX_DEFAULT_WINDOW))
    return LoadedModel(directory, None, model, None, f"{stored}, forward in {chosen.name}")


def _open_run(
    run: RunDirectory, ctx: models.ModelContext, recipe_name: str, step: int | None, compute_dtype: str
) -> LoadedModel:
    config = run.config
    chosen = recipe_at_step(config, 0, recipe_name) if recipe_name else None
    tokenizer, seq = read_tokenizer(run)
    models.check_mesh(config.model, ctx.mesh, rules=ctx.rules)
    restored = restore_params(run, mesh=ctx.mesh, rules=ctx.rules, step=step)
    chosen = chosen or recipe_at_step(config, restored.step, recipe_name)
    context = dataclasses.replace(
        ctx,
        policy=None if recipe_name and not chosen.quantized else resolve_policy(config.model, config.policy, chosen),
        key=step_key(config.seed, restored.step),
        backend=config.precision.backend,
        compute_dtype=jnp.dtype(compute_dtype or config.precision.compute_dtype),
    )
    model = LanguageModel(config.model, restored.items["params"], tokenizer, context, seq)
    return LoadedModel(run.path, run, model, restored.step, chosen.name)


def mesh_over_local_devices(text: str) -> Mesh:
    """Returns a mesh over the first local devices, as many as `text` names: scoring need not use them all."""
    shape = parse_mesh(text)
    return make_mesh(shape, jax.local_devices()[: math.prod(shape.values())])


def recipe_at_step(config: TrainConfig, step: int, name: str) -> Recipe:
    """Returns the named recipe; without a name, the recipe under which the run took step number `step`."""
    if not name:
        return phase_at(phases(config), min(max(step, 1), config.steps) - 1).recipe
    check_program_unchanged(config.recipe, name)
    return recipe(name)


def restore_params(
    run: RunDirectory, *, mesh: Mesh | None, rules: LogicalAxisRules, step: int | None
) -> RestoredCheckpoint:
    """Restores only the weights, verified together with the files of an imported model.

    A damaged newest checkpoint is reported, and the one before it is used.
    """
    directory, model = run.path, run.config.model
    abstract = models.abstract_params(model, mesh, rules)
    if mesh is None:
        on_device = SingleDeviceSharding(jax.local_devices()[0])
        abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=on_device), abstract)
    check_fits_memory(abstract)
    if (directory / IMPORT_RECORD_FILE).is_file():
        if step:
            raise ValueError(f"{directory} is an imported model; it has no checkpoint of step {step}")
        with HfFolder(directory / ORIGIN) as opened:
            check_tensors(opened, model)
            run.check_unmodified(origin=True)
            return RestoredCheckpoint(0, {"params": load_params(opened, model, mesh=mesh, rules=rules)}, {})
    folder = directory / "checkpoints"
    if not folder.is_dir():
        raise ValueError(f"{directory} has no checkpoint yet; train it first (`halfbyte train --run-dir {directory}`)")
    run.check_unmodified(origin=True)  # the small files of the imported model that initialized it
    name = run.identity.run if run.identity else None
    store = CheckpointManager(
        folder, run=name, say=lambda text: print(escape_control_chars(text), file=sys.stderr, flush=True)
    )
    try:
        restored = _restore(store, directory, {"params": abstract}, step)
    finally:
        store.close()
    _check_model(run, restored)
    return restored


def _check_model(run: RunDirectory, restored: RestoredCheckpoint) -> None:
    """Raises ValueError if the checkpoint's own config has another model than config.json, which may be unsealed."""
    changes = guarded_changes(stored_config(restored), run.config)
    if listed := [line for line in changes if line.startswith("model.")]:
        raise ValueError(
            f"{run.path}: the checkpoint of step {restored.step} is of another model than config.json says "
            f"({'; '.join(listed[:3])}); restore the file from a copy"
        )


def _restore(
    store: CheckpointManager, directory: Path, abstract: dict[str, Any], step: int | None
) -> RestoredCheckpoint:
    if step is None:
        restored = store.restore_latest(abstract)
        if restored is None:
            raise ValueError(f"{directory} has no checkpoint yet; train it first")
        return restored
    if step not in store.steps():
        steps = ", ".join(map(str, store.steps())) or "none"
        raise ValueError(f"{directory} has no checkpoint of step {step}; it keeps {steps}")
    try:
        return store.restore(step, abstract)
    except CorruptCheckpointError as damage:
        raise ValueError(f"checkpoint {directory / 'checkpoints' / str(step)} is damaged: {damage}") from None


def read_tokenizer(run: RunDirectory) -> tuple[data.Tokenizer, int]:
    """Returns the run's tokenizer and the row length of its training, from the run directory or else from its data."""
    facts, text = run.path / "data.json", run.path / "tokenizer.json"
    if facts.is_file() and text.is_file():
        stored = read_json(facts)
        try:
            tokenizer = data.load_tokenizer(text, eos=stored["eos"], bos=stored["bos"])
            check_int("seq", stored["seq"], least=1, most=MAX_TRAINED_SEQ)
        except (KeyError, TypeError) as error:
            raise ValueError(f"{facts}: not what a run writes ({error}); copy the run again") from None
        return tokenizer, stored["seq"]
    if run.config.data == "synthetic":
        raise ValueError(
            f"{run.path} has no tokenizer to read text with: it knows synthetic tokens, or was imported without one"
        )
    dataset = run.source().dataset
    return dataset.tokenizer(), run.config.seq or dataset.seq_len


def config_from_init(source: Path) -> TrainConfig:
    """Returns the base config for a run initialized from `source`: that run's, or defaults with the folder's model."""
    if not is_hf_folder(source):
        return open_run_directory(source).config
    with HfFolder(source) as folder:
        model = folder_config(folder)
    return TrainConfig(name=model.name, model=model, data="synthetic")


def params_from_init(source: Path, config: TrainConfig, mesh: Mesh, directory: Path) -> Params:
    """Returns the weights of `source` on the `mesh` of a run; ValueError for another model shape or tokenizer.

    Copies the small files of an imported model to the run `directory`, so that an export has them.
    """
    initial, model = config_from_init(source).model, config.model
    if dataclasses.replace(initial, name=model.name) != model:
        fields = [f.name for f in dataclasses.fields(initial) if getattr(initial, f.name) != getattr(model, f.name)]
        listed = ", ".join(f"{f} {getattr(initial, f)} -> {getattr(model, f)}" for f in fields if f != "name")
        raise ValueError(f"init_from {source}: the run's model is not the one whose weights it begins with: {listed}")
    check_tokenizers(source, config.data)
    params = _verified_params(source, model, mesh)
    if jax.process_index() == 0:
        _copy_import_files(source, directory)
    return params


def _verified_params(source: Path, model: models.LlamaConfig, mesh: Mesh) -> Params:
    """Loads the weights, which for a run verifies its sealed files as well."""
    if not is_hf_folder(source):
        restored = restore_params(open_run_directory(source), mesh=mesh, rules=DEFAULT_RULES, step=None)
        return cast(Params, restored.items["params"])
    models.check_mesh(model, mesh)
    with HfFolder(source) as folder:
        return load_params(folder, model, mesh=mesh)


def check_tokenizers(source: Path, spec: str) -> None:
    """Raises ValueError if the data of `spec` was prepared with another tokenizer than the model's."""
    file = source / TOKENIZER
    if spec == "synthetic" or not file.is_file():
        return
    dataset: Any = data.demo_dataset() if spec == "demo" else data.open_mixture(spec, verify="sizes")
    texts = (read_text(file, most=MAX_TOKENIZER_BYTES), dataset.tokenizer().text)
    first, second = (parse_tokenizer(text).get_vocab() for text in texts)
    if first != second:
        raise ValueError(
            f"init_from {source}: the data was prepared with another tokenizer than the model learnt, so its ids would "
            f"mean other words; prepare it with `halfbyte data prepare FILES --tokenizer {file} --out DIR`"
        )


def _copy_import_files(source: Path, directory: Path) -> None:
    origin = source if is_hf_folder(source) else source / ORIGIN
    if not (origin / HF_CONFIG_FILE).is_file() or (directory / ORIGIN).exists():
        return
    (directory / ORIGIN).mkdir()
    for name in (HF_CONFIG_FILE, *SIDECAR_FILES):
        if (origin / name).is_file():
            shutil.copyfile(resolve_inside(origin, name), directory / ORIGIN / name)
