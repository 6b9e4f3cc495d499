"""The kernels themselves, compiled and inside jit with default flags, against the oracle: every bit. Needs a GPU."""

import functools

import jax
import jax.numpy as jnp
import kernel_expected as oracle
import ml_dtypes
import numpy as np
import oracle_table as table
import pytest
import test_eden as eden
import test_mxfp8 as mx
from instruments import activation
from kernel_programs import RULES, again, quartet2

from halfbyte import devices
from halfbyte import kernels as K
from halfbyte.kernels import fp8_cast, mxfp8_quantize, rms_norm
from halfbyte.kernels.hopper_gemm import GEMM_LAYOUTS, matmul, unsupported_gemm
from halfbyte.kernels.mosaic_launch import StackSlice

T, N = 256, 1024
KEY, KEY2 = np.array([0x12345678, 0x9ABCDEF0], np.uint32), np.array([7, 11], np.uint32)
KINDS = ["normal", "wide", "zero_scales", "subnormal", "huge", "ties", "zeros"]


def capability():
    return devices.lookup(jax.devices()[0]).capability


pytestmark = pytest.mark.skipif(
    jax.default_backend() != "gpu", reason="needs an NVIDIA GPU of compute capability 9.0 or newer"
)


@pytest.fixture(autouse=True)
def _hopper():
    if capability() is None or capability() < (9, 0):
        pytest.skip("needs an NVIDIA GPU of compute capability 9.0 or newer")


def same(made, expected):
    for a, b in zip(made, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.ascontiguousarray(b).view(np.uint8))


def data(kind):
    rng = np.random.default_rng(KINDS.index(kind))
    x = rng.standard_normal((T, N)).astype(np.float32)
    if kind == "wide":
        x *= np.exp2(rng.integers(-24, 12, (T, N))).astype(np.float32)
    if kind == "zero_scales":
        x *= np.float32(1e-6)
        x[5, 7] = 50.0
    if kind == "ties":
        x = rng.integers(-24, 25, (T, N)).astype(np.float32) * np.float32(0.25)
        x[:, ::16], x[::2, 1] = 6, -0.0
    if kind == "zeros":
        x[:] = 0
    x *= np.float32({"subnormal": 1e-39, "huge": 3e37}.get(kind, 1))
    return x.astype(ml_dtypes.bfloat16)


@jax.jit
def linear(x, k0, k1):
    row, column = K.compute_tensor_scales(*K.partial_amax(x))
    both = K.quantize_tiled(x, rows=K.RowwiseOperand(row, k0), columns=K.ColumnwiseOperand(column, k1))
    codes, scales = K.quantize_tiled(x, columns=K.ColumnwiseOperand(column, packed=True))
    return *both, codes, scales, K.unpack_tiled(codes, scales)


@pytest.mark.parametrize("kind", KINDS)
def test_operands(kind):
    x = data(kind)
    turned = oracle.hadamard_tokens(x)
    with np.errstate(all="ignore"):
        noise = [oracle.random_bytes(T, N, k) for k in (KEY, KEY2)]
        row = oracle.quantize(x, axis=1, noise=noise[0])[2]
        column = oracle.quantize(turned, axis=0, noise=noise[1])[2]
        codes, scales, nearest = oracle.quantize(turned, axis=0)
    got = linear(jnp.asarray(x), jnp.asarray(KEY), jnp.asarray(KEY2))
    same(got, (row, column, oracle.pack_tokens(codes), scales, nearest))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", ["1716", "squared", "absolute", "expected"])
