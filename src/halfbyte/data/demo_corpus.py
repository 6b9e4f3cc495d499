"""The demo corpus inside the package, prepared on first use, and its n-gram baselines.

The corpus holds addresses on the State of the Union, public domain (demo/PROVENANCE.md), with a byte-level BPE of 1,024
tokens trained on them. Some addresses are held out, as a whole, for validation.
"""

import hashlib
import sys
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import numpy as np

from halfbyte.data.dataset import Dataset, Mixture, as_mixture, open_dataset
from halfbyte.data.dataset_manifest import MANIFEST_VERSION
from halfbyte.data.encode import IGNORE, TRAIN, VALIDATION, rows_to_batch
from halfbyte.data.preparation import prepare
from halfbyte.io import user_cache

DEMO_SOURCE = "sotu"
TRAIN_FILE, VALIDATION_FILE, DEMO_TOKENIZER_FILE = "sotu-train.jsonl.xz", "sotu-validation.jsonl.xz", "tokenizer.json"
MAX_COUNTED_TOKENS = 50_000_000  # of training text; of more, rows at even distances are counted


def demo_files() -> tuple[Path, Path, Path]:
    """Returns the paths of training text, validation text and tokenizer.json as installed with the package."""
    folder = Path(str(resources.files("halfbyte.data"))) / "demo"
    return folder / TRAIN_FILE, folder / VALIDATION_FILE, folder / DEMO_TOKENIZER_FILE


def demo_dataset(cache_dir: str | Path | None = None, *, seq_len: int = 128) -> Dataset:
    """Returns the demo corpus, verified. The first call prepares it in the cache, in a few seconds.

    Concurrent processes prepare it twice, and one of them publishes it. A damaged cache is reported and prepared again.
    """
    train, validation, tokenizer = demo_files()
    identity = hashlib.sha256(b"".join(path.read_bytes() for path in demo_files())).hexdigest()[:12]
    root = Path(cache_dir).expanduser() if cache_dir is not None else user_cache()
    directory = root / f"demo-v{MANIFEST_VERSION}-{identity}-seq{seq_len}"
    overwrite = False
    if directory.exists():
        try:
            return open_dataset(directory)
        except ValueError as error:
            print(f"the cached demo data set is damaged and is prepared again: {error}", file=sys.stderr)
            overwrite = True
    try:
        prepare(
            [train], tokenizer=tokenizer, out=directory, seq_len=seq_len, validation=[validation],
            default_source=DEMO_SOURCE, workers=1, overwrite=overwrite,
        )  # fmt: skip
    except OSError as error:
        raise ValueError(
            f"the demo data set cannot be written into {root} ({error.strerror}); "
            "set HALFBYTE_CACHE to a directory that can be written"
        ) from error
    return open_dataset(directory)


def ngram_baselines(data: Dataset | Mixture) -> dict[str, float]:
    """Returns the nats per token of the "unigram" and "bigram" models of the training tokens on the validation targets.

    With c(w) and c(v, w) counted over the scored targets (those that are not -1) of the training rows, N tokens in all
    and V the vocabulary:

        unigram   p(w)    = (c(w) + 1) / (N + V)
        bigram    p(w|v)  = max(c(v, w) - D, 0) / c(v) + D * n(v) / c(v) * p(w)          c(v) = sum of c(v, .) > 0
                          = p(w)                                                       if v never occurs
        discount  D       = n1 / (n1 + 2 * n2),  or 1/2 if n1 = 0

    where n(v) is the number of different tokens that follow v, and n1, n2 the numbers of pairs with count one and two:
    absolute discounting, interpolated with the unigram (Ney, Essen and Kneser 1994). Both are proper distributions over
    the vocabulary, so their mean negative log-likelihood compares with a model's validation loss, target by target. A
    mixture is counted as if every row were read once; its weights do not enter.
    """
    mixture = as_mixture(data)
    vocab = mixture.vocab_size
    contexts, words = _context_target_pairs(mixture, TRAIN)
    held_contexts, held_words = _context_target_pairs(mixture, VALIDATION)
    if len(held_words) == 0:
        raise ValueError(
            f"{mixture.datasets[0].directory}: no validation targets to score; prepare with a validation split"
        )
    unigram = (np.bincount(words, minlength=vocab) + 1.0) / (len(words) + vocab)
    bigram = _bigram(contexts * vocab + words, held_contexts, held_words, unigram)
    return {"unigram": float(-np.log(unigram[held_words]).mean()), "bigram": float(-np.log(bigram).mean())}


def _context_target_pairs(mixture: Mixture, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns context and target of every scored target, int64."""
    contexts, words = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for rows in _blocks(mixture, split):
        batch = rows_to_batch(rows)
        scored = batch["targets"] != IGNORE
        contexts.append(batch["tokens"][scored].astype(np.int64))
        words.append(batch["targets"][scored].astype(np.int64))
    return np.concatenate(contexts), np.concatenate(words)


def _blocks(mixture: Mixture, split: str) -> Iterator[np.ndarray]:
    tokens = sum(d.manifest.tokens(split) for d in mixture.datasets)
    stride = -(-tokens // MAX_COUNTED_TOKENS) if split == TRAIN and tokens else 1
    for dataset in mixture.datasets:
        yield from dataset.rows(split).blocks(stride)


def _bigram(pairs: np.ndarray, contexts: np.ndarray, words: np.ndarray, unigram: np.ndarray) -> np.ndarray:
    """Returns p(word | context) of each held-out target; `pairs` are context * V + word of the training data."""
    vocab = len(unigram)
    seen, counts = np.unique(pairs, return_counts=True)
    once, twice = np.count_nonzero(counts == 1), np.count_nonzero(counts == 2)
    discount = once / (once + 2.0 * twice) if once else 0.5
    totals = np.bincount(seen // vocab, weights=counts, minlength=vocab)
    kinds = np.bincount(seen // vocab, minlength=vocab)
    held_out = contexts * vocab + words
    index = np.minimum(np.searchsorted(seen, held_out), max(len(seen) - 1, 0))
    pair_counts = np.where(seen[index] == held_out, counts[index], 0) if len(seen) else np.zeros(len(held_out))
    total = np.maximum(totals[contexts], 1.0)
    direct = np.maximum(pair_counts - discount, 0.0) / total
    backed_off = np.where(totals[contexts] > 0, discount * kinds[contexts] / total, 1.0)
    return direct + backed_off * unigram[words]
