"""Every quantizer against stored answers, inside jit, on the device at hand.

A compiler may remove a 4-bit rounding without a word, and a kernel may be wrong on one chip alone, so the question "are
the bits right here?" is asked on the machine itself: `halfbyte doctor`, and whoever calls `self_test`. The answers are
in `vectors/selftest.npz`: NVFP4 from an outside reference, the other formats from an independent NumPy oracle (both are
rebuilt and compared by tests/formats/test_selftest.py). Inputs are kept as bits, so that subnormals and signed zeros
arrive as they were stored. Tensors of one group go through one compiled program, one after the other.
"""

import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from halfbyte.formats.blocks import FORMATS
from halfbyte.formats.hadamard import hadamard16
from halfbyte.formats.qtensor import QTensor
from halfbyte.formats.quantize import quantize

VECTORS = Path(__file__).parent / "vectors" / "selftest.npz"
FLOAT_OF_BITS = {np.dtype(np.uint16): jnp.bfloat16, np.dtype(np.uint32): jnp.float32}


@dataclass(frozen=True)
class Check:
    """One quantizer over some tensors: how many numbers were compared, how many differ, and where first."""

    name: str
    what: str
    tensors: int
    compared: int
    wrong: int
    first_wrong: str = ""

    @property
    def passed(self) -> bool:
        return self.compared > 0 and self.wrong == 0


def self_test(path: Path = VECTORS) -> list[Check]:
    """A Check for every group of stored vectors. Vectors that cannot be read are a check that did not pass."""
    try:
        stored = load(path)
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        return [Check("vectors", f"{path.name} cannot be read: {error}", 0, 0, 0)]
    return [run_check(name, group) for name, group in stored.items()]


def load(path: Path) -> dict[str, dict[str, np.ndarray]]:
    """Group name -> its fields: `format`, `block`, `rounding`, `names`, the input bits `x`, the expected outputs."""
    groups: dict[str, dict[str, np.ndarray]] = {}
    with path.open("rb") as file, np.load(file) as archive:
        for entry in archive.files:
            group, _, field = entry.partition("/")
            groups.setdefault(group, {})[field] = archive[entry]
    return groups


def run_check(name: str, group: dict[str, np.ndarray]) -> Check:
    """Runs one group on the default device and counts what differs from the stored answers."""
    format, block, rounding = (str(group[field]) for field in ("format", "block", "rounding"))
    transform = bool(group["hadamard"])
    result = _program(format, block, rounding, transform)(jnp.asarray(group["x"]), jnp.asarray(group["key"]))
    expected = {field: group[field] for field in ("rotated", "codes", "scales", "amax") if field in group}
    compared = wrong = 0
    first = ""
    for field, answer in expected.items():
        differs = np.asarray(result[field]) != answer
        compared, wrong = compared + differs.size, wrong + int(differs.sum())
        if differs.any() and not first:
            place = tuple(int(i) for i in np.argwhere(differs)[0])
            first = f"{field}{list(place[1:])} of {group['names'][place[0]]}"
    what = " ".join([format, block, rounding, *(["hadamard"] if transform else [])])
    return Check(name, what, len(group["names"]), compared, wrong, first)


def _program(format: str, block: str, rounding: str, transform: bool) -> Callable[..., dict[str, jax.Array]]:
    """A jitted function of input bits [tensors, M, N] and key words, that returns outputs as integers."""

    def one(bits: jax.Array, key: jax.Array) -> dict[str, jax.Array]:
        x = lax.bitcast_convert_type(bits, FLOAT_OF_BITS[np.dtype(bits.dtype)])
        found = {}
        if transform:
            x = hadamard16(x)
            found["rotated"] = lax.bitcast_convert_type(x, jnp.uint16)
        made = quantize(x, FORMATS[format], block=block, rounding=rounding, key=jax.random.wrap_key_data(key))
        return found | _as_integers(made)

    return jax.jit(lambda bits, key: lax.map(lambda x: one(x, key), bits))


def _as_integers(made: QTensor) -> dict[str, jax.Array]:
    found = {"codes": made.codes, "amax": lax.bitcast_convert_type(made.amax, jnp.uint32)}
    if made.scales is not None:
        found["scales"] = lax.bitcast_convert_type(made.scales, jnp.uint8)
    return found
