"""From text files to batches: prepare, verify, load, mix, synthesize; the embedded corpus and its n-gram baselines.

A batch is a dict of int32 [rows, seq_len]: `tokens`, `targets` (-1 = not scored), `segments` (0 = padding, documents
from 1), `positions` (restart at each document).
"""

from typing import TYPE_CHECKING

from halfbyte.data.batch_loader import Loader, loader, synthetic, validation_sources
from halfbyte.data.dataset import Dataset, Mixture, open_dataset, open_mixture, parse_mixture
from halfbyte.data.demo_corpus import demo_dataset, ngram_baselines
from halfbyte.data.preparation import PrepareResult, prepare
from halfbyte.data.tokenizer import END_OF_TEXT, Tokenizer, load_tokenizer
from halfbyte.renamed import old_names

if not TYPE_CHECKING:
    __getattr__ = old_names(__name__)