def test_operands_by_another_rule(kind, rule):
    """Nearest and at midpoints, rows alone, both in one read, packed, and as codes."""
    x, top = data(kind), oracle.TOPS[rule]
    turned = oracle.hadamard_tokens(x)
    near = {"rule": RULES[rule]}
    drawn, codes = near | {"rounding": "midpoint"}, near | {"code_scale_layout": K.ScaleLayout.PLAIN}

    @jax.jit
    def run(x, k0, k1):
        row, column = K.compute_tensor_scales(*K.partial_amax(x), top=top)
        return (
            *K.quantize_tiled(x, rows=K.RowwiseOperand(row, **near)),
            *K.quantize_tiled(
                x, rows=K.RowwiseOperand(row, **near), columns=K.ColumnwiseOperand(column, packed=True, **near)
            ),
            *K.quantize_tiled(
                x, rows=K.RowwiseOperand(row, k0, **drawn), columns=K.ColumnwiseOperand(column, k1, **drawn)
            ),
            *K.quantize_tiled(x, rows=K.RowwiseOperand(row, **codes), columns=K.ColumnwiseOperand(column, **codes)),
        )

    with np.errstate(all="ignore"):
        noise = [oracle.random_bytes(T, N, k) for k in (KEY, KEY2)]
        row = oracle.quantize(x, axis=1, rule=rule)
        column = oracle.quantize(turned, axis=0, rule=rule)
        more = {"rule": rule, "rounding": "midpoint"}
        by_chance = [
            oracle.quantize(a, axis=axis, noise=n, **more)[2] for a, axis, n in zip((x, turned), (1, 0), noise)
        ]
    want = [
        row[2], row[2], oracle.pack_tokens(column[0]), column[1], *by_chance,
        oracle.pack_tokens(row[0].T).T, row[1], oracle.pack_tokens(column[0]).T, column[1].T,
    ]  # fmt: skip
    same(run(jnp.asarray(x), jnp.asarray(KEY), jnp.asarray(KEY2)), want)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("width", [N, 344])
def test_weight_in_blocks_along_an_axis(kind, rule, width):
    w = data(kind)[:, :width].astype(np.float32) * np.float32(1.001)
    filled = np.pad(w, ((0, 0), (0, -width % 16)))

    def run(w):
        scale = K.compute_tensor_scale(K.weight_partial_amax(w), top=oracle.TOPS[rule])
        return [K.quantize_weight_kernel(w, scale, axis=axis, rule=RULES[rule]) for axis in (-1, -2)]

    with np.errstate(all="ignore"):
        want = [oracle.quantize(filled, axis=a, rule=rule)[2][:, :width] for a in (1, 0)]
    same(jax.jit(run)(jnp.asarray(w)), want)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [N, 336])
def test_a_forward_operand_is_quantized_once_more(kind, width):
    """As `halfbyte` makes wgrad's x and dgrad's W."""
    x = data(kind)[:, :width]
    w = x.astype(np.float32) * np.float32(1.001)
    same(jax.jit(again)(*map(jnp.asarray, (x, w, KEY))), oracle.again(x, w, KEY))


@pytest.mark.parametrize("kind", eden.KINDS)
@pytest.mark.parametrize("width", [384, 1152])
def test_operands_of_quartet2(kind, width):
    x = eden.data((256, width), kind)
    w = x.astype(np.float32) * np.float32(1.001)
    given = x, w, KEY, eden.signs(3)
    same(jax.jit(quartet2)(*map(jnp.asarray, given)), oracle.quartet2(*given))


@pytest.mark.parametrize("rule", ["squared", "expected"])
def test_swiglu_by_another_rule(rule):
    """Oracle: the carriers of the tensors themselves, by the passes of above."""
    g, u, d = (jnp.asarray(data(kind)) for kind in ("normal", "wide", "normal"))

    @jax.jit
    def run(g, u, d):
        (scale,) = K.compute_tensor_scales(jnp.float32(3.0).view(jnp.int32)[None], top=oracle.TOPS[rule])
        row, column = K.RowwiseOperand(scale, rule=RULES[rule]), K.ColumnwiseOperand(scale, rule=RULES[rule])
        dg, du, h = activation(g, u, d)
        made = K.swiglu_quantize_backward(g, u, d, dg=(row, column), du=(row, column), h=column)
        alone = [a for x in (dg, du) for a in K.quantize_tiled(x, rows=row, columns=column)]
        forward = K.swiglu_quantize_forward(g, u, rows=row), K.quantize_tiled(h, rows=row)
        return (*made, *forward[0]), (*alone, *K.quantize_tiled(h, columns=column), *forward[1])

    same(*run(g, u, d))


def test_weight():
    w = data("wide").astype(np.float32) * np.float32(1.001)
    got = jax.jit(lambda w: K.quantize_weight_kernel(w, K.compute_tensor_scale(K.weight_partial_amax(w))))(
        jnp.asarray(w)
    )
    codes, scales, want = oracle.quantize(w, axis=1, block2d=True)
    np.testing.assert_array_equal(np.asarray(got).view(np.uint16), want.view(np.uint16))
    packed = jax.jit(lambda w: K.pack_weight_kernel(w, K.compute_tensor_scale(K.weight_partial_amax(w))))(
        jnp.asarray(w)
    )
    np.testing.assert_array_equal(packed[0], oracle.pack_tokens(codes))
    np.testing.assert_array_equal(packed[1], scales)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [N, 688])
