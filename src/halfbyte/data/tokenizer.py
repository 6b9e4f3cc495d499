"""Text to token ids and back, whichever way the tokenizer was made.

Every tokenizer is a `tokenizers` file: one given by the user, a byte-level BPE trained here, or the 256 bytes with no
merges. Two special tokens matter. `eos` ends a document; `bos` begins one. A tokenizer without its own `bos` (ours, and
GPT-2's) uses `<|endoftext|>` for both, so that the first token of a text is predicted from something.

The text `<|endoftext|>` inside a document is ordinary text: it is spelled out in pieces and never becomes the special
token, so no document can end itself early.
"""

import base64
import contextlib
import hashlib
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from halfbyte.devices.compile_target import suppress_stderr
from halfbyte.io import atomic_write, expand_user, parse_json, read_text

END_OF_TEXT = "<|endoftext|>"
EOS_TOKENS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<｜end▁of▁sentence｜>")
KNOWN_BOS = ("<|begin_of_text|>", "<s>", "<bos>", "<|startoftext|>", "<｜begin▁of▁sentence｜>")
SMALLEST_BPE = 257
MAX_VOCAB = 1 << 24
MAX_TOKENIZER_BYTES = 64 << 20
"""Bytes of a tokenizer.json; the largest in use have 35 million."""
MAX_TEXT_EXPANSION = 1000.0
"""How many times longer than itself a text may become by replacements, one after another."""
ROUND_TRIP_PROBE = "The 4 quick\n\tnaïve 数 \u200b\U0001f600."


class Tokenizer:
    """A tokenizer with its document markers. Ids are below `vocab_size`; byte-level ones decode to the exact text."""

    def __init__(self, text: str, *, eos: str | None = None, bos: str | None = None):
        """From the text of a `tokenizer.json`; `eos` and `bos` name its markers where they are not well known."""
        self._tokenizer = parse_tokenizer(text)
        self.text = text
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size: int = max(vocabulary.values(), default=0) + 1
        if self.vocab_size > MAX_VOCAB:
            raise ValueError(
                f"its largest id is {self.vocab_size - 1:,}; a model has a row for each, and {MAX_VOCAB:,} is the most"
            )
        self.eos: str = _special_token(vocabulary, eos, EOS_TOKENS, field="eos")
        self.bos: str = _special_token(vocabulary, bos, (*KNOWN_BOS, self.eos), field="bos")
        self.eos_id: int = vocabulary[self.eos]
        self.bos_id: int = vocabulary[self.bos]

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()

    def encode(self, text: str, *, bos: bool = False, eos: bool = False) -> list[int]:
        """The ids of `text`, with the markers asked for. A stored document is `encode(text, bos=True, eos=True)`."""
        with _rust_panics_as_value_error("encode"):
            ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return [self.bos_id] * bos + ids + [self.eos_id] * eos

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, no markers; faster than one by one."""
        with _rust_panics_as_value_error("encode"):
            return [e.ids for e in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Iterable[int], *, markers: bool = False) -> str:
        """The text of `ids`; special tokens are left out unless `markers`."""
        with _rust_panics_as_value_error("decode"):
            return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=not markers)

    def save(self, path: str | Path) -> None:
        atomic_write(path, self.text)


def parse_tokenizer(text: str) -> tokenizers.Tokenizer:
    """The library's tokenizer. Its parser is given nothing that is no JSON, too long or too deep; what panics there, or
    at the first text, is refused, and the page that Rust writes on stderr about it is left out."""
    found = parse_json(text, what="the tokenizer", most=MAX_TOKENIZER_BYTES)
    if not isinstance(found, dict):
        raise ValueError("not a tokenizer.json of the tokenizers library: it holds no object")
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if (growth := _max_expansion(found.get(part))) > MAX_TEXT_EXPANSION:
            raise ValueError(
                f"its {part} can make a text {growth:.0e} times as long; {MAX_TEXT_EXPANSION:,.0f} is the most"
            )
    with suppress_stderr(), _rust_panics_as_value_error("load"):
        try:
            made = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises bare Exception, always for a file it cannot parse
            raise ValueError(f"not a tokenizer.json of the tokenizers library: {str(error)[:500]}") from error
        made.encode_special_tokens = True
        made.no_truncation()
        made.no_padding()  # before the first text: padding may be to any length
        with contextlib.suppress(Exception):  # a tokenizer may have no token for a text; a panic is no Exception
            made.decode(made.encode(ROUND_TRIP_PROBE).ids)
    return made


def _max_expansion(part: Any) -> float:
    """At most how many times longer than before this part of a tokenizer, and all in it, makes a text. Each replacement
    works on what those before it have made, so that twenty of `a` by `aa` make a million of one."""
    if isinstance(part, list):
        return math.prod(map(_max_expansion, part))
    if not isinstance(part, dict):
        return 1.0
    grown = math.prod(map(_max_expansion, part.values()))
    content, charsmap = part.get("content"), part.get("precompiled_charsmap")
    if isinstance(content, str) and "pattern" in part:
        pattern = part["pattern"]
        exact = pattern.get("String") if isinstance(pattern, dict) else pattern
        found = len(exact.encode("utf-8", "replace")) if isinstance(exact, str) else 0
        size = len(content.encode("utf-8", "replace"))
        grown *= max(1.0, size / found) if found else 1.0 + size  # an expression may match between any two
    if isinstance(charsmap, str):  # of SentencePiece: a table, and the texts that it writes, each with a zero behind it
        with contextlib.suppress(ValueError):
            written = base64.b64decode(charsmap)
            size = int.from_bytes(written[:4], "little")  # of the table, as it says itself
            grown *= max(map(len, written[4 + size :].split(b"\0")), default=1) or 1
    return grown


@contextlib.contextmanager
def _rust_panics_as_value_error(doing: str) -> Iterator[None]:
    """A Rust panic, which is not even an Exception, as a ValueError."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ValueError(
            f"the tokenizers library gave up in its own code ({doing}): {error}; the tokenizer.json is damaged, "
            "or made for another version of the library"
        ) from None


