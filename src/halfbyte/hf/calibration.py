"""Source of an export (a run or a folder), and calibration of its static activation scales on text (W4A4).

Calibration runs the model under its own recipe, one batch at a time, and takes the amax of each linear's input. A
`LinearObserver` sees the inputs of all linears except down, which is inside the fused MLP: its input is recomputed.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from halfbyte import models
from halfbyte.data.text_files import find_files
from halfbyte.evaluation import SCORING_RULES, TEXT_FORMAT, iter_examples, open_task
from halfbyte.formats import amax_of
from halfbyte.hf.exporter import EXPORT_DTYPES, TOKENIZER, ExportModel, folder_tokenizer
from halfbyte.hf.hf_folder import HfFolder, is_hf_folder
from halfbyte.hf.import_model import MAX_DEFAULT_WINDOW, folder_config
from halfbyte.hf.load_weights import load_params
from halfbyte.hf.model_loading import (
    DEFAULT_FOLDER_POLICY,
    mesh_over_local_devices,
    read_tokenizer,
    recipe_at_step,
    restore_params,
)
from halfbyte.hf.tensor_layouts import hf_tensors, weight_policy
from halfbyte.io import read_json
from halfbyte.models import LlamaConfig, ModelContext, Params, check_dense
from halfbyte.models.layer_scan import scan_layers
from halfbyte.models.linear_layers import apply_linears
from halfbyte.models.llama import embed_inputs, make_block_fn
from halfbyte.models.model_context import LayerContext
from halfbyte.ops.activation import ACTIVATIONS
from halfbyte.recipes import ResolvedPolicy, recipe
from halfbyte.train import TrainConfig, resolve_policy
from halfbyte.train.run_directory import ORIGIN, open_run_directory
from halfbyte.train.run_identity import IMPORT_RECORD_FILE

CALIBRATION_BATCH_ROWS = 8


@dataclass(frozen=True)
class ExportSource:
    """A model to export: its original `dtype`, its training config (None for a folder), step, and row length `seq`."""

    model: ExportModel
    dtype: str
    train_config: TrainConfig | None
    step: int
    seq: int

    def resolve(self, recipe_name: str = "", policy: str = "") -> ResolvedPolicy:
        """Returns the policy of the weights: that of training unless a recipe or policy is named."""
        if self.train_config is None:
            return resolve_policy(self.model.config, policy or DEFAULT_FOLDER_POLICY, recipe(recipe_name or "bf16"))
        chosen = recipe_at_step(self.train_config, self.step, recipe_name)
        return resolve_policy(self.model.config, policy or self.train_config.policy, chosen)


class InputAmaxCapture(NamedTuple):
    """LinearObserver that stores the input of each linear of a layer, by site."""

    seen: dict[str, jax.Array]

    def on_input(self, site: str, x: jax.Array) -> jax.Array:
        self.seen[site] = x
        return x

    def on_output(self, site: str, y: jax.Array) -> jax.Array:
        return y


def open_export_source(directory: Path, *, mesh: str = "", step: int | None = None) -> ExportSource:
    """Opens the model of a run at its newest complete checkpoint (or at `step`), or of a Hugging Face folder."""
    grid = mesh_over_local_devices(mesh) if mesh else None
    if is_hf_folder(directory):
        with HfFolder(directory) as folder:
            shape = folder_config(folder)
            models.check_mesh(shape, grid, rules=SCORING_RULES)
            params = load_params(folder, shape, mesh=grid, rules=SCORING_RULES)
            tokenizer = folder_tokenizer(folder) if (directory / TOKENIZER).exists() else None
            kinds = {entry.dtype.name for entry in folder.entries.values()}
        model = ExportModel(shape, params, tokenizer, directory)
        dtype = kinds.pop() if len(kinds) == 1 else ""
        return ExportSource(model, dtype or "bfloat16", None, 0, min(shape.max_seq, MAX_DEFAULT_WINDOW))
    run = open_run_directory(directory)
    config = run.config
    models.check_mesh(config.model, grid, rules=SCORING_RULES)
    has_text = config.data != "synthetic" or (directory / TOKENIZER).is_file()
    tokenizer, seq = read_tokenizer(run) if has_text else (None, min(config.model.max_seq, MAX_DEFAULT_WINDOW))
    restored = restore_params(run, mesh=grid, rules=SCORING_RULES, step=step)
    recipe_at_step(config, restored.step, "")  # refuses a program of the run that this command does not name
    origin = directory / ORIGIN if (directory / ORIGIN).is_dir() else None
    model = ExportModel(config.model, restored.items["params"], tokenizer, origin)
    return ExportSource(model, _dtype(directory), config, restored.step, seq)


def calibrate_input_amax(
    source: ExportSource, text: Path, resolved: ResolvedPolicy, *, batches: int
) -> dict[str, float]:
    """Returns the input amax of every quantized linear over `batches` batches of the text, by module."""
    config = source.model.config
    check_dense(config, "--calibrate")
    rows = token_rows(source, text, batches * CALIBRATION_BATCH_ROWS)
    run = jax.jit(input_amaxes, static_argnums=(0, 3))
    amaxes: dict[str, np.ndarray] = {}
    for start in range(0, len(rows), CALIBRATION_BATCH_ROWS):
        ctx = ModelContext(policy=resolved)
        latest = run(config, source.model.params, jnp.asarray(rows[start : start + CALIBRATION_BATCH_ROWS]), ctx)
        amaxes = {name: np.maximum(np.asarray(value), amaxes.get(name, 0.0)) for name, value in latest.items()}
    quantized = [site for site in hf_tensors(config) if weight_policy(resolved, site) is not None]
    by_site = {site.module: amaxes[site.path.removeprefix("layers/")][site.layer] for site in quantized}
    return {module: float(amax) for module, amax in by_site.items()}


def input_amaxes(cfg: LlamaConfig, params: Params, tokens: jax.Array, ctx: ModelContext) -> dict[str, jax.Array]:
    """Returns the input amax of each linear, float32 [layers], by "group/name"."""
    layer = make_block_fn(cfg, {"tokens": tokens}, ctx)

    def visit(x: jax.Array, weights: Params, layer_ctx: LayerContext, _: None) -> Any:
        inputs = InputAmaxCapture({})
        x = layer(x, weights, dataclasses.replace(layer_ctx, watch=inputs))
        gate, up = apply_linears(inputs.seen["mlp/gate"], weights["mlp"], layer_ctx, "mlp", ("gate", "up"))
        inputs.seen["mlp/down"] = ACTIVATIONS[cfg.activation].forward(gate, up)
        return x, {site: amax_of(read) for site, read in inputs.seen.items()}

    _, amaxes = scan_layers(cfg, params, embed_inputs(cfg, params, tokens, ctx), ctx, visit)
    return jax.tree.map(lambda *segments: jnp.concatenate(segments), *amaxes)


def token_rows(source: ExportSource, text: Path, count: int) -> np.ndarray:
    """Returns int32 [count, seq]: the first tokens of the text; each document begins with bos."""
    if source.model.tokenizer is None:
        raise ValueError("--calibrate needs a tokenizer, and this model has none")
    num_tokens, ids = count * source.seq, list[int]()
    for file in find_files([str(text)]):
        if (task := open_task(file)).kind != TEXT_FORMAT:
            raise ValueError(f"--calibrate {file.name}: it holds a task ({task.kind}); give text")
        for example in iter_examples(task):
            ids += source.model.tokenizer.encode(example["text"], bos=True)
            if len(ids) >= num_tokens:
                break
    rows = min(count, len(ids) // source.seq)
    if rows == 0:
        raise ValueError(f"--calibrate {text}: {len(ids)} tokens are less than one row of {source.seq}; give more text")
    return np.asarray(ids[: rows * source.seq], np.int32).reshape(rows, source.seq)


def _dtype(directory: Path) -> str:
    """Returns the dtype of an imported model, else bfloat16."""
    file = directory / IMPORT_RECORD_FILE
    record = read_json(file) if file.is_file() else {}
    dtype = record.get("dtype") if isinstance(record, dict) else None
    return dtype if dtype in EXPORT_DTYPES else "bfloat16"
