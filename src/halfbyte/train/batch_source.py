"""The run's data: opened and verified at start, cut among the hosts, put onto the mesh.

Each process reads only the rows that its own devices hold. Which rows these are follows from the mesh, so that a batch
split over `tensor` or `context` across processes is read by all of them, and one split over `fsdp` is read once.
"""

import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from halfbyte import data

from .config import TrainConfig
from .step import Batch, batch_sharding

DEMO_SEQ = 128


@dataclass(frozen=True)
class Source:
    """Where batches come from. `dataset` is None for synthetic data."""

    config: TrainConfig
    seq: int
    dataset: Any

    def loader(self, mesh: Mesh) -> Any:
        """Endless training batches of this process, as numpy."""
        host, hosts = host_part(mesh, self.config.batch, self.seq)
        if self.dataset is None:
            return data.synthetic(
                self.config.model.vocab_size, self.seq, self.config.batch, seed=self.config.seed, host=host, hosts=hosts
            )
        return data.loader(self.dataset, seed=self.config.seed, **self._part(host, hosts))

    def validation(self, mesh: Mesh) -> dict[str, Any]:
        """A function by source name that starts its validation batches."""
        host, hosts = host_part(mesh, self.config.batch, self.seq)
        limit = self.config.validation.batches or None
        if self.dataset is None:
            held_out = {"seed": self.config.seed + 1, "batches": limit or 4, "host": host, "hosts": hosts}
            return {
                "synthetic": lambda: data.synthetic(
                    self.config.model.vocab_size, self.seq, self.config.batch, **held_out
                )
            }

        def start(name: str) -> Any:
            part = self._part(host, hosts)
            return data.loader(self.dataset, split="validation", source=name, max_batches=limit, **part)

        return {name: lambda name=name: start(name) for name in data.validation_sources(self.dataset)}

    def _part(self, host: int, hosts: int) -> dict[str, Any]:
        fits = {"seq": self.seq, "vocab_size": self.config.model.vocab_size}
        return {"batch": self.config.batch, "host": host, "hosts": hosts, **fits}

    def facts(self) -> dict[str, str]:
        """tokenizer.json and data.json: what reading text with the model takes when the data is elsewhere."""
        if self.dataset is None:
            return {}
        tokenizer = self.dataset.tokenizer()
        read = {"seq": self.seq, "eos": tokenizer.eos, "bos": tokenizer.bos}
        return {"tokenizer.json": tokenizer.text, "data.json": json.dumps(read, indent=1) + "\n"}

    def describe(self) -> str:
        """One line for the log."""
        if self.dataset is None:
            return f"synthetic, {self.config.model.vocab_size} tokens"
        return f"{self.config.data}, rows of {self.seq} tokens"


def open_source(config: TrainConfig) -> Source:
    """The data of a run, every shard verified. Refuses what does not fit the model before anything is compiled."""
    if config.data == "synthetic":
        return Source(config, config.seq or min(config.model.max_seq, 2048), None)
    dataset: Any
    if config.data == "demo":
        dataset = data.demo_dataset(seq_len=config.seq or DEMO_SEQ)
    else:
        dataset = data.open_mixture(config.data, progress=jax.process_index() == 0)
    seq = config.seq or dataset.seq_len
    if seq > config.model.max_seq:
        raise ValueError(
            f"{config.data}: rows of {seq} tokens are longer than the model's max_seq {config.model.max_seq}; "
            "prepare the data with a shorter --seq-len, or raise --model.max-seq"
        )
    source = Source(config, seq, dataset)
    data.loader(dataset, **source._part(0, 1)).close()  # refuses a data set that is too small or has strange tokens
    return source


def host_part(mesh: Mesh, batch: int, seq: int) -> tuple[int, int]:
    """(host, hosts): this process reads the host-th of `hosts` equal contiguous parts of every global batch."""
    indices = batch_sharding(mesh).addressable_devices_indices_map((batch, seq)).values()
    rows = sorted({index[0].indices(batch)[:2] for index in indices if index is not None})
    first, last = rows[0][0], rows[-1][1]
    contiguous = all(before[1] == after[0] for before, after in itertools.pairwise(rows))
    size = last - first
    if not contiguous or batch % size or first % size:
        return 0, 1
    return first // size, batch // size


def to_mesh(rows: dict[str, np.ndarray], mesh: Mesh, *, batch: int) -> Batch:
    """This process's rows as its part of global arrays [batch, seq]."""
    sharding = batch_sharding(mesh)

    def place(local: np.ndarray) -> jax.Array:
        shape = (batch, local.shape[1])
        host, hosts = host_part(mesh, *shape)
        offset = host * (batch // hosts)

        def shard(index: Any) -> np.ndarray:
            start, stop, _ = index[0].indices(batch)
            return local[start - offset : stop - offset, index[1]]

        return jax.make_array_from_callback(shape, sharding, shard)

    return {name: place(np.asarray(value, np.int32)) for name, value in rows.items()}


def validate(source: Source, mesh: Mesh, evaluate: Callable[[Any], Any]) -> dict[str, float]:
    """Loss by source name, and `all`: the mean over the tokens of all sources. Empty where the data set has no
    validation rows."""
    results, nll_total, tokens_total = {}, 0.0, 0.0
    for name, start in source.validation(mesh).items():
        with start() as loader:
            sums = [evaluate(to_mesh(rows, mesh, batch=source.config.batch)) for rows in loader]
        nll, tokens = (float(sum(np.asarray(part[i], np.float64) for part in sums)) for i in (0, 1))
        results[name] = nll / max(tokens, 1.0)
        nll_total, tokens_total = nll_total + nll, tokens_total + tokens
    return {**results, "all": nll_total / max(tokens_total, 1.0)} if results else {}
