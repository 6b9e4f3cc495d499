"""From text files to batches: prepare, verify, load, mix, synthesize; the embedded corpus and its n-gram baselines.

A batch is a dict of int32 [rows, seq_len]: `tokens`, `targets` (-1 = not scored), `segments` (0 = padding, documents
from 1), `positions` (restart at each document).
"""

from halfbyte.data.dataset import Dataset, Mixture, open_dataset, open_mixture, parse_mixture
from halfbyte.data.embedded import demo_dataset
from halfbyte.data.loading import Loader, loader, validation_sources
from halfbyte.data.ngram import ngram_baselines
from halfbyte.data.preparation import Prepared, prepare
from halfbyte.data.synthesis import synthetic
from halfbyte.data.tokenizer import END_OF_TEXT, Tokenizer, load_tokenizer
