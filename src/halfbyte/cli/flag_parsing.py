"""Flags read by tyro, its complaints said in Halfbyte's way: one paragraph, with the flag that was probably meant."""

import contextlib
import dataclasses
import difflib
import io
import re
import sys
from collections.abc import Sequence
from typing import Annotated, Any, get_origin, get_type_hints

from halfbyte.cli.errors import say_error
from halfbyte.cli.result import BAD_INPUT
from halfbyte.inputs.names import printable

# What other programs call it -> the last part of the flag here.
KNOWN_AS = {
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
GROUP = {"save": "checkpoint", "eval": "validation", "log": "log", "logging": "log"}

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


def read_flags(kind: Any, argv: list[str], *, prog: str, doc: str | None, **settings: Any) -> Any:
    """The arguments as `kind`; `doc` is what --help says. What is wrong with them is said in one paragraph; then
    SystemExit with 2."""
    import tyro

    description = f"{help_text(doc or '')}\n\n--json: one JSON object on stdout, everything else on stderr."
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(kind, prog=prog, description=description, args=argv, **settings)
    except SystemExit as stop:
        complaint = unboxed(said.getvalue())
        if stop.code != BAD_INPUT or not (message := explained(complaint, kind, argv, prog, settings)):
            sys.stderr.write(said.getvalue())
            raise
        say_error(message)
        raise SystemExit(BAD_INPUT) from None


def help_text(doc: str) -> str:
    """A docstring as the parser should show it: text is filled, but each example command keeps a line of its own."""
    lines = [f"\n{line.strip()}\n" if line.lstrip().startswith("halfbyte ") else line for line in doc.splitlines()]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def words_of(args: Any, *, without: Sequence[str] = ()) -> list[str]:
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


def unboxed(text: str) -> str:
    """tyro's box as one line; its rules stay as `|`."""
    lines = (re.sub(r"^[│╭╰]─?|[│╮╯]$", "", line.strip()).rstrip() for line in text.splitlines())
    return " ".join("|" if line and not line.strip(" ─") else line for line in lines)


def explained(complaint: str, kind: Any, argv: list[str], prog: str, settings: dict[str, Any]) -> str:
    """The complaint in our words; empty where tyro's own box says it better."""
    if found := re.search(r"Error parsing (\S+): (.+?) +\|", complaint):
        where = f"{found[1]}: " if found[1].startswith("--") else ""
        message = " ".join(found[2].split())
        said = re.sub(r"invalid literal for int\(\) with base 10:", "takes a whole number, not", message)
        return printable(where + re.sub("could not convert string to float:", "takes a number, not", said))
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
            near = nearest(name, known)
            meant = f"did you mean {' or '.join(near)}?" if near else "nothing here is called like that."
            lines.append(f"unknown flag {flag}; {meant}")
        return printable(" ".join([*lines, f"`{prog} --help` lists all of them."]))
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


def nearest(flag: str, known: list[str]) -> list[str]:
    """The flags that were probably meant, likeliest first, at most two."""
    wanted = flag.lstrip("-").replace("_", "-")
    group, _, last = wanted.rpartition(".")
    target = KNOWN_AS.get(last)
    if target:
        same = [name for name in known if name.rpartition(".")[2].lstrip("-") == target]
        inside = [name for name in same if name.startswith(f"--{group or GROUP.get(last.split('-')[0], '')}.")]
        if chosen := inside or same:
            return chosen[:2]
    last_part = [name for name in known if "." in name and name.rpartition(".")[2] == last]
    return last_part[:2] or difflib.get_close_matches(f"--{wanted}", known, n=1, cutoff=0.6)