def test_codes(kind, width):
    """What a block-scaled GEMM reads, at a width that tiles divide and at one that they do not."""
    x, order = data(kind)[:, :width], K.ScaleLayout.PLAIN
    turned = oracle.hadamard_tokens(x)

    @jax.jit
    def run(x, key):
        row, column = K.compute_tensor_scales(*K.partial_amax(x))
        return K.quantize_tiled(
            x,
            rows=K.RowwiseOperand(row, key, code_scale_layout=order),
            columns=K.ColumnwiseOperand(column, code_scale_layout=order),
        )

    with np.errstate(all="ignore"):
        noise = oracle.random_bytes(T, width, KEY)
        row = oracle.quantize(x, axis=1, noise=noise)
        column = oracle.quantize(turned, axis=0)
    want = oracle.pack_tokens(row[0].T).T, row[1], oracle.pack_tokens(column[0]).T, column[1].T
    same(run(jnp.asarray(x), jnp.asarray(KEY)), want)


@pytest.mark.parametrize("width", [43, 125, 683])
def test_carriers_of_an_odd_width(width):
    """Rows that begin anywhere. Oracle: the rows filled up to whole blocks with zeros."""
    x = data("wide")[:, :width]
    turned = oracle.hadamard_tokens(x)
    filled, noise = (np.pad(a, ((0, 0), (0, -width % 16))) for a in (x, oracle.random_bytes(T, width, KEY)))
    row = oracle.quantize(filled, axis=1, noise=noise)[2][:, :width]
    column = oracle.quantize(turned, axis=0, noise=oracle.random_bytes(T, width, KEY2))[2]
    codes, scales, nearest = oracle.quantize(turned, axis=0)
    got = linear(jnp.asarray(x), jnp.asarray(KEY), jnp.asarray(KEY2))
    same(got, (row, column, oracle.pack_tokens(codes), scales, nearest))


@pytest.mark.parametrize("width", [43, 125, 683, N])
def test_swiglu_carriers_of_any_width(width):
    """Oracle: the carriers of the tensors themselves."""
    g, u, d = (jnp.asarray(data(kind)[:, :width]) for kind in ("normal", "wide", "normal"))

    @jax.jit
    def both(g, u, d):
        (scale,) = K.compute_tensor_scales(jnp.float32(3.0).view(jnp.int32)[None])
        row, column = K.RowwiseOperand(scale, jnp.asarray(KEY)), K.ColumnwiseOperand(scale, jnp.asarray(KEY2))
        made = K.swiglu_quantize_backward(g, u, d, dg=(row, column), du=(row, column), h=column)
        dg, du, h = activation(g, u, d)
        alone = [a for x in (dg, du) for a in K.quantize_tiled(x, rows=row, columns=column)]
        return made, (*alone, *K.quantize_tiled(h, columns=column))

    same(*both(g, u, d))


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32])
def test_mxfp8(dtype):
    """Oracle: that of the interpreted kernels."""
    x = mx.data((T, 688), dtype)
    operands = (
        mxfp8_quantize.MxOperandSpec(False, K.ScaleLayout.TILED),
        mxfp8_quantize.MxOperandSpec(True, K.ScaleLayout.PLAIN),
    )
    mx.same(jax.jit(lambda x: mxfp8_quantize.quantize_mxfp8(x, operands=operands))(jnp.asarray(x)), [x, x], operands)


def test_mxfp8_of_swiglu():
    mx.test_swiglu()


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
def test_f8_cast(element):
    x = data("wide")
    run = jax.jit(
        lambda x: fp8_cast.fp8_cast_transpose(
            x,
            K.compute_tensor_scale(K.partial_amax(x, hadamard=False)[0], top=fp8_cast.FP8_MAX[element]),
            element=element,
        )
    )
    plain, turned = run(jnp.asarray(x))
    want = table.quantize(x, {"e4m3": "fp8", "e5m2": "fp8_e5m2"}[element]).codes
    np.testing.assert_array_equal(np.asarray(plain).view(np.uint8), want)
    np.testing.assert_array_equal(np.asarray(turned).view(np.uint8), want.T)


