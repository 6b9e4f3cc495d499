"""Conformance: every backend over one list of shapes, forward and both gradients, under jit with default flags.

Each GEMM of each backend must be given the operands of the definition bit for bit (the oracle's, which `reference` is
held to as well in `test_qdot`), and give their product to the accumulation error of float32. A backend that cannot
serve a case on this machine says why, and the case is skipped with that reason; on an NVIDIA GPU `native` runs too.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracle_linear as oracle
import pytest
from checks import F8_SUMS, KEY, TOLERANCE, check_linear, matrix, rounded, tensors
from instruments import quick
from shapes import BLOCKS_OF_16, BLOCKS_OF_32

import halfbyte as hb
from halfbyte import devices, ops
from halfbyte.formats import MXFP4, MXFP8, MXFP8_E5M2, unswizzle_scales
from halfbyte.ops.backends import BACKENDS, cudnn_block_scaled, native
from halfbyte.ops.backends.fused import FusedQuantizePasses
from halfbyte.ops.quantize_passes import XLA_PASSES

CASES = [
    ("nvfp4", BLOCKS_OF_16[1], "bfloat16"),
    ("nvfp4", BLOCKS_OF_16[2], "float32"),
    ("nvfp4", BLOCKS_OF_16[5], "bfloat16"),
    ("mxfp8", BLOCKS_OF_32[2], "bfloat16"),
    ("fp8", BLOCKS_OF_16[4], "bfloat16"),
    ("bf16", BLOCKS_OF_16[3], "bfloat16"),
]
B200 = devices.device_by_name("b200")


def problem(recipe, shape, device=None):
    return ops.LinearProblem(recipe, shape.tokens, shape.inputs, shape.outputs, device=device or ops.target_device())


# Somewhere in the table a backend must serve something: one that served nowhere would pass by being skipped.
WIDE = [("nvfp4", (256, 256, 512)), ("mxfp8", (256, 256, 512)), ("fp8", (256, 256, 512)), ("bf16", (256, 256, 512))]


def serves_something(backend) -> bool:
    cases = [
        ops.LinearProblem(hb.recipe(name), *sizes, device=d) for name, sizes in WIDE for d in devices.DEVICES.values()
    ]
    return any(backend.unsupported_reason(case) is None for case in cases)


@pytest.mark.parametrize("backend", list(BACKENDS))
def test_a_backend_serves_something_somewhere(backend):
    assert serves_something(BACKENDS[backend])


def test_backend_that_serves_nothing_is_found():
    idle = dataclasses.replace(BACKENDS["emulated"], name="idle", format_mismatch=lambda recipe: "it serves nothing")
    assert not serves_something(idle)


@pytest.mark.slow(fast_cases=["emulated-nvfp4-2x48.48.80-bfloat16"])
@pytest.mark.parametrize("name, shape, dtype", CASES, ids=lambda p: str(p))
@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "reference"])
def test_backend_gemms_equal_oracle(backend, name, shape, dtype):
    recipe = hb.recipe(name)
    reason = BACKENDS[backend].unsupported_reason(problem(recipe, shape))
    if reason is not None:
        pytest.skip(f"{backend}: {reason}")
    tolerance = F8_SUMS if name == "fp8" and jax.default_backend() == "gpu" else TOLERANCE
    check_linear(recipe, *tensors(shape, dtype), backend=backend, tolerance=tolerance)


class InterpretedPasses(FusedQuantizePasses):
    """The kernels' bodies, on any device."""

    def unsupported(self, problem):
        return None


@pytest.mark.slow
@pytest.mark.usefixtures("interpreted")
def test_fused_passes_in_interpret_mode(monkeypatch):
    """On any machine: the bodies of the quantize kernels run on the host, and give every GEMM the right operands.

    The GEMM kernel has no interpreter: `emulated` multiplies.
    """
    interpreted = dataclasses.replace(BACKENDS["emulated"], name="fused", passes=(InterpretedPasses(),))
    monkeypatch.setitem(BACKENDS, "fused", interpreted)
    x, w, dy = tensors(BLOCKS_OF_16[5], "bfloat16")
    check_linear(hb.recipe("nvfp4"), x, w, dy, backend="fused", compiler_options=quick)


