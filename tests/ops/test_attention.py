"""Oracle: softmax attention in float64 NumPy, one query at a time, over the keys that the query may see."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from instruments import quick
from jax.sharding import NamedSharding, PartitionSpec

from halfbyte import devices, hlo
from halfbyte.devices import target_cudnn
from halfbyte.distributed import make_mesh, parse_mesh
from halfbyte.ops import attention as module
from halfbyte.ops import context_parallel_attention as blocks
from halfbyte.ops.attention import attention, masked_attention, select_attention_impl


@pytest.fixture(autouse=True, scope="module")
def _float32_products():
    """On a GPU float32 GEMMs are TF32 unless asked; comparisons to the last digits need real ones."""
    with jax.default_matmul_precision("float32"):
        yield


def oracle(q, k, v, segments):
    q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
    group = q.shape[2] // k.shape[2]
    out = np.zeros_like(q)
    for b, t, h in np.ndindex(q.shape[:3]):
        seen = [s for s in range(t + 1) if segments is None or segments[b, s] == segments[b, t]]
        scores = k[b, seen, h // group] @ q[b, t, h] / np.sqrt(q.shape[3])
        weights = np.exp(scores - scores.max())
        out[b, t, h] = weights @ v[b, seen, h // group] / weights.sum()
    return out


def inputs(batch, seq, heads, kv_heads, head_dim, dtype=jnp.float32):
    random = np.random.default_rng(seq + heads)
    return tuple(jnp.asarray(random.normal(size=(batch, seq, n, head_dim)), dtype) for n in (heads, kv_heads, kv_heads))


@functools.partial(jax.jit, static_argnames="mesh")
def plain(q, k, v, segments=None, mesh=None):
    return attention(q, k, v, segments, implementation="xla", mesh=mesh)


def with_gradients(run):
    """Value and gradients of a mean over the outputs that is not linear in them."""
    both = jax.value_and_grad(lambda q, k, v: jnp.mean(jnp.sin(run(q, k, v))), argnums=(0, 1, 2))
    return jax.jit(both, compiler_options=quick)


def assert_close(ours, exact, atol):
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(exact), strict=True):
        np.testing.assert_allclose(a, b, atol=atol)


def packed(batch, seq):
    """Rows with documents of uneven lengths and padding at the end."""
    rows = np.zeros((batch, seq), np.int32)
    for b in range(batch):
        for number, start in enumerate(range(0, seq - 4 - b, 7 + b), 1):
            rows[b, start : min(start + 7 + b, seq - 4 - b)] = number
    return rows


@pytest.mark.slow(fast_cases=["4-2-True"])
@pytest.mark.parametrize("heads, kv_heads, with_segments", [(2, 2, False), (4, 2, True), (3, 1, True)])
def test_agrees_with_the_definition(heads, kv_heads, with_segments):
    q, k, v = inputs(2, 24, heads, kv_heads, 8)
    segments = packed(2, 24) if with_segments else None
    ours = plain(q, k, v, None if segments is None else jnp.asarray(segments))
    np.testing.assert_allclose(ours, oracle(q, k, v, segments), atol=2e-6)  # float32 sums of 24 terms


@pytest.mark.slow
def test_a_packed_document_is_as_if_alone():
    q, k, v = inputs(1, 20, 2, 1, 8)
    segments = jnp.asarray([[1] * 12 + [2] * 8], jnp.int32)
    together = plain(q, k, v, segments)
    alone = plain(*(np.asarray(x)[:, 12:] for x in (q, k, v)))
    np.testing.assert_allclose(np.asarray(together)[:, 12:], alone, atol=1e-6)
    grads = jax.jit(jax.grad(lambda k: jnp.sum(plain(q, k, v, segments)[:, 12:] ** 2)))(k)
    assert np.abs(np.asarray(grads)[:, :12]).max() == 0.0


@pytest.mark.slow
def test_long_sequences_go_in_blocks(monkeypatch):
    q, k, v = inputs(1, 72, 2, 1, 8)
    segments = jnp.asarray(packed(1, 72))
    run = functools.partial(attention, segments=segments, implementation="xla")
    whole = with_gradients(run)(q, k, v)
    monkeypatch.setattr(module, "QUERY_BLOCK", 32)  # two whole blocks and a quarter
    cut = with_gradients(lambda *a: run(*a))(q, k, v)
    assert_close(cut, whole, atol=1e-7)  # means over 1,152 outputs: gradients are below 1e-3
    text = str(jax.make_jaxpr(run)(q, k, v))
    assert "32,64]" in text and "72,72]" not in text  # a block's scores end at its diagonal; the whole never exists


@pytest.mark.slow
def test_bf16_output_is_one_rounding_away():
    q, k, v = inputs(1, 16, 2, 2, 16, jnp.bfloat16)
    ours = plain(q, k, v)
    assert ours.dtype == jnp.bfloat16
    exact = oracle(q, k, v, None)
    np.testing.assert_allclose(np.asarray(ours, np.float64), exact, atol=2**-7)  # weights and output rounded to bf16


@pytest.mark.slow(fast_cases=["data=2,context=2,tensor=2-True"])
@pytest.mark.parametrize("mesh, with_segments", [
    ("fsdp=4,tensor=2", True),
    ("data=2,context=2,tensor=2", True),
    ("fsdp=2,context=4", True),
    ("fsdp=4,context=2", False),
])  # fmt: skip
def test_on_a_mesh(mesh, with_segments):
    mesh = make_mesh(parse_mesh(mesh), jax.devices("cpu"))
    q, k, v = inputs(4, 32, 4, 2, 8)
    segments = jnp.asarray(packed(4, 32)) if with_segments else None
    run = functools.partial(attention, segments=segments, implementation="xla", mesh=mesh)
    assert_close(with_gradients(run)(q, k, v), on_one_device(with_segments), atol=1e-7)  # means over 4,096 outputs


@functools.cache
def on_one_device(with_segments):
    segments = jnp.asarray(packed(4, 32)) if with_segments else None
    run = functools.partial(attention, segments=segments, implementation="xla")
    return with_gradients(run)(*inputs(4, 32, 4, 2, 8))


@pytest.mark.slow
def test_an_odd_number_of_devices_shares_a_sequence():
    """The one in the middle is its own partner."""
    mesh = make_mesh({"context": 3}, jax.devices("cpu")[:3])
    q, k, v = inputs(2, 24, 4, 2, 8)
    run = functools.partial(attention, segments=jnp.asarray(packed(2, 24)), implementation="xla")
    assert_close(with_gradients(functools.partial(run, mesh=mesh))(q, k, v), with_gradients(run)(q, k, v), atol=2e-7)


def test_a_sequence_of_half_chunks_is_refused():
    mesh = make_mesh({"context": 4}, jax.devices("cpu")[:4])
    with pytest.raises(ValueError, match="context=4 cuts a sequence into 8 chunks, and 20 is no multiple"):
        attention(*inputs(1, 20, 2, 2, 8), mesh=mesh)


@pytest.mark.slow
def test_context_shares_the_work_of_8192_positions_evenly():
    """All devices run one program without a branch, so none has more to do than another; and what they multiply is
    what one device would, but for the upper triangles of the diagonal's chunks (XLA's kernels do not skip them)."""
    seq, parts, heads, head_dim = 8192, 2, 2, 8
    mesh = make_mesh({"context": parts}, jax.devices("cpu")[:parts])
    spread = NamedSharding(mesh, PartitionSpec(None, "context"))
    shape = jax.ShapeDtypeStruct((1, seq, heads, head_dim), jnp.bfloat16, sharding=spread)

    def total(q, k, v):
        return jnp.sum(attention(q, k, v, mesh=mesh, implementation="xla").astype(jnp.float32) ** 2)

    compiled = jax.jit(jax.grad(total, argnums=(0, 1, 2)), compiler_options=quick).lower(shape, shape, shape).compile()
    found = hlo.parse_hlo(compiled.as_text())
    assert not [each for each in found.instructions.values() if each.opcode == "conditional"]
    multiplied = sum(gemm.flops for gemm in hlo.find_gemms(found))
    chunk, needed = 2 * heads * head_dim * (seq // (2 * parts)) ** 2, 2 * heads * head_dim * (seq * seq // 2) / parts
    products = 2 + 4  # scores, context; gradients of values, weights, queries, keys. One jit: scores are not made again
    assert multiplied == products * (2 * parts + 1) * chunk
    assert multiplied / (products * needed) == 1 + 1 / (2 * parts)  # before: 2.0, every query against every key


@pytest.mark.slow
def test_cached_attention_sees_what_is_visible():
    q, k, v = inputs(2, 10, 4, 2, 8)
    visible = jnp.asarray(np.arange(10)[None, None] < np.array([4, 9])[:, None, None])
    q, k, v = (np.asarray(x) for x in (q, k, v))
    ours = jax.jit(masked_attention)(q[:, :1], k, v, visible)
    for row, length in enumerate((4, 9)):
        # the query of position 0, asked as the last of `length` positions
        moved = q[row : row + 1, np.zeros(length, int)]
        exact = oracle(moved, k[row : row + 1, :length], v[row : row + 1, :length], None)[0, -1]
        np.testing.assert_allclose(ours[row, 0], exact, atol=2e-6)


@pytest.mark.parametrize(
    "shape, dtype, packed, reason",
    [
        ((1, 16, 2, 64), jnp.float32, False, "bfloat16"),
        ((1, 16, 2, 12), jnp.bfloat16, False, "head_dim"),
        ((1, 15, 2, 64), jnp.bfloat16, True, "even"),
    ],
)
def test_cudnn_is_refused_where_it_cannot_serve(shape, dtype, packed, reason):
    with pytest.raises(ValueError, match=f"cudnn cannot serve.*{reason}"):
        select_attention_impl(shape, dtype, implementation="cudnn", packed=packed)


def test_unknown_implementation_is_refused():
    with pytest.raises(ValueError, match="no implementation 'flash'.*auto, cudnn, xla"):
        select_attention_impl((1, 16, 2, 64), jnp.bfloat16, implementation="flash")


@pytest.mark.slow
@pytest.mark.cuda_compiler
@pytest.mark.parametrize("mesh, packed, calls", [
    ("fsdp=4,tensor=2", False, {"fmhaSoftmax", "fmhaSoftmaxBackward"}),
    ("fsdp=4,tensor=2", True, {"fmhaScaleBiasSoftmax", "fmhaScaleBiasSoftmaxBackward"}),
    ("fsdp=2,context=2,tensor=2", True, {"fmhaScaleBiasSoftmax", "fmhaScaleBiasSoftmaxBackward"}),
    ("context=4,tensor=2", False, {"fmhaSoftmax", "fmhaSoftmaxBackward"}),
])  # fmt: skip
def test_compiles_to_cudnn_without_a_gpu(mesh, packed, calls):
    """And multiplies what a causal kernel on one device would, shared by all."""
    topology = devices.topology(devices.device_by_name("gb300"), hosts=2, per_host=4)
    mesh = make_mesh(parse_mesh(mesh), np.asarray(topology.devices))
    spread = NamedSharding(mesh, PartitionSpec(("data", "fsdp"), "context", "tensor"))
    rows = NamedSharding(mesh, PartitionSpec(("data", "fsdp"), "context"))
    q, k = (jax.ShapeDtypeStruct((4, 256, n, 64), jnp.bfloat16, sharding=spread) for n in (8, 2))
    segments = jax.ShapeDtypeStruct((4, 256), jnp.int32, sharding=rows)

    def run(q, k, v, segments):
        return jnp.sum(attention(q, k, v, segments if packed else None, mesh=mesh).astype(jnp.float32) ** 2)

    with target_cudnn():
        text = jax.jit(jax.grad(run, argnums=(0, 1, 2))).lower(q, k, k, segments).compile().as_text()
    assert set(re.findall(r"__cudnn\$(\w+)", text)) == calls
    multiplied = sum(call.flops for call in hlo.find_attention_calls(hlo.parse_hlo(text)))
    assert (
        multiplied == (2 + 5) * 2 * 4 * 8 * 64 * (256 * 256 // 2) // 8
    )  # forward and backward, 4 x 8 heads, 8 devices


ON_GPU = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs an NVIDIA GPU with cuDNN")


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["xla", pytest.param("cudnn", marks=ON_GPU)])
@pytest.mark.parametrize("with_segments", [False, True])
def test_parts_of_attention_add_up(monkeypatch, implementation, with_segments):
    """The second half of the queries against all keys before it and against its own, put together, is what one device
    computes; so are the gradients, from the statistics of the whole."""
    monkeypatch.setattr(blocks, "QUERY_BLOCK", 24)  # 32 queries: a block and a third
    q, k, v = inputs(2, 64, 4, 2, 64, jnp.bfloat16)
    segments = jnp.asarray(packed(2, 64)) if with_segments else None
    dy = jnp.asarray(np.random.default_rng(0).normal(size=q.shape), q.dtype).at[:, :32].set(0)
    forward, backward = blocks.BLOCKS[implementation].forward, blocks.BLOCKS[implementation].backward

    @functools.partial(jax.jit, compiler_options=quick)
    def whole(q, k, v, dy):
        exact, pullback = jax.vjp(lambda *a: plain(*a, segments), q, k, v)
        dq, dk, dv = pullback(dy)
        return exact[:, 32:], dq[:, 32:], dk, dv

    @functools.partial(jax.jit, compiler_options=quick)
    def in_parts(q, k, v, dy):
        late, halves = q[:, 32:], (slice(0, 32), slice(32, 64))
        keys, seen = [(k[:, at], v[:, at]) for at in halves], [None, None]
        if segments is not None:
            seen = [segments[:, 32:, None] == segments[:, None, at] for at in halves]
        both = list(zip(keys, seen, (False, True), strict=True))
        context, statistics = blocks.merge_partial_softmax(
            [forward(late, *kv, mask, causal=own) for kv, mask, own in both]
        )
        context = context.astype(q.dtype)
        found = [backward(late, *kv, mask, (context, statistics), dy[:, 32:], causal=own) for kv, mask, own in both]
        dq = found[0][0].astype(jnp.float32) + found[1][0].astype(jnp.float32)
        return context, dq, *(jnp.concatenate([each[at] for each in found], axis=1) for at in (1, 2))

    for a, b in zip(in_parts(q, k, v, dy), whole(q, k, v, dy), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.abs(a - b).max() <= 0.02 * np.abs(b).max()  # probabilities and their gradients are rounded to bf16


@ON_GPU
@pytest.mark.parametrize("with_segments", [False, True])
def test_cudnn_agrees_with_xla(with_segments):
    q, k, v = inputs(2, 256, 8, 2, 64, jnp.bfloat16)
    segments = jnp.asarray(packed(2, 256)) if with_segments else None

    def run(implementation):
        def total(q, k, v):
            return jnp.sum(jnp.sin(attention(q, k, v, segments, implementation=implementation).astype(jnp.float32)))

        return jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2)))(q, k, v)

    for a, b in zip(jax.tree.leaves(run("cudnn")), jax.tree.leaves(run("xla")), strict=True):
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        assert np.abs(a - b).max() <= 0.03 * np.abs(b).max()  # both round probabilities to bf16, at different places
