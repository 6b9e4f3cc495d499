"""Print a script that completes commands, runs, recipes and flags in bash or zsh.

halfbyte completion bash > ~/.local/share/bash-completion/completions/halfbyte

Without installing anything: source <(halfbyte completion bash). The flags are those of this version; print it again
after an update."""

import contextlib
import importlib
import io
import re
from dataclasses import dataclass
from types import ModuleType
from typing import Annotated, Literal

import tyro

from halfbyte.cli.flags import flags_in
from halfbyte.cli.result import Result

BASH = """\
_halfbyte() {{
  local current=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} words
  case "$before" in
    --recipe|--recipes) words="{recipes}" ;;
    halfbyte) words="{commands}" ;;
    *) case "${{COMP_WORDS[1]}} ${{COMP_WORDS[2]}}" in
{cases}
    esac ;;
  esac
  COMPREPLY=( $(compgen -W "$words" -- "$current") )
}}
complete -o default -F _halfbyte halfbyte
"""
ZSH = "autoload -U +X bashcompinit && bashcompinit\n"


@dataclass(frozen=True)
class Args:
    shell: Annotated[Literal["bash", "zsh"], tyro.conf.Positional] = "bash"
    """For which shell."""


def run(args: Args) -> Result:
    from halfbyte.recipe import recipe_names
    from halfbyte.runs import names

    words = words_by_command()
    words["train"] = [*names(), *words["train"]]
    # Sub-commands come before the command that holds them: the first pattern that fits wins.
    patterns = sorted(words.items(), reverse=True)
    cases = [f"""      "{name}"|"{name} "*) words="{" ".join(found)}" ;;""" for name, found in patterns]
    commands = " ".join(sorted({name.split()[0] for name in words}))
    script = BASH.format(recipes=" ".join(recipe_names()), cases="\n".join(cases), commands=commands)
    script = ZSH * (args.shell == "zsh") + script
    print(script, end="")
    return Result({"shell": args.shell, "script": script})


def words_by_command() -> dict[str, list[str]]:
    """'train' -> its flags; 'data' -> its sub-commands; 'data prepare' -> the flags of that."""
    from halfbyte.cli.main import find_commands

    found: dict[str, list[str]] = {}
    for name, file in find_commands().items():
        module = importlib.import_module(f"halfbyte.cli.{file.stem}")
        text = help_of(name, module, [])
        inside = re.search(r"\{([a-z][a-z,-]+)\}", text) if "subcommands" in text else None
        found[name] = inside[1].split(",") if inside else flags_in(text)
        for sub in found[name] if inside else ():
            found[f"{name} {sub}"] = sorted({"--json", *flags_in(help_of(name, module, [sub]))})
    return found


def help_of(name: str, module: ModuleType, words: list[str]) -> str:
    from halfbyte.cli.main import parse_flags

    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
        parse_flags(name, module, [*words, "--help"])
    return shown.getvalue()
