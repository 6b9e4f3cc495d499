"""Parse flags with tyro, report its errors in one paragraph, and read config files.

An error names the flag that was probably meant, or what replaces a removed flag. A config file is JSON, TOML or YAML: a
whole config, or some fields that change a named run.
"""

import contextlib
import dataclasses
import difflib
import io
import re
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, get_origin, get_type_hints

from halfbyte import models
from halfbyte.cli.console import EXIT_BAD_INPUT, say_error
from halfbyte.io import dataclass_json
from halfbyte.io.validation import escape_control_chars
from halfbyte.renamed import warn_renamed
from halfbyte.train import TrainConfig
from halfbyte.train.run_directory import read_config_fields
from halfbyte.train.run_presets import RUN_PRESETS, run_config

# What other programs call it -> the last part of the flag here.
FLAG_ALIASES = {
    "lr": "learning-rate", "max-lr": "learning-rate", "wd": "weight-decay", "beta1": "b1", "beta2": "b2",
    "adam-b1": "b1", "adam-b2": "b2", "epsilon": "eps", "adam-eps": "eps", "grad-clip": "clip", "max-grad-norm": "clip",
    "gradient-clipping": "clip", "warmup-steps": "warmup", "warmup-ratio": "warmup", "lr-schedule": "schedule",
    "lr-scheduler-type": "schedule", "batch-size": "batch", "bs": "batch", "global-batch-size": "batch",
    "seq-len": "seq", "seq-length": "seq", "sequence-length": "seq", "max-length": "seq", "block-size": "seq",
    "context-length": "seq", "max-steps": "steps", "num-steps": "steps", "train-steps": "steps", "iterations": "steps",
    "gradient-accumulation-steps": "accumulate", "grad-accum": "accumulate", "accumulation": "accumulate",
    "output-dir": "run-dir", "out-dir": "run-dir", "save-dir": "run-dir", "logdir": "run-dir", "dataset": "data",
    "quantization": "recipe", "dtype": "compute-dtype", "save-every": "every", "save-steps": "every",
    "eval-every": "every", "eval-steps": "every", "log-every": "every", "logging-steps": "every",
    "num-layers": "layers", "n-layers": "layers", "depth": "layers", "hidden-size": "embed", "d-model": "embed",
    "n-heads": "heads", "num-heads": "heads", "ffn-dim": "mlp", "intermediate-size": "mlp", "vocab": "vocab-size",
    "gradient-checkpointing": "remat", "resume": "run-dir", "random-seed": "seed",
}  # fmt: skip
# Of several flags with that last part, the group that is meant.
FLAG_GROUPS = {"save": "checkpoint", "eval": "validation", "log": "log", "logging": "log"}

# A flag of version 0.1 -> its new name.
RENAMED = {
    "--guard.returns": "--guard.max-rollbacks",
    "--guard.skips": "--guard.max-skipped-steps",
    "--guard.spike": "--guard.spike-threshold",
    "--precision.twin": "--precision.noise-seed",
}

# A flag of earlier versions -> what to do instead.
REMOVED = {
    "--branch": "compare recipes from the run's config: halfbyte parity RUN/config.json --candidates RECIPE",
    "--branch-steps": "compare recipes from the run's config: halfbyte parity RUN/config.json --candidates RECIPE",
    "--screen": "name the recipes with --recipes",
    "--keep": "name the recipes with --recipes",
    **{
        f"--precision.reset-{name}": "the reset of oscillating weights has no replacement"
        for name in ("at", "every", "over", "ratio")
    },
    "--png": "compare writes SVG, to the file that --out names",
    "--smooth": "compare averages its curves over a fiftieth of the longest run",
    "--memory-gib": "the limit is the memory that the device reports (XLA_PYTHON_CLIENT_MEM_FRACTION changes it)",
    "--state": "set optimizer.mu_dtype and optimizer.nu_dtype in a config, and give its file to the command",
    "--vectors": "the self-test reads the vectors that the package has",
    "--csv": "read the figures of each recipe from --json",
    "--part": "use more processes (--workers) or a Ray cluster (--engine ray)",
}


