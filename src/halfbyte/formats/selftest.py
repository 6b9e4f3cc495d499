"""Comparison of every quantizer with stored answers, inside jit, on the current device.

A compiler may silently remove a 4-bit rounding, and a kernel may be wrong on one chip only, so bits are checked on the
machine itself: by `halfbyte doctor`, and by callers of `self_test`. The answers are in `vectors/selftest.npz`: NVFP4
from an outside reference, the other formats from an independent NumPy oracle (both are rebuilt and compared by
tests/formats/test_selftest.py). Inputs are stored as bits, so that subnormals and signed zeros survive. The tensors of
a group go through one compiled program, one after the other.
"""

import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from halfbyte.formats.block_formats import FORMATS
from halfbyte.formats.hadamard import hadamard16
from halfbyte.formats.qtensor import QTensor, quantize

VECTORS = Path(__file__).parent / "vectors" / "selftest.npz"
FLOAT_OF_BITS = {np.dtype(np.uint16): jnp.bfloat16, np.dtype(np.uint32): jnp.float32}


@dataclass(frozen=True)
class SelftestResult:
    """Result of one quantizer over several tensors: number of compared values, mismatches, and the first mismatch."""

    name: str
    what: str
    tensors: int
    num_compared: int
    mismatches: int
    first_mismatch: str = ""

    @property
    def passed(self) -> bool:
        return self.num_compared > 0 and self.mismatches == 0


def self_test(path: Path = VECTORS) -> list[SelftestResult]:
    """Returns one result per group of stored vectors; unreadable vectors are one failed result."""
    try:
        stored = load_vectors(path)
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        return [SelftestResult("vectors", f"{path.name} cannot be read: {error}", 0, 0, 0)]
    return [run_check(name, group) for name, group in stored.items()]


def load_vectors(path: Path) -> dict[str, dict[str, np.ndarray]]:
    """Returns {group name: fields}: `format`, `block`, `rounding`, `names`, input bits `x` and expected outputs."""
    groups: dict[str, dict[str, np.ndarray]] = {}
    with path.open("rb") as file, np.load(file) as archive:
        for entry in archive.files:
            group, _, field = entry.partition("/")
            groups.setdefault(group, {})[field] = archive[entry]
    return groups


def run_check(name: str, group: dict[str, np.ndarray]) -> SelftestResult:
    """Runs one group on the default device and counts mismatches with the stored answers."""
    format, block, rounding = (str(group[field]) for field in ("format", "block", "rounding"))
    transform = bool(group["hadamard"])
    result = _program(format, block, rounding, transform)(jnp.asarray(group["x"]), jnp.asarray(group["key"]))
    expected = {field: group[field] for field in ("rotated", "codes", "scales", "amax") if field in group}
    num_compared = mismatches = 0
    first_mismatch = ""
    for field, answer in expected.items():
        differs = np.asarray(result[field]) != answer
        num_compared, mismatches = num_compared + differs.size, mismatches + int(differs.sum())
        if differs.any() and not first_mismatch:
            position = tuple(int(i) for i in np.argwhere(differs)[0])
            first_mismatch = f"{field}{list(position[1:])} of {group['names'][position[0]]}"
    what = " ".join([format, block, rounding, *(["hadamard"] if transform else [])])
    return SelftestResult(name, what, len(group["names"]), num_compared, mismatches, first_mismatch)


def _program(format: str, block: str, rounding: str, transform: bool) -> Callable[..., dict[str, jax.Array]]:
    """Returns a jitted function of input bits [tensors, M, N] and key words, whose outputs are integers."""

    def quantize_one(bits: jax.Array, key: jax.Array) -> dict[str, jax.Array]:
        x = lax.bitcast_convert_type(bits, FLOAT_OF_BITS[np.dtype(bits.dtype)])
        outputs = {}
        if transform:
            x = hadamard16(x)
            outputs["rotated"] = lax.bitcast_convert_type(x, jnp.uint16)
        tensor = quantize(x, FORMATS[format], block=block, rounding=rounding, key=jax.random.wrap_key_data(key))
        return outputs | _as_integers(tensor)

    return jax.jit(lambda bits, key: lax.map(lambda x: quantize_one(x, key), bits))


def _as_integers(tensor: QTensor) -> dict[str, jax.Array]:
    fields = {"codes": tensor.codes, "amax": lax.bitcast_convert_type(tensor.amax, jnp.uint32)}
    if tensor.scales is not None:
        fields["scales"] = lax.bitcast_convert_type(tensor.scales, jnp.uint8)
    return fields