def shapes_of(layout, m, n, k):
    """Of a and b, where the GEMM kernel multiplies them."""
    if unsupported_gemm(m, n, k, layout=layout, capability=capability()):
        pytest.skip("the GEMM kernel is written for compute capability 9.0")
    return (k, m) if layout == "tn" else (m, k), (n, k) if layout == "nt" else (k, n)


@pytest.mark.parametrize("layout", GEMM_LAYOUTS)
def test_gemm_rounds_once(layout):
    """Small integers: every partial sum is exact, so alpha and the one rounding decide every bit."""
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-6, 7, shape).astype(ml_dtypes.bfloat16) for shape in shapes_of(layout, 512, 512, 256))
    left, right = jnp.float32(0.37), jnp.float32(1.93e-3)
    got = jax.jit(lambda a, b, s, t: matmul(a, b, s, t, layout=layout))(jnp.asarray(a), jnp.asarray(b), left, right)
    turned = [
        v.astype(np.float32).T if flip else v.astype(np.float32)
        for v, flip in ((a, layout == "tn"), (b, layout == "nt"))
    ]
    want = ((turned[0] @ turned[1]) * (np.float32(left) * np.float32(right))).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(np.asarray(got).view(np.uint16), want.view(np.uint16))


@pytest.mark.parametrize("steps", [65, 17])  # of 64; fprop has another tiling below 4,096
@pytest.mark.parametrize("layout", GEMM_LAYOUTS)
def test_gemm_tile_is_summed_before_next_tile_overwrites(layout, steps):
    """Many tiles a multiprocessor, and a last step in the first slot of shared memory, which the next tile takes first.
    Small integers: sums are exact in whatever order."""
    shapes = enumerate(shapes_of(layout, 4096, 14336, 64 * steps))
    a, b = (jax.random.randint(jax.random.key(i), shape, -6, 7).astype(jnp.bfloat16) for i, shape in shapes)
    summed = (0 if layout == "tn" else 1,), (1 if layout == "nt" else 0,)
    dot = functools.partial(jax.lax.dot_general, dimension_numbers=(summed, ((), ())))
    want = jax.jit(functools.partial(dot, preferred_element_type=jnp.float32))(a, b).astype(jnp.bfloat16)
    run = jax.jit(lambda a, b: jnp.sum(matmul(a, b, jnp.float32(1), jnp.float32(1), layout=layout) != want))
    assert [int(run(a, b)) for _ in range(10)] == [0] * 10