def block_scaled_product(a, b, a_scales, b_scales, preferred_element_type):
    """What `jax.nn.scaled_matmul` means: operands [1, rows, contraction], scales [1, rows, contraction / block]."""

    def decoded(elements, scales):
        wide = scales.astype(jnp.float32)
        return elements.astype(jnp.float32) * jnp.repeat(wide, elements.shape[-1] // scales.shape[-1], axis=-1)

    return jnp.einsum(
        "bmk,bnk->bmn",
        decoded(a, a_scales),
        decoded(b, b_scales),
        precision="highest",
        preferred_element_type=preferred_element_type,
    )


def cudnn_call(a, b, *scales, dtype):
    """What `__cudnn$blockScaledDot` means, by XLA's source: scales in tiles, and with a third one a product in the
    result's type, of sums that are in it already.
    """
    compact = [
        unswizzle_scales(tiled.reshape(-1), rows.shape[1], rows.shape[2] // block)[None]
        for rows, tiled, block in zip((a, b), scales, [16 if a.dtype == jnp.float4_e2m1fn else 32] * 2)
    ]
    sums = block_scaled_product(a, b, *compact, preferred_element_type=jnp.float32).astype(dtype)
    return sums if len(scales) == 2 else sums * scales[2]


LAID_OUT = [("nvfp4", BLOCKS_OF_16[4]), ("nvfp4", BLOCKS_OF_16[5]), ("mxfp8", BLOCKS_OF_32[2])]


@pytest.mark.slow(fast_cases=["mxfp8-shape2"])
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("name, shape", LAID_OUT)
def test_native_operand_layout_equals_oracle(name, shape, monkeypatch):
    """On any machine: with cuDNN's call replaced by its definition and kernels interpreted, `native` gives the oracle's
    GEMMs.

    The float4 and float8 elements and tiled scales that it hands over are decoded here, so a wrong transpose, nibble
    or tile cannot cancel.
    """
    monkeypatch.setattr(cudnn_block_scaled, "cudnn_block_scaled_call", cudnn_call)
    with ops.compile_for(B200):
        choice = choose_native(name, shape)
        assert choice.passes.name == choice.weight_passes == "native"
        check_linear(hb.recipe(name), *tensors(shape, "bfloat16"), backend="native", compiler_options=quick)


@pytest.mark.slow(fast_cases=["mxfp8-shape1"])
@pytest.mark.parametrize("name, shape", [LAID_OUT[0], LAID_OUT[2]])
def test_native_scaled_matmul_operands_equal_oracle(name, shape, monkeypatch):
    """The same of the plain way: the one of Hopper, of old cuDNNs and of programs that the compiler cuts."""
    monkeypatch.setattr(jax.nn, "scaled_matmul", block_scaled_product)
    monkeypatch.setattr(cudnn_block_scaled, "cudnn_version", lambda device: (9, 12, 0))
    with ops.compile_for(B200):
        assert choose_native(name, shape).passes is XLA_PASSES
        check_linear(hb.recipe(name), *tensors(shape, "bfloat16"), backend="native", compiler_options=quick)


def choose_native(name, shape):
    return ops.choose_backend("native", problem(hb.recipe(name), shape, B200))


@pytest.mark.slow
@pytest.mark.usefixtures("interpreted")
def test_native_bf16_result_keeps_every_bit_of_alpha(monkeypatch):
    """The power of two goes into the call and the rest onto its result: bf16(bf16(sums * 2^e) * m), to the bit."""
    monkeypatch.setattr(cudnn_block_scaled, "cudnn_block_scaled_call", cudnn_call)
    x, w, dy = tensors(BLOCKS_OF_16[4], "bfloat16")
    with ops.compile_for(B200):
        y = jax.jit(lambda x, w: hb.qdot(x, w, recipe=hb.recipe("nvfp4"), key=KEY, backend="native"))(x, w)
    want = oracle.linear(matrix(x), matrix(w), np.asarray(dy).reshape(-1, w.shape[1]), hb.recipe("nvfp4"), KEY)["fprop"]
    alpha = float(np.float32(want.left.decode) * np.float32(want.right.decode))
    rest = np.float64(np.frexp(alpha)[0] * 2)
    slack = TOLERANCE * want.bound
    low, high = (rounded(rounded((want.result + s * slack) / rest, "bfloat16") * rest, "bfloat16") for s in (-1, 1))
    got = matrix(y).astype(np.float64)
    assert 1 < rest < 2 and ((low <= got) & (got <= high)).all()


@pytest.mark.slow
@pytest.mark.parametrize("factor", [1.0, 3.0, 2.0**-126, 1e-3, 7e-20, 0.0, 1e-45, np.inf, np.nan])
def test_a_factor_is_split_without_loss(factor):
    factor = jnp.float32(factor)
    power, rest = jax.jit(native.split_power_of_two)(factor)
    assert float(power.astype(jnp.bfloat16)) == float(power) == 2.0 ** np.log2(float(power))
    if np.float32(factor) >= np.finfo(np.float32).tiny and np.isfinite(factor):
        assert 1 <= rest < 2 and np.float64(power) * np.float64(rest) == np.float64(factor)
    else:
        np.testing.assert_array_equal(*(np.asarray(a).view(np.uint32) for a in (rest, factor)))
        assert power == 1


def test_auto_is_native_where_device_trains_in_format():
    shape = BLOCKS_OF_16[4]
    for device, name, want in (
        ("b200", "nvfp4", "native"),
        ("gb300", "nvfp4", "native"),
        ("b200", "mxfp8", "native"),
        ("b200", "fp8", "emulated"),
        ("b200", "bf16", "emulated"),
    ):
        found = ops.choose_backend("auto", problem(hb.recipe(name), shape, devices.device_by_name(device))).name
        assert found == want or (want == "emulated" and found == "fused"), (device, name)
    assert (
        ops.choose_backend("auto", problem(hb.recipe("nvfp4"), shape, devices.device_by_name("h100"))).name != "native"
    )
    odd = dataclasses.replace(problem(hb.recipe("nvfp4"), shape, B200), outputs=48)
    assert ops.choose_backend("auto", odd).name != "native"  # dgrad sums over 48


def test_auto_goes_by_the_unit_that_a_format_names():
    """A new name costs nothing, and a format without a unit is emulated on every device."""
    shape = BLOCKS_OF_32[2]
    new = {
        "mine": dataclasses.replace(MXFP8, name="mine"),
        "odd": dataclasses.replace(MXFP8, name="odd", hardware_unit=None),
    }
    recipes = {name: hb.Recipe(name, *[hb.OperandPolicy(format)] * 6) for name, format in new.items()}
    for device in ("h200", "b200"):
        chosen = {
            n: ops.choose_backend("auto", problem(r, shape, devices.device_by_name(device))).name
            for n, r in recipes.items()
        }
        assert chosen == {"mine": "native" if device == "b200" else "emulated", "odd": "emulated"}
    with pytest.raises(ValueError, match="fprop multiplies odd by odd"):
        ops.choose_backend("native", problem(recipes["odd"], shape, B200))


@pytest.mark.parametrize("gemm, sizes", [("fprop", (64, 48, 64)), ("dgrad", (64, 64, 48)), ("wgrad", (48, 64, 64))])
def test_native_refuses_k_that_is_no_multiple_of_32(gemm, sizes):
    case = ops.LinearProblem(hb.recipe("nvfp4"), *sizes, device=B200)
    with pytest.raises(ValueError, match=rf"backend 'native' cannot serve recipe nvfp4: {gemm} sums over 48.*32.*auto"):
        ops.choose_backend("native", case)
    alone = dataclasses.replace(case, training=False)
    assert (native.BACKEND.unsupported_reason(alone) is None) == (gemm != "fprop")


def test_native_says_which_formats_it_lacks():
    with pytest.raises(ValueError, match="fprop multiplies fp8 by fp8; block-scaled units take one block-scaled"):
        ops.choose_backend("native", problem(hb.recipe("fp8"), BLOCKS_OF_16[4], B200))
    # XLA's rewriter knows NVFP4 and MXFP8: a scaled_matmul of MXFP4 became a dequantized bfloat16 GEMM on Blackwell.
    mxfp4 = hb.Recipe("mxfp4", *[hb.OperandPolicy(MXFP4)] * 6)
    with pytest.raises(ValueError, match="fprop multiplies mxfp4, which cuDNN's block-scaled call does not take"):
        ops.choose_backend("native", problem(mxfp4, BLOCKS_OF_32[2], B200))
    wide = hb.Recipe("wide", *[hb.OperandPolicy(MXFP8_E5M2)] * 6)
    with pytest.raises(ValueError, match="E5M2 on one side only"):
        ops.choose_backend("native", problem(wide, BLOCKS_OF_32[2], B200))


@pytest.mark.parametrize("shape", [(0, 32), (4, 0, 32)])
def test_qdot_of_empty_batch_is_refused(shape):
    with pytest.raises(ValueError, match="empty batch"):
        ops.qdot(jnp.zeros(shape), jnp.zeros((32, 16)), recipe="nvfp4", key=KEY)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="on a GPU native serves")
def test_naming_a_backend_that_cannot_serve_is_an_error():
    x, w, _ = tensors(BLOCKS_OF_16[4], "bfloat16")
    with pytest.raises(ValueError, match="'native' cannot serve recipe nvfp4.*NVIDIA GPU.*use emulated"):
        hb.qdot(x, w, recipe=hb.recipe("nvfp4"), backend="native")
    with pytest.raises(ValueError, match="unknown backend 'cuda'; choose auto, reference, emulated"):
        hb.qdot(x, w, recipe=hb.recipe("nvfp4"), backend="cuda")


def test_carriers_are_exact_in_bfloat16():
    """Every E2M1 value times every E4M3 scale, and every 8-bit value: none needs more than bfloat16's 8 bits."""
    e2m1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    codes = np.arange(127, dtype=np.uint8)
    e4m3 = codes.view(jnp.float8_e4m3fn).astype(np.float32)
    products = np.outer(e2m1, e4m3)
    np.testing.assert_array_equal(products.astype(jnp.bfloat16).astype(np.float32), products)
    np.testing.assert_array_equal(e4m3.astype(jnp.bfloat16).astype(np.float32), e4m3)
