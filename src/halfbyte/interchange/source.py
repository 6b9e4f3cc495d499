"""A run or a folder as something to export: its weights, its small files, and how it was quantized."""

from dataclasses import dataclass
from pathlib import Path

from halfbyte import models
from halfbyte.evaluation import SCORING_RULES
from halfbyte.inputs import read_json
from halfbyte.interchange.exporting import DTYPES, Model
from halfbyte.interchange.folder import Folder, is_folder
from halfbyte.interchange.importing import LONGEST_WINDOW, folder_config
from halfbyte.interchange.loading import load_params
from halfbyte.interchange.opening import FOLDER_POLICY, forward_recipe, read_tokenizer, restore_params, some_mesh
from halfbyte.interchange.tokenizer_files import TOKENIZER, folder_tokenizer
from halfbyte.recipe import Resolved, recipe
from halfbyte.train import TrainConfig, resolve
from halfbyte.train.claim import IMPORTED
from halfbyte.train.reading import ORIGIN, open_directory


@dataclass(frozen=True)
class Source:
    """`model`, the `dtype` it came in, the config it was `trained` with (None: a folder) up to `step`, and its rows'
    length."""

    model: Model
    dtype: str
    trained: TrainConfig | None
    step: int
    seq: int

    def resolve(self, recipe_name: str = "", policy: str = "") -> Resolved:
        """Which weights are quantized, and how: as in training, or as the names say."""
        if self.trained is None:
            return resolve(self.model.config, policy or FOLDER_POLICY, recipe(recipe_name or "bf16"))
        chosen = forward_recipe(self.trained, self.step, recipe_name)
        return resolve(self.model.config, policy or self.trained.policy, chosen)


def open_for_export(directory: Path, *, mesh: str = "", step: int | None = None) -> Source:
    """The model of a run at its newest whole checkpoint (or at `step`), or of a Hugging Face folder."""
    grid = some_mesh(mesh) if mesh else None
    if is_folder(directory):
        with Folder(directory) as folder:
            shape = folder_config(folder)
            models.check_mesh(shape, grid, rules=SCORING_RULES)
            params = load_params(folder, shape, mesh=grid, rules=SCORING_RULES)
            tokenizer = folder_tokenizer(folder) if (directory / TOKENIZER).exists() else None
            kinds = {entry.dtype.name for entry in folder.entries.values()}
        model = Model(shape, params, tokenizer, directory)
        dtype = kinds.pop() if len(kinds) == 1 else ""
        return Source(model, dtype or "bfloat16", None, 0, min(shape.max_seq, LONGEST_WINDOW))
    run = open_directory(directory)
    config = run.config
    models.check_mesh(config.model, grid, rules=SCORING_RULES)
    has_text = config.data != "synthetic" or (directory / TOKENIZER).is_file()
    tokenizer, seq = read_tokenizer(run) if has_text else (None, min(config.model.max_seq, LONGEST_WINDOW))
    restored = restore_params(run, mesh=grid, rules=SCORING_RULES, step=step)
    forward_recipe(config, restored.step, "")  # a program of the run's own that this command does not name is refused
    origin = directory / ORIGIN if (directory / ORIGIN).is_dir() else None
    model = Model(config.model, restored.items["params"], tokenizer, origin)
    return Source(model, _dtype(directory), config, restored.step, seq)


def _dtype(directory: Path) -> str:
    """As the model was imported, else bfloat16."""
    facts = directory / IMPORTED
    found = read_json(facts) if facts.is_file() else {}
    dtype = found.get("dtype") if isinstance(found, dict) else None
    return dtype if dtype in DTYPES else "bfloat16"
