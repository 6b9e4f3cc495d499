"""A run or a folder as something to export: its weights, its small files, and how it was quantized."""

from dataclasses import dataclass
from pathlib import Path

from halfbyte import models
from halfbyte.evaluation import SCORING_RULES
from halfbyte.inputs import read_json
from halfbyte.interchange.exporting import DTYPES, Model
from halfbyte.interchange.folder import Folder, is_folder
from halfbyte.interchange.importing import LONGEST_WINDOW, ORIGIN, folder_config
from halfbyte.interchange.loading import load_params
from halfbyte.interchange.opening import read_config, read_tokenizer, restore_params, some_mesh, trained_with
from halfbyte.interchange.tokenizer_files import TOKENIZER, folder_tokenizer
from halfbyte.recipe import Recipe, Resolved, recipe
from halfbyte.train import resolve
from halfbyte.train.claim import IMPORTED


@dataclass(frozen=True)
class Source:
    """`model`, the `dtype` it came in, the recipe and policy it was `trained` with, and its rows' length."""

    model: Model
    dtype: str
    trained: Recipe
    policy: str
    seq: int

    def resolve(self, recipe_name: str = "", policy: str = "") -> Resolved:
        """Which weights are quantized, and how: as in training, or as the names say."""
        chosen = recipe(recipe_name) if recipe_name else self.trained
        return resolve(self.model.config, policy or self.policy, chosen)


def open_for_export(directory: Path, *, mesh: str = "", step: int | None = None) -> Source:
    """The model of a run at its newest whole checkpoint (or at `step`), or of a Hugging Face folder."""
    grid = some_mesh(mesh) if mesh else None
    if is_folder(directory):
        with Folder(directory) as folder:
            config = folder_config(folder)
            models.check_mesh(config, grid, rules=SCORING_RULES)
            params = load_params(folder, config, mesh=grid, rules=SCORING_RULES)
            tokenizer = folder_tokenizer(folder) if (directory / TOKENIZER).exists() else None
            kinds = {entry.dtype.name for entry in folder.entries.values()}
        model = Model(config, params, tokenizer, directory)
        dtype = kinds.pop() if len(kinds) == 1 else ""
        return Source(model, dtype or "bfloat16", recipe("bf16"), "all_linear", min(config.max_seq, LONGEST_WINDOW))
    run = read_config(directory)
    models.check_mesh(run.model, grid, rules=SCORING_RULES)
    has_text = run.data != "synthetic" or (directory / TOKENIZER).is_file()
    tokenizer, seq = read_tokenizer(directory, run) if has_text else (None, min(run.model.max_seq, LONGEST_WINDOW))
    restored = restore_params(directory, run, mesh=grid, rules=SCORING_RULES, step=step)
    origin = directory / ORIGIN if (directory / ORIGIN).is_dir() else None
    model = Model(run.model, restored.items["params"], tokenizer, origin)
    return Source(model, _dtype(directory), trained_with(run, restored.step), run.policy, seq)


def _dtype(directory: Path) -> str:
    """As the model was imported, else bfloat16."""
    facts = directory / IMPORTED
    found = read_json(facts) if facts.is_file() else {}
    dtype = found.get("dtype") if isinstance(found, dict) else None
    return dtype if dtype in DTYPES else "bfloat16"
