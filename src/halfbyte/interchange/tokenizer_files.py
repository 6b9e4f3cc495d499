"""The tokenizer and generation files beside a model's weights, read and written.

A document begins with `bos` in training, in scoring and in generation here. An exported tokenizer therefore puts it
before every text by itself, so that `tokenizer(text)` in `transformers` gives the ids that the model has learnt from.
"""

import json
from typing import Any

import tokenizers
from tokenizers import processors

from halfbyte.data import Tokenizer
from halfbyte.data.tokenizer import MOST_FILE, MOST_IDS, parsed
from halfbyte.inputs import read_json, read_text
from halfbyte.interchange.folder import Folder, inside

TOKENIZER = "tokenizer.json"


def folder_tokenizer(folder: Folder) -> Tokenizer:
    """The folder's tokenizer, with the markers that its configs name."""
    if not (folder.directory / TOKENIZER).exists():
        raise ValueError(
            f"{folder.directory} has no {TOKENIZER}, the one kind of tokenizer that is read; "
            "`AutoTokenizer.from_pretrained(...).save_pretrained(...)` writes it"
        )
    text = read_text(inside(folder.directory, TOKENIZER), most=MOST_FILE)
    made = parsed(text)
    markers = {kind: _marker(folder, kind, made) for kind in ("eos", "bos")}
    return Tokenizer(text, eos=markers["eos"], bos=markers["bos"])


def _marker(folder: Folder, kind: str, made: tokenizers.Tokenizer) -> str | None:
    """The token of a marker: by id in generation_config.json or config.json, by name in tokenizer_config.json."""
    configs = [_optional(folder, "generation_config.json"), folder.config]
    for number in (config.get(f"{kind}_token_id") for config in configs):
        number = number[0] if isinstance(number, list) and number else number
        if type(number) is int and 0 <= number < MOST_IDS:
            token = made.id_to_token(number)
            if token is not None:
                return str(token)
    named = _optional(folder, "tokenizer_config.json").get(f"{kind}_token")
    named = named.get("content") if isinstance(named, dict) else named
    return named if isinstance(named, str) else None


def _optional(folder: Folder, name: str) -> dict[str, Any]:
    if not (folder.directory / name).exists():
        return {}
    found = read_json(inside(folder.directory, name))
    return found if isinstance(found, dict) else {}


def tokenizer_files(tokenizer: Tokenizer, max_seq: int) -> dict[str, str]:
    """Name -> content of the files that `AutoTokenizer` and `generate` read."""
    made = tokenizers.Tokenizer.from_str(tokenizer.text)
    made.post_processor = processors.TemplateProcessing(
        single=f"{tokenizer.bos} $A",
        pair=f"{tokenizer.bos} $A $B",
        special_tokens=[(tokenizer.bos, tokenizer.bos_id)],
    )
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokenizer.bos,
        "eos_token": tokenizer.eos,
        "model_max_length": max_seq,
        "clean_up_tokenization_spaces": False,
    }
    generation = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id, "do_sample": False}
    listed = {"tokenizer_config.json": config, "generation_config.json": generation}
    return {TOKENIZER: made.to_str(), **{name: json.dumps(value, indent=2) + "\n" for name, value in listed.items()}}
