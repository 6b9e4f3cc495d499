"""Read a Llama or Qwen3 from a Hugging Face folder and make a run directory of it.

halfbyte import HF_DIR --out RUN                 then: generate RUN, eval RUN FILES, export RUN
halfbyte train --init-from RUN --data DIR        goes on training it, in any recipe, on any mesh

The folder holds config.json and safetensors (bf16, fp16 or fp32, in one file or in shards, or NVFP4 as `halfbyte
export` writes it) and, to read text with it, tokenizer.json. What the model's config asks for and is not implemented is
refused by name. Pickles are refused. `generate`, `eval` and `train --init-from` also take the folder itself."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from halfbyte.cli.console import CommandResult, print_line, progress
from halfbyte.cli.terminal_signals import sigterm_as_interrupt


@dataclass(frozen=True)
class Args:
    folder: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="HF_DIR")]
    """Folder with config.json and *.safetensors."""
    out: str = ""
    """Run directory to make; default runs/NAME-OF-THE-FOLDER."""


def run(args: Args) -> CommandResult:
    from halfbyte import models
    from halfbyte.hf import import_hf_folder

    folder = Path(args.folder)
    out = Path(args.out) if args.out else Path("runs") / folder.resolve().name
    with sigterm_as_interrupt(), progress("files") as watch:
        config = import_hf_folder(folder, out, watch=watch)
    count = models.count_params(config.model)
    kind = models.family_of(config.model).architecture.removesuffix("ForCausalLM")
    print_line(f"{out}: {config.model.name}, {kind}, {count:,} parameters, from {folder}")
    print_line(f'next: halfbyte generate {out} --prompt "..."  or  halfbyte train --init-from {out} --data DIR')
    return CommandResult({"run_dir": str(out), "model": config.model.name, "parameters": count, "family": kind})