def parts_of(rows, columns):
    """Where the parts of a [T, N] array begin that is cut into rows x columns, row by row."""
    return [[(i * T // rows, j * N // columns) for j in range(columns)] for i in range(rows)]


@pytest.mark.parametrize("cut", [(4, 1), (1, 2), (2, 2)], ids=["fsdp=4", "tensor=2", "fsdp=2,tensor=2"])
@pytest.mark.parametrize("codes", [None, K.ScaleLayout.PLAIN], ids=["carriers", "codes"])
def test_parts_put_together_are_the_whole(cut, codes):
    """Each device's kernel alone, with its offset and the maxima of the whole, as on a mesh."""
    x, shape = data("wide"), (T // cut[0], N // cut[1])

    def sides(tops, window):
        row, column = K.compute_tensor_scales(*tops)
        keys = jnp.asarray(KEY), jnp.asarray(KEY2)
        return {
            "rows": K.RowwiseOperand(row, keys[0], window, code_scale_layout=codes),
            "columns": K.ColumnwiseOperand(column, keys[1], window, code_scale_layout=codes),
        }

    def part(at):
        return jnp.asarray(x[at[0] : at[0] + shape[0], at[1] : at[1] + shape[1]])

    def quantized(at):
        return jax.jit(lambda p: K.quantize_tiled(p, **sides(tops, K.GlobalWindow.from_offset(shape, at, (T, N)))))(
            part(at)
        )

    places = parts_of(*cut)
    tops = [jnp.max(top) for top in jax.jit(K.partial_amax)(jnp.asarray(x))]
    of_parts = [[jnp.max(top) for top in jax.jit(K.partial_amax)(part(at))] for line in places for at in line]
    assert [max(map(int, same)) for same in zip(*of_parts, strict=True)] == [int(top) for top in tops]
    whole = jax.jit(lambda x: K.quantize_tiled(x, **sides(tops, None)))(jnp.asarray(x))
    made = [[quantized(at) for at in line] for line in places]
    turned = len(whole) // 2  # codes of columns are transposed
    for i, expected in enumerate(whole):
        blocks = [[np.asarray(part[i]) for part in line] for line in made]
        if codes is not None and i >= turned:
            blocks = [list(line) for line in zip(*blocks, strict=True)]
        assert np.array_equal(np.block(blocks).view(np.uint8), np.asarray(expected).view(np.uint8)), i


@pytest.mark.parametrize(("layers", "tokens", "width"), [(3, T, N), (9, 16384, 16384)])
def test_a_layer_of_a_stack_is_read_and_written_in_place(layers, tokens, width):
    """Oracle: the same kernels on the layer alone; the larger stack is beyond 4 GiB, the rest of it NaN."""
    g, u, d = (jax.random.normal(key, (tokens, width), jnp.bfloat16) for key in jax.random.split(jax.random.key(0), 3))
    stacks = [jnp.full((layers, tokens, width), jnp.nan, jnp.bfloat16).at[layers - 1].set(a) for a in (g, u)]

    @jax.jit
    def run(g, u, d):
        tops = K.swiglu_backward_amax(g, u, d, tensors=3)
        scales = K.compute_tensor_scales(*tops)
        dg, du = ((K.RowwiseOperand(s, KEY), K.ColumnwiseOperand(t, KEY2)) for s, t in (scales[:2], scales[2:4]))
        return *tops, *K.swiglu_quantize_backward(g, u, d, dg=dg, du=du, h=K.ColumnwiseOperand(scales[5]))

    read = run(*(StackSlice(stack, jnp.int32(layers - 1)) for stack in stacks), d)
    for got, want in zip(read, run(g, u, d), strict=True):
        assert got.dtype == want.dtype and bool(jnp.array_equal(got, want)), (got.shape, got.dtype)

    @jax.jit
    def write(g, u, *stacks):
        into = [StackSlice(stack, jnp.int32(layers - 1)) for stack in stacks]
        return [stack[layers - 2 :] for stack in K.swiglu_forward_amax(g, u, stack_slices=into)[-2:]]

    for made, array in zip(write(g, u, *(jnp.zeros_like(s) for s in stacks)), (g, u), strict=True):
        assert not made[0].any() and bool(jnp.array_equal(made[1], array))


@pytest.mark.parametrize("shape", [(4096, 2048), (2048, 4096), (1024, 5120), (1024, 8192)], ids=str)
def test_norm(shape):
    """The same bits as on the host, forward and backward: sums have one order."""
    rng = np.random.default_rng(0)
    x, carry, *gradients = (jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for _ in range(5))
    scale = jnp.asarray(1 + 0.1 * rng.standard_normal(shape[1]), jnp.float32)

    def both(x, scale, carry, gradients):
        h, inverse = rms_norm.rms_norm_forward(x, scale, eps=1e-5)
        return h, inverse, *rms_norm.rms_norm_backward(x, inverse, scale, carry, gradients)

    got = jax.jit(both)(x, scale, carry, tuple(gradients))
    with K.interpret_kernels():
        want = jax.jit(both)(x, scale, carry, tuple(gradients))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


@pytest.mark.parametrize(("layers", "tokens", "width"), [(3, T, N), (3, T, 8192), (36, 16384, 4096)])
def test_norm_of_a_layer_of_a_stack(layers, tokens, width):
    """Oracle: the same kernels on the layer alone; the largest stack is beyond 4 GiB, the rest of it NaN."""
    x, carry, *gradients = (
        jax.random.normal(key, (tokens, width), jnp.bfloat16) for key in jax.random.split(jax.random.key(0), 5)
    )
    stack, scale = jnp.full((layers, tokens, width), jnp.nan, jnp.bfloat16).at[layers - 1].set(x), jnp.ones(width)

    @jax.jit
    def run(x):
        h, inverse = rms_norm.rms_norm_forward(x, scale, eps=1e-5)
        return h, inverse, *rms_norm.rms_norm_backward(x, inverse, scale, carry, tuple(gradients))

    for got, want in zip(run(StackSlice(stack, jnp.int32(layers - 1))), run(x), strict=True):
        assert got.dtype == want.dtype and bool(jnp.array_equal(got, want)), (got.shape, got.dtype)
