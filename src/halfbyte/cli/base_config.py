"""A config file as the start of a run: whole, or a few fields over a named run; JSON, TOML or YAML."""

from pathlib import Path

from halfbyte import models
from halfbyte.runs import RUNS, run_config
from halfbyte.train import TrainConfig, jsonconfig
from halfbyte.train.reading import config_values


def config_over(name: str, path: Path) -> TrainConfig:
    """The config of a file. A partial one changes fields of the named run, of the run that it names itself (`run`), or
    of the demo; its `model` may be the name of a preset."""
    values = config_values(path)
    if "run" not in values and values.keys() >= {"name", "model"} and isinstance(values["model"], dict):
        if name:
            raise ValueError(f"give a run ({name}) or a whole config ({path}), not both")
        return jsonconfig.from_file(TrainConfig, values, path)
    base = values.pop("run", "") or name or "demo"
    if not isinstance(base, str) or (name and base != name):
        raise ValueError(f"{path} is over the run {base!r}, and {name!r} was named; leave one of them out")
    if isinstance(values.get("model"), str):
        values["model"] = jsonconfig.to_dict(models.preset(values["model"]))
    whole = jsonconfig.overlaid(jsonconfig.to_dict(run_config(base)), values)
    return jsonconfig.from_file(TrainConfig, whole, path)


def run_of(name: str) -> TrainConfig:
    """The run that a name stands for: one of ours, a config (.json), a run directory or a Hugging Face folder."""
    if name.endswith(".json"):
        return config_over("", Path(name))
    if name in RUNS or not Path(name).is_dir():
        return run_config(name)
    from halfbyte.interchange.starting import initial_config

    return initial_config(Path(name))


def words_for(name: str) -> tuple[str, ...]:
    """How `halfbyte train` is told to start from the run that `run_of` finds by this name."""
    if name.endswith(".json"):
        return "--config", name
    if name in RUNS or not Path(name).is_dir():
        return (name,)
    from halfbyte.interchange.folder import is_folder

    return ("--init-from", name) if is_folder(Path(name)) else ("--config", str(Path(name, "config.json")))
