"""What counting alone achieves: unigram and bigram models of the training tokens, scored on the validation targets.

With c(w) and c(v, w) counted over the scored targets of the training rows, N tokens in all and V the vocabulary:

    unigram   p(w)    = (c(w) + 1) / (N + V)
    bigram    p(w|v)  = max(c(v, w) - D, 0) / c(v) + D * n(v) / c(v) * p(w)          c(v) = sum of c(v, .) > 0
                      = p(w)                                                       if v was never seen
    discount  D       = n1 / (n1 + 2 * n2),  or 1/2 if n1 = 0

where n(v) is the number of different tokens seen after v, and n1, n2 the numbers of pairs seen once and twice: absolute
discounting, interpolated with the unigram (Ney, Essen and Kneser 1994). Both are proper distributions over the
vocabulary, so their mean negative log-likelihood compares with a model's validation loss, target by target.
"""

from collections.abc import Iterator

import numpy as np

from halfbyte.data.dataset import Dataset, Mixture, as_mixture
from halfbyte.data.packing import IGNORE, rows_to_batch
from halfbyte.data.splitting import TRAIN, VALIDATION

MOST_TOKENS = 50_000_000  # of training text; beyond it, rows at even distances are counted, which costs no accuracy


def ngram_baselines(data: Dataset | Mixture) -> dict[str, float]:
    """{"unigram", "bigram"}: nats a token on the validation targets (those that are not -1). A mixture is counted as if
    every row were read once; weights do not enter.
    """
    mixture = as_mixture(data)
    vocab = mixture.vocab_size
    contexts, words = _pairs(mixture, TRAIN)
    held_contexts, held_words = _pairs(mixture, VALIDATION)
    if len(held_words) == 0:
        raise ValueError(
            f"{mixture.datasets[0].directory}: no validation targets to score; prepare with a validation split"
        )
    unigram = (np.bincount(words, minlength=vocab) + 1.0) / (len(words) + vocab)
    bigram = _bigram(contexts * vocab + words, held_contexts, held_words, unigram)
    return {"unigram": float(-np.log(unigram[held_words]).mean()), "bigram": float(-np.log(bigram).mean())}


def _pairs(mixture: Mixture, split: str) -> tuple[np.ndarray, np.ndarray]:
    """(context, target) of every scored target, int64."""
    contexts, words = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for rows in _blocks(mixture, split):
        batch = rows_to_batch(rows)
        scored = batch["targets"] != IGNORE
        contexts.append(batch["tokens"][scored].astype(np.int64))
        words.append(batch["targets"][scored].astype(np.int64))
    return np.concatenate(contexts), np.concatenate(words)


def _blocks(mixture: Mixture, split: str) -> Iterator[np.ndarray]:
    tokens = sum(d.manifest.tokens(split) for d in mixture.datasets)
    stride = -(-tokens // MOST_TOKENS) if split == TRAIN and tokens else 1
    for dataset in mixture.datasets:
        yield from dataset.rows(split).blocks(stride)


def _bigram(pairs: np.ndarray, contexts: np.ndarray, words: np.ndarray, unigram: np.ndarray) -> np.ndarray:
    """p(word | context) of each held-out target; `pairs` are context * V + word of the training data."""
    vocab = len(unigram)
    seen, counts = np.unique(pairs, return_counts=True)
    once, twice = np.count_nonzero(counts == 1), np.count_nonzero(counts == 2)
    discount = once / (once + 2.0 * twice) if once else 0.5
    totals = np.bincount(seen // vocab, weights=counts, minlength=vocab)
    kinds = np.bincount(seen // vocab, minlength=vocab)
    wanted = contexts * vocab + words
    at = np.minimum(np.searchsorted(seen, wanted), max(len(seen) - 1, 0))
    found = np.where(seen[at] == wanted, counts[at], 0) if len(seen) else np.zeros(len(wanted))
    total = np.maximum(totals[contexts], 1.0)
    direct = np.maximum(found - discount, 0.0) / total
    backed_off = np.where(totals[contexts] > 0, discount * kinds[contexts] / total, 1.0)
    return direct + backed_off * unigram[words]