def _special_token(vocabulary: dict[str, int], named: str | None, known: Iterable[str], *, field: str) -> str:
    if named is not None:
        if named not in vocabulary:
            raise ValueError(f"{field} token {named!r} is not in the tokenizer's vocabulary; name one that is")
        return named
    for candidate in known:
        if candidate in vocabulary:
            return candidate
    raise ValueError(f"the tokenizer has no known {field} token; name its {field} token (--{field} TOKEN)")


def load_tokenizer(path: str | Path, *, eos: str | None = None, bos: str | None = None) -> Tokenizer:
    """The tokenizer in a `tokenizer.json`."""
    path = expand_user(path)
    if not path.is_file():
        raise ValueError(f"--tokenizer {path}: no such file; give a tokenizer.json, bpe:N or bytes")
    try:
        return Tokenizer(read_text(path, most=MAX_TOKENIZER_BYTES), eos=eos, bos=bos)
    except ValueError as error:
        raise ValueError(f"--tokenizer {path}: {error}") from error


def byte_tokenizer() -> Tokenizer:
    """Id = byte value; 256 is `<|endoftext|>`."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())  # a byte is spelled as itself, or by one from 256 upward
    others = (letter for letter in letters if ord(letter) > 255)
    vocabulary = {chr(byte) if chr(byte) in letters else next(others): byte for byte in range(256)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([tokenizers.AddedToken(END_OF_TEXT, special=True, normalized=False)])
    return Tokenizer(tokenizer.to_str(pretty=True))


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE of at most `vocab_size` ids, the markers and 256 bytes among them; same texts, same file."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return Tokenizer(tokenizer.to_str(pretty=True))


def bpe_size(spec: str) -> int | None:
    """N of 'bpe:N', or None if `spec` is not of that form."""
    if not spec.startswith("bpe:"):
        return None
    digits = spec.removeprefix("bpe:")
    if not re.fullmatch("[0-9]{1,9}", digits) or not SMALLEST_BPE <= int(digits) <= MAX_VOCAB:
        raise ValueError(
            f"--tokenizer {spec}: after 'bpe:' comes the vocabulary's size, e.g. bpe:32768; "
            f"256 bytes and {END_OF_TEXT} need at least {SMALLEST_BPE}, and {MAX_VOCAB:,} is the most"
        )
    return int(digits)
