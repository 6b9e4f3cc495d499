"""Data of a run: opened and verified at start, sharded over hosts, put on the mesh.

Each process reads only the rows of its own devices. The mesh determines these rows: a batch that is sharded over
`tensor` or `context` across processes is read by all of them, one that is sharded over `fsdp` is read once.
"""

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from halfbyte import data
from halfbyte.data.batch_loader import pad_vocab_size
from halfbyte.data.dataset import as_mixture
from halfbyte.data.encode import TRAIN
from halfbyte.train.train_config import TrainConfig
from halfbyte.train.train_step import Batch, batch_sharding

DEMO_SEQ = 128


@dataclass(frozen=True)
class BatchSource:
    """Source of training and validation batches. `dataset` is None for synthetic data."""

    config: TrainConfig
    seq: int
    dataset: Any

    def loader(self, mesh: Mesh) -> Any:
        """Returns an endless loader of the training batches of this process, NumPy arrays."""
        host, hosts = host_shard(mesh, self.config.batch, self.seq)
        if self.dataset is None:
            return data.synthetic(
                self.config.model.vocab_size, self.seq, self.config.batch, seed=self.config.seed, host=host, hosts=hosts
            )
        return data.loader(self.dataset, seed=self.config.seed, **self._host_loader_args(host, hosts))

    def validation(self, mesh: Mesh) -> dict[str, Any]:
        """Returns by source name a function that opens the loader of its validation batches."""
        host, hosts = host_shard(mesh, self.config.batch, self.seq)
        limit = self.config.validation.batches or None
        if self.dataset is None:
            held_out = {"seed": self.config.seed + 1, "batches": limit or 4, "host": host, "hosts": hosts}
            return {
                "synthetic": lambda: data.synthetic(
                    self.config.model.vocab_size, self.seq, self.config.batch, **held_out
                )
            }

        def start(name: str) -> Any:
            loader_args = self._host_loader_args(host, hosts)
            return data.loader(self.dataset, split="validation", source=name, max_batches=limit, **loader_args)

        return {name: lambda name=name: start(name) for name in data.validation_sources(self.dataset)}

    def _host_loader_args(self, host: int, hosts: int) -> dict[str, Any]:
        fits = {"seq": self.seq, "vocab_size": self.config.model.vocab_size}
        return {"batch": self.config.batch, "host": host, "hosts": hosts, **fits}

    def facts(self) -> dict[str, str]:
        """Returns tokenizer.json and data.json, with which the model can read text without the data set."""
        if self.dataset is None:
            return {}
        tokenizer = self.dataset.tokenizer()
        text_config = {"seq": self.seq, "eos": tokenizer.eos, "bos": tokenizer.bos}
        return {"tokenizer.json": tokenizer.text, "data.json": json.dumps(text_config, indent=1) + "\n"}

    def describe(self) -> str:
        """Returns one line for the log."""
        if self.dataset is None:
            return f"synthetic, {self.config.model.vocab_size} tokens"
        return f"{self.config.data}, rows of {self.seq} tokens"


def open_batch_source(config: TrainConfig) -> BatchSource:
    """Opens the data of a run and verifies every shard. Raises DataFitError if it does not fit the model."""
    if config.data == "synthetic":
        return BatchSource(config, config.seq or min(config.model.max_seq, 2048), None)
    dataset: Any
    if config.data == "demo":
        dataset = data.demo_dataset(seq_len=config.seq or DEMO_SEQ)
    else:
        dataset = data.open_mixture(config.data, progress=jax.process_index() == 0)
    if problems := data_problems(config, dataset):
        raise DataFitError(config, problems)
    source = BatchSource(config, config.seq or dataset.seq_len, dataset)
    data.loader(
        dataset, **source._host_loader_args(0, 1)
    ).close()  # raises if the data set has token ids outside the vocabulary
    return source


