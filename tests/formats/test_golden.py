"""*Golden*: every stored vector, bit for bit, inside jit with default compiler flags, on whatever device JAX chose.

The vectors come from outside (tests/golden/README.md). Inputs and outputs cross the jit boundary as the bits they are;
nothing is computed outside it. How many arrays were compared is printed at the end of the run. Oracle: *golden*.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

from halfbyte.formats import E2M1, NVFP4, hadamard16, pack_nibbles, quantize, swizzle_scales, unswizzle_scales
from halfbyte.formats.elements import round_stochastic_e2m1, with_sign
from halfbyte.formats.exact_float32 import bitcast_to_float32, bitcast_to_uint32, copy_sign
from halfbyte.formats.qtensor import decode_block_scales

GOLDEN = Path(__file__).parents[1] / "golden"
TENSORS = sorted(path.stem for path in GOLDEN.glob("*__*.npz"))
HOLDS_NAN = {"inf_32x32__rht1d"}  # inf - inf on its columnwise side: nothing to compare there
SIDE = 64


def load(name):
    with np.load(GOLDEN / f"{name}.npz") as archive:
        return {field: archive[field] for field in archive.files}


def stored_input(fields):
    """x in the dtype it is to be fed in; the float32 of the file holds values of that dtype."""
    return fields["x"].astype(ml_dtypes.bfloat16 if fields["in_dtype"] == "bfloat16" else np.float32)


def side_of(name, side):
    """The input of one side, small tensors laid out again and again until they are 64 x 64, for fewer programs.

    No amax changes and every block stays whole, so that the answers are in the first rows and columns.
    """
    fields = load(name)
    x = stored_input(fields) if side == "row" else np.ascontiguousarray(stored_input(fields).T)
    return x if max(x.shape) > SIDE else np.tile(x, (SIDE // x.shape[0], SIDE // x.shape[1]))


def bits(x):
    """Integers, so that signed zeros and NaN are compared as they are."""
    return lax.bitcast_convert_type(x, jnp.uint16 if x.dtype == jnp.bfloat16 else jnp.uint32)


def outputs(x, block, transform):
    """What the vectors hold of one side, from x with the blocks along its last axis."""
    found = {}
    if transform:
        x = hadamard16(x)
        found["input_rht"] = bits(x)
    q = quantize(x, NVFP4, block=block)
    # `codes` and `packed` of the files forget the sign of a zero that came in, not of a number that became zero.
    folded = jnp.where(bitcast_to_uint32(x) == jnp.uint32(0x8000_0000), jnp.uint8(0), q.codes)
    return found | {
        "codes_hw": q.codes,
        "packed_hw": q.packed,
        "codes": folded,
        "packed": pack_nibbles(folded),
        "scale_u8": lax.bitcast_convert_type(q.scales, jnp.uint8),
        "scale_f32": bits(decode_block_scales(q.scales, NVFP4)),
        "amax": bits(q.amax),
    }


def expected(fields, side, block):
    """The same fields from the file. Square blocks repeat a scale on 16 rows there, and are compact here."""
    tall = 16 if block == "2d" else 1
    answers = {name: fields[f"{side}_{name}"] for name in ("codes_hw", "codes", "packed", "scale_u8", "scale_f32")}
    even, odd = answers["codes_hw"][:, ::2], answers["codes_hw"][:, 1::2]
    answers["packed_hw"] = even | odd << 4
    answers["scale_u8"], answers["scale_f32"] = answers["scale_u8"][::tall], answers["scale_f32"][::tall]
    for name in ("amax", "global_encode_scale"):
        answers[name] = fields[f"{side}_{name}"][0]
    if f"{side}_input_rht" in fields:
        answers["input_rht"] = fields[f"{side}_input_rht"].astype(ml_dtypes.bfloat16)
    return {name: a.view(f"u{a.itemsize}") if a.dtype.kind in "fV" else a for name, a in answers.items()}


def sides(name):
    """(side, block, transform) of one file."""
    mode = name.rpartition("__")[2]
    block = "2d" if mode == "2d" else "1d"
    yield "row", block, False
    if name not in HOLDS_NAN:
        yield "col", block, mode == "rht1d"


def stacks(name):
    """Whether a tensor goes into one batch with the others."""
    fields = load(name)
    return fields["in_dtype"] == "bfloat16" and max(fields["x"].shape) <= SIDE


def compare(found, answers, label):
    """How many arrays were compared."""
    found = found | {"global_encode_scale": encode_scale(found["amax"])}
    for field, answer in answers.items():
        result = np.asarray(found[field])[tuple(slice(n) for n in answer.shape)]
        np.testing.assert_array_equal(result, answer, err_msg=f"{label} {field}")
    return len(answers)


encode_scale = jax.jit(lambda amax_bits: bits(NVFP4.tensor_scales(bitcast_to_float32(amax_bits)).encode))
one = jax.jit(outputs, static_argnums=(1, 2))
batched = jax.jit(jax.vmap(outputs, in_axes=(0, None, None)), static_argnums=(1, 2))
scanned = jax.jit(
    lambda xs, block, transform: lax.map(lambda x: outputs(x, block, transform), xs), static_argnums=(1, 2)
)


@pytest.mark.parametrize("name", TENSORS)
def test_tensor(name, golden_count):
    for side, block, transform in sides(name):
        found = one(side_of(name, side), block, transform)
        golden_count(name, compare(found, expected(load(name), side, block), f"{name} {side}"))


@pytest.mark.slow
@pytest.mark.parametrize("run", [batched, scanned], ids=["vmap", "scan"])
@pytest.mark.parametrize("block, transform", [("1d", False), ("2d", False), ("1d", True)])
def test_stacked_tensors(run, block, transform, golden_count):
    """Tensors of one shape as one batch: each has its own amax, and the careful path of one is not seen by another."""
    cases = [(n, s) for n in TENSORS for s, b, t in sides(n) if (b, t) == (block, transform) and stacks(n)]
    made = run(np.stack([side_of(name, side) for name, side in cases]), block, transform)
    found = {field: np.asarray(arrays) for field, arrays in made.items()}
    for i, (name, side) in enumerate(cases):
        answers = expected(load(name), side, block)
        golden_count(name, compare({f: a[i] for f, a in found.items()}, answers, f"{name} {side}"))


def test_stochastic_table(golden_count):
    table = load("sr_software_e2m1")
    shape = table["codes"].shape

    @jax.jit
    def rounded(x_bits, noise):
        rounded = round_stochastic_e2m1(bitcast_to_float32(x_bits & jnp.uint32(0x7FFF_FFFF)), noise)
        return bits(copy_sign(rounded.value, x_bits)), with_sign(E2M1, rounded.code, x_bits)

    x = np.broadcast_to(table["x"][:, None], shape).view(np.uint32)
    noise = np.broadcast_to(table["rbits8"].astype(np.uint8), shape)
    value, code = (np.asarray(a) for a in rounded(x, noise))
    # The table folds negative zeros. A NaN saturates to 6; its sign is what the input's bit says.
    number = ~np.isnan(table["x"])
    np.testing.assert_array_equal(
        np.where(code == 8, 0, code)[number], np.where(table["codes"] == 8, 0, table["codes"])[number]
    )
    np.testing.assert_array_equal(value.view(np.float32)[number], table["value"][number])
    np.testing.assert_array_equal(code[~number] & 7, 7)
    golden_count("sr_software_e2m1", 2)


def test_scale_tiles(golden_count):
    layout = load("scale_swizzle_256x8")
    tiled = jax.jit(swizzle_scales)(layout["compact"])
    np.testing.assert_array_equal(tiled, layout["swizzled_flat"])
    np.testing.assert_array_equal(jax.jit(unswizzle_scales, static_argnums=(1, 2))(tiled, 256, 8), layout["compact"])
    golden_count("scale_swizzle_256x8", 2)