def read_flags(
    kind: Any, argv: list[str], *, prog: str, doc: str | None, short: Mapping[str, str] | None = None, **settings: Any
) -> Any:
    """The arguments as `kind`; `doc` is what --help says. What is wrong with them is said in one paragraph; then
    SystemExit with 2. With `short`, flags and what they do, --help lists only those, and --help-all every flag."""
    import tyro

    if short is not None:
        if {"-h", "--help"} & set(argv):
            print(short_help(prog, doc or "", short))
            raise SystemExit(0)
        argv = ["--help" if word == "--help-all" else word for word in argv]
        prog_help = f"{prog} --help-all"
    else:
        prog_help = f"{prog} --help"

    argv = [rename_old_flag(word) for word in argv]
    description = f"{help_text(doc or '')}\n\n--json: one JSON object on stdout, everything else on stderr."
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(kind, prog=prog, description=description, args=argv, **settings)
    except SystemExit as stop:
        complaint = unwrap_tyro_box(said.getvalue())
        if stop.code != EXIT_BAD_INPUT or not (
            message := explain_parse_error(complaint, kind, argv, prog_help, settings)
        ):
            sys.stderr.write(said.getvalue())
            raise
        say_error(message)
        raise SystemExit(EXIT_BAD_INPUT) from None


def short_help(prog: str, doc: str, flags: Mapping[str, str]) -> str:
    """Returns usage, docstring and the flags with their texts, each line at most 80 columns wide."""
    width = max(map(len, flags)) + 4
    lines = [f"usage: {prog} [FLAGS]", ""]
    lines += [textwrap.fill(part, 80, break_on_hyphens=False) for part in help_text(doc).split("\n\n")] + [""]
    for flag, text in {**flags, "--help-all": "every flag, groups by dotted ones"}.items():
        wrap = textwrap.TextWrapper(
            80, initial_indent=f"  {flag:<{width - 2}}", subsequent_indent=" " * width, break_on_hyphens=False
        )
        lines.append(wrap.fill(text))
    return "\n".join([*lines, "", "--json: one JSON object on stdout, everything else on stderr."])


def rename_old_flag(word: str) -> str:
    """Returns the word with a flag of version 0.1 under its new name; warns once for each."""
    flag, equals, value = word.partition("=")
    if new := RENAMED.get(flag):
        warn_renamed(flag, new)
    return f"{new}{equals}{value}" if new else word


def help_text(doc: str) -> str:
    """A docstring as the parser should show it: text is filled, but each example command keeps a line of its own."""
    lines = [f"\n{line.strip()}\n" if line.lstrip().startswith("halfbyte ") else line for line in doc.splitlines()]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def to_command_line(args: Any, *, without: Sequence[str] = ()) -> list[str]:
    """What a person types for these arguments, but for those left out: the values of positional fields, then the flags
    that are not as they are by themselves."""
    import tyro

    found: list[str] = []
    flags: list[str] = []
    kinds = get_type_hints(type(args), include_extras=True)
    for field in dataclasses.fields(args):
        value, name = getattr(args, field.name), field.name.replace("_", "-")
        if field.name in without:
            continue
        if get_origin(kinds[field.name]) is Annotated and tyro.conf.Positional in kinds[field.name].__metadata__:
            found += map(str, value if isinstance(value, tuple) else [value])
        elif value != field.default:
            flags += [f"--{'' if value else 'no-'}{name}"] if isinstance(value, bool) else [f"--{name}", str(value)]
    return found + flags


def unwrap_tyro_box(text: str) -> str:
    """tyro's box as one line; its rules stay as `|`."""
    lines = (re.sub(r"^[│╭╰]─?|[│╮╯]$", "", line.strip()).rstrip() for line in text.splitlines())
    return " ".join("|" if line and not line.strip(" ─") else line for line in lines)


