"""What a checkpoint says about itself, beside its arrays: names, shapes, dtypes and checksums of all leaves, and what
the caller adds.

The record travels as one JSON string with its own CRC, so that a damaged record cannot pass for a different, valid one.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp

from halfbyte.inputs import check_whole, parse_json, sealed_json, sealed_text

from .checksum import inspect, named_leaves

LAYOUT = 1


class DamagedCheckpoint(Exception):
    """A checkpoint whose bytes are not those that were written. The message names the file or the arrays."""


class MissingFile(DamagedCheckpoint):
    """A checkpoint that lacks a file: damaged, or just being deleted by its run."""


class LoadFailed(DamagedCheckpoint):
    """A checkpoint that was not loaded, by an error that damage makes and a passing fault of the storage makes too."""


class PoisonedCheckpoint(DamagedCheckpoint):
    """A checkpoint whose bytes are those that were written, and whose values are not all finite."""


class UnreadableCheckpoint(Exception):
    """A checkpoint that the storage did not give back. It may be whole: it is never set aside."""


class CheckpointMismatch(ValueError):
    """A healthy checkpoint that does not fit the state it should fill."""


@dataclass(frozen=True)
class Record:
    """The step, its leaves by item (`params`, `optimizer`, ...), and `extra`: JSON of the caller (config, data
    state)."""

    step: int
    leaves: Mapping[str, Mapping[str, Mapping[str, Any]]]
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def claimed(self) -> int:
        """Bytes of all leaves, as the record has them."""
        leaves = (leaf for item in self.leaves.values() for leaf in item.values())
        return sum(math.prod(leaf["shape"]) * jnp.dtype(leaf["dtype"]).itemsize for leaf in leaves)

    def to_json(self) -> dict[str, Any]:
        """`{"record": text, "crc32": number}`."""
        body = {"layout": LAYOUT, "step": self.step, "leaves": self.leaves, "extra": self.extra}
        return sealed_json("record", body)

    @classmethod
    def from_json(cls, stored: Any) -> "Record":
        """The record back; DamagedCheckpoint when it is missing or not what was written."""
        text = sealed_text("record", stored)
        if text is None:
            raise DamagedCheckpoint("its record is missing, or does not match its own CRC")
        try:
            body = parse_json(text, what="its record")
            if body["layout"] != LAYOUT:
                raise CheckpointMismatch(f"checkpoint layout {body['layout']}, but this version reads {LAYOUT}")
            check_whole("step", body["step"], most=2**62)
            _check_leaves(body["leaves"])
            return cls(step=body["step"], leaves=body["leaves"], extra=dict(body["extra"]))
        except CheckpointMismatch:
            raise
        except (KeyError, TypeError, AttributeError, ValueError) as error:  # a CRC can be made for any content
            raise DamagedCheckpoint(f"its record is none: {type(error).__name__} {error}") from None


def _check_leaves(leaves: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> None:
    """Types of everything that a restore reads from a record; TypeError, KeyError or ValueError where it is none."""
    for item in leaves.values():
        for leaf in item.values():
            for size in leaf["shape"]:
                check_whole("shape", size, most=2**62)
            if not isinstance(leaf["dtype"], str) or "checksum" not in leaf:
                raise TypeError(f"a leaf without dtype and checksum: {str(leaf)[:80]}")
            if not jnp.issubdtype(leaf["dtype"], jnp.number) and leaf["dtype"] != "bool":
                raise TypeError(f"a leaf of {leaf['dtype'][:80]!r}, which are no numbers")


def describe(items: Mapping[str, Any]) -> dict[str, dict[str, dict[str, Any]]]:
    """Shape and dtype of every leaf, by item and path."""
    return {
        item: {name: {"shape": list(leaf.shape), "dtype": str(leaf.dtype)} for name, leaf in named_leaves(tree).items()}
        for item, tree in items.items()
    }


def describe_with_checksums(items: Mapping[str, Any]) -> dict[str, dict[str, dict[str, Any]]]:
    """Shape, dtype and checksum of every leaf, by item and path, of what is in memory now. Raises PoisonedCheckpoint,
    naming the leaves, when a value is not finite: such a state is not worth keeping."""
    described = describe(items)
    poisoned: dict[str, int] = {}
    for item, tree in items.items():
        for name, found in inspect(tree).items():
            described[item][name]["checksum"] = found.checksum
            if found.not_finite:
                poisoned[f"{item}/{name}"] = found.not_finite
    refuse_poisoned(poisoned)
    return described


def refuse_poisoned(not_finite: Mapping[str, int]) -> None:
    """Raise PoisonedCheckpoint if any leaf holds values that are not finite, or too large."""
    if not_finite:
        listing = ", ".join(f"{count} in {name}" for name, count in list(not_finite.items())[:4])
        raise PoisonedCheckpoint(
            f"it holds values that are not finite, or too large to be squared: {listing} ({len(not_finite)} arrays)"
        )


def one_line(error: BaseException) -> str:
    """An error's text, on one line of at most 300 characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:300] + "..."


def check_fits(record: Record, abstract: Mapping[str, Any]) -> None:
    """Raise CheckpointMismatch with one line a leaf when shapes, dtypes or names differ from what is asked for."""
    lines = []
    for item, wanted in describe(abstract).items():
        stored = record.leaves.get(item)
        if stored is None:
            lines.append(f"{item}: not in the checkpoint")
            continue
        for name in sorted(set(stored) | set(wanted)):
            has, wants = _summary(stored.get(name)), _summary(wanted.get(name))
            if has != wants:
                lines.append(f"{item}/{name}: checkpoint has {has}, this run wants {wants}")
    if lines:
        shown = "\n  ".join(lines[:12] + ([f"... and {len(lines) - 12} more"] if len(lines) > 12 else []))
        raise CheckpointMismatch(f"the checkpoint of step {record.step} does not fit this run:\n  {shown}")


def _summary(leaf: Mapping[str, Any] | None) -> str:
    if leaf is None:
        return "nothing"
    return f"{leaf['dtype']}[{','.join(map(str, leaf['shape']))}]"