class DataFitError(ValueError):
    """Raised if a data set does not fit the run. `flags` of `halfbyte train` change the run so that it does."""

    def __init__(self, config: TrainConfig, problems: Sequence[tuple[str, tuple[str, str]]]):
        self.flags = tuple(word for _, flag in problems for word in flag)
        listed = "; ".join(text for text, _ in problems)
        super().__init__(f"--data {config.data} does not fit this run of {config.model.name}: {listed}")

    def __str__(self) -> str:
        return f"{self.args[0]}. Change the run: {' '.join(self.flags)}"


def data_problems(config: TrainConfig, dataset: Any) -> list[tuple[str, tuple[str, str]]]:
    """Returns everything in which a data set does not fit the run, each with the flag and value that fits."""
    model, seq, parts = config.model, dataset.seq_len, as_mixture(dataset).datasets
    problems = []
    if config.seq not in (0, seq):
        problems.append((f"its rows have {seq} tokens, the run reads {config.seq}", ("--seq", str(seq))))
    if seq > model.max_seq:
        problems.append(
            (f"its rows have {seq} tokens, the model at most {model.max_seq}", ("--model.max-seq", str(seq)))
        )
    highest = max((shard.max_token for part in parts for shard in part.manifest.shards), default=0)
    if highest >= model.vocab_size:
        size = pad_vocab_size(max(part.vocab_size for part in parts))
        text = f"it has token ids up to {highest}, the model a vocabulary of {model.vocab_size}"
        problems.append((text, ("--model.vocab-size", str(size))))
    rows = sum(part.num_rows(TRAIN) for part in parts)
    if 0 < rows < config.batch:
        fitting = max(rows // config.accumulate, 1) * config.accumulate
        text = f"it has {rows} training rows, fewer than one global batch of {config.batch}"
        problems.append((text, ("--batch", str(fitting))))
    return problems


def host_shard(mesh: Mesh, batch: int, seq: int) -> tuple[int, int]:
    """Returns (host, hosts): this process reads chunk `host` of `hosts` equal contiguous chunks of a global batch."""
    indices = batch_sharding(mesh).addressable_devices_indices_map((batch, seq)).values()
    rows = sorted({index[0].indices(batch)[:2] for index in indices if index is not None})
    start, stop = rows[0][0], rows[-1][1]
    contiguous = all(before[1] == after[0] for before, after in itertools.pairwise(rows))
    size = stop - start
    if not contiguous or batch % size or start % size:
        return 0, 1
    return start // size, batch // size


def make_global_batch(rows: dict[str, np.ndarray], mesh: Mesh, *, batch: int) -> Batch:
    """Returns global arrays int32 [batch, seq] of which this process holds `rows`."""
    sharding = batch_sharding(mesh)

    def to_global(local: np.ndarray) -> jax.Array:
        shape = (batch, local.shape[1])
        host, hosts = host_shard(mesh, *shape)
        offset = host * (batch // hosts)

        def shard(index: Any) -> np.ndarray:
            start, stop, _ = index[0].indices(batch)
            return local[start - offset : stop - offset, index[1]]

        return jax.make_array_from_callback(shape, sharding, shard)

    return {name: to_global(np.asarray(value, np.int32)) for name, value in rows.items()}


def run_validation(source: BatchSource, mesh: Mesh, evaluate: Callable[[Any], Any]) -> dict[str, float]:
    """Returns the loss by source name, and `all`: the mean over the tokens of all sources.

    Returns an empty dict if the data set has no validation rows.
    """
    results, nll_total, tokens_total = {}, 0.0, 0.0
    for name, start in source.validation(mesh).items():
        with start() as loader:
            sums = [evaluate(make_global_batch(rows, mesh, batch=source.config.batch)) for rows in loader]
        nll, tokens = (float(sum(np.asarray(part[i], np.float64) for part in sums)) for i in (0, 1))
        results[name] = nll / max(tokens, 1.0)
        nll_total, tokens_total = nll_total + nll, tokens_total + tokens
    return {**results, "all": nll_total / max(tokens_total, 1.0)} if results else {}