def explain_parse_error(complaint: str, kind: Any, argv: list[str], prog_help: str, settings: dict[str, Any]) -> str:
    """The complaint in our words; empty where tyro's own box says it better."""
    if found := re.search(r"Error parsing (\S+): (.+?) +\|", complaint):
        where = f"{found[1]}: " if found[1].startswith("--") else ""
        message = " ".join(found[2].split())
        said = re.sub(r"invalid literal for int\(\) with base 10:", "takes a whole number, not", message)
        return escape_control_chars(where + re.sub("could not convert string to float:", "takes a number, not", said))
    if found := re.search(r"Unrecognized options: (.+?) +\|", complaint):
        words = re.split(r",?\s+", found[1])
        unknown = [word for word in words if word.startswith("-")] or words[:1]
        known = ["--json", *known_flags(kind, argv, settings)]
        lines = []
        for flag in unknown:
            name = flag.partition("=")[0]
            if instead := REMOVED.get(name.replace("_", "-")):
                lines.append(f"{name} was removed; {instead}.")
                continue
            near = closest_flags(name, known)
            meant = f"did you mean {' or '.join(near)}?" if near else "nothing here is called like that."
            lines.append(f"unknown flag {flag}; {meant}")
        return escape_control_chars(" ".join([*lines, f"`{prog_help}` lists all of them."]))
    return ""


def known_flags(kind: Any, argv: list[str], settings: dict[str, Any]) -> list[str]:
    """Every flag of the command, or of the sub-command that `argv` begins with, as its help shows them."""
    import tyro

    shown = io.StringIO()
    first = [word for word in argv[:1] if not word.startswith("-")]
    with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
        tyro.cli(kind, args=[*first, "--help"], **settings)
    return flags_in(shown.getvalue())


def flags_in(text: str) -> list[str]:
    """Every flag that a help text names."""
    return sorted(set(re.findall(r"(?<![\w.-])--[a-z][a-z0-9.-]*[a-z0-9]", text)))


def closest_flags(flag: str, known: list[str]) -> list[str]:
    """The flags that were probably meant, likeliest first, at most two."""
    wanted = flag.lstrip("-").replace("_", "-")
    group, _, last = wanted.rpartition(".")
    target = FLAG_ALIASES.get(last)
    if target:
        same = [name for name in known if name.rpartition(".")[2].lstrip("-") == target]
        inside = [name for name in same if name.startswith(f"--{group or FLAG_GROUPS.get(last.split('-')[0], '')}.")]
        if chosen := inside or same:
            return chosen[:2]
    last_part = [name for name in known if "." in name and name.rpartition(".")[2] == last]
    return last_part[:2] or difflib.get_close_matches(f"--{wanted}", known, n=1, cutoff=0.6)


def config_from_file(name: str, path: Path) -> TrainConfig:
    """The config of a file. A partial one changes fields of the named run, of the run that it names itself (`run`), or
    of the demo; its `model` may be the name of a preset."""
    values = read_config_fields(path)
    if "run" not in values and values.keys() >= {"name", "model"} and isinstance(values["model"], dict):
        if name:
            raise ValueError(f"give a run ({name}) or a whole config ({path}), not both")
        return dataclass_json.from_file(TrainConfig, values, path)
    base = values.pop("run", "") or name or "demo"
    if not isinstance(base, str) or (name and base != name):
        raise ValueError(f"{path} is over the run {base!r}, and {name!r} was named; leave one of them out")
    if isinstance(values.get("model"), str):
        values["model"] = dataclass_json.to_dict(models.preset(values["model"]))
    whole = dataclass_json.merge_fields(dataclass_json.to_dict(run_config(base)), values)
    return dataclass_json.from_file(TrainConfig, whole, path)


def config_for_name(name: str) -> TrainConfig:
    """The run that a name stands for: one of ours, a config (.json), a run directory or a Hugging Face folder."""
    if name.endswith(".json"):
        return config_from_file("", Path(name))
    if name in RUN_PRESETS or not Path(name).is_dir():
        return run_config(name)
    from halfbyte.hf.model_loading import config_from_init

    return config_from_init(Path(name))


def train_arguments(name: str) -> tuple[str, ...]:
    """How `halfbyte train` is told to start from the run that `run_of` finds by this name."""
    if name.endswith(".json"):
        return "--config", name
    if name in RUN_PRESETS or not Path(name).is_dir():
        return (name,)
    from halfbyte.hf.hf_folder import is_hf_folder

    return ("--init-from", name) if is_hf_folder(Path(name)) else ("--config", str(Path(name, "config.json")))
