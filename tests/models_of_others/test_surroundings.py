"""Recipes wherever JAX puts a layer: meshes with explicit and manual axes, loops, einsum, second derivatives.

Oracle: the same function without a recipe (does it run, and in which sharding), and the set of all keys for random
bits: `qdot` is replaced by a product that shows its key where only that matters.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import halfbyte as hb
from halfbyte.formats import SharedBitsWarning
from halfbyte.ops.gemm_problem import compile_for
from halfbyte.recipes import layer_key, step_key

KEY = step_key(0, 0)
MATMUL = (((1,), (0,)), ((), ()))
W, X = (jnp.asarray(np.random.default_rng(i).normal(size=s), jnp.float32) for i, s in ((0, (32, 32)), (1, (64, 32))))


def plain(p, x):
    return jnp.mean((x @ p["w"] - 1) ** 2)


def recipe_in(fn, key=KEY):
    return hb.apply_recipe(fn, "nvfp4", key=key, show=None)


def mesh(kind):
    return jax.make_mesh((4,), ("d",), axis_types=(kind,), devices=jax.devices("cpu")[:4])


def shard_map(body):
    return jax.shard_map(body, mesh=mesh(AxisType.Auto), in_specs=(P(), P("d")), out_specs=P())


@pytest.fixture
def shown_keys(monkeypatch):
    """qdot(x, w, key) -> zeros plus a number made from the key's words."""

    def fake(x, w, *, recipe, key=None, out_dtype=None, **_):
        words = jax.random.key_data(key)
        shown = (words[0] ^ words[1]).astype(jnp.float32)
        return jnp.zeros((*x.shape[:-1], w.shape[-1]), jnp.float32) + shown

    monkeypatch.setattr("halfbyte.ops.adapters.dot_general.qdot", fake)


def first_of_each(keys):
    return len(set(np.asarray(keys).ravel().tolist()))


def spec_of(fn, *args):
    """How the result is sharded, as its type says."""
    found = []
    jax.eval_shape(lambda *args: found.append(jax.typeof(fn(*args)).sharding.spec), *args)
    return found[0]


def test_explicit_axes_serve_every_entry_and_keep_the_shardings():
    assert jax.make_mesh((4,), ("d",), devices=jax.devices("cpu")[:4]).axis_types == (AxisType.Explicit,)
    dot = hb.dot_general("nvfp4", key=KEY, site="a")
    entries = (
        lambda w, x: recipe_in(lambda w, x: x @ w)(w, x),
        lambda w, x: dot(x, w, MATMUL),
        lambda w, x: hb.qdot(x, w, recipe="nvfp4", key=KEY),
    )
    with jax.set_mesh(mesh(AxisType.Explicit)):
        x = jax.device_put(X, P("d", None))
        for entry in entries:
            assert spec_of(entry, W, x) == P("d", None)
            assert spec_of(jax.grad(lambda w, x, entry=entry: jnp.mean(entry(w, x) ** 2)), W, x) == P(None, None)
    sharded = jax.device_put(X, NamedSharding(mesh(AxisType.Explicit), P("d", None)))  # without set_mesh
    assert jax.eval_shape(jax.grad(recipe_in(plain)), {"w": W}, sharded)["w"].shape == W.shape


@pytest.mark.slow(fast_cases=["0-P('d', None)"])
@pytest.mark.parametrize("wanted", [P(None, None), P("d", None), P(None, "d")], ids=str)
@pytest.mark.parametrize("side", [0, 1])
def test_dot_has_its_out_sharding(side, wanted):
    """Its contraction is cut, so that JAX must be told; with the weight on either side."""
    turned = (((0,), (1,)), ((), ()))  # w [inputs, outputs], x [tokens, inputs] -> [outputs, tokens]
    order, dims = (lambda w, x: (x, w), MATMUL) if side else (lambda w, x: (w, x), turned)
    dot = lambda w, x: lax.dot_general(*order(w, x), dims, out_sharding=wanted)  # noqa: E731
    with jax.set_mesh(mesh(AxisType.Explicit)):
        w, x = jax.device_put(W, P("d", None)), jax.device_put(X, P(None, "d"))
        assert spec_of(recipe_in(dot), w, x) == wanted
        gradient = jax.grad(lambda w, x: jnp.mean(recipe_in(dot)(w, x) ** 2), (0, 1))
        specs = [jax.typeof(g).sharding.spec for g in jax.eval_shape(gradient, w, x)]
        assert specs == [w.sharding.spec, x.sharding.spec]


def test_shard_map_as_it_is_by_default():
    def mean(fn):
        return lambda p, x: lax.pmean(fn(p, x), "d")

    inside = shard_map(mean(recipe_in(plain)))
    around = recipe_in(shard_map(mean(plain)))
    own = lambda: jax.random.fold_in(KEY, lax.axis_index("d"))  # noqa: E731
    by_qdot = shard_map(mean(lambda p, x: jnp.mean((hb.qdot(x, p["w"], recipe="nvfp4", key=own()) - 1) ** 2)))
    assert [site.path for site in around.report({"w": W}, X).replaced] == ["w"]
    for fn in (inside, around, by_qdot):
        jax.eval_shape(jax.grad(fn), {"w": W}, X)
    program = jax.jit(lambda p, x: [jax.grad(f)(p, x)["w"] for f in (inside, around, plain)])
    a, b, exact = program({"w": W}, X)
    np.testing.assert_array_equal(a, b)
    assert 0 < np.linalg.norm(a - exact) < 0.3 * np.linalg.norm(exact)  # one in four bits' noise, no factor of 4


@pytest.mark.slow(fast_cases=["False"])
@pytest.mark.parametrize("check_vma", [True, False])
def test_replicas_have_bits_of_their_own(shown_keys, check_vma):
    def body(w, x):
        return recipe_in(lambda w, x: x @ w)(w, x)[:1, :1]

    fn = jax.shard_map(body, mesh=mesh(AxisType.Auto), in_specs=(P(), P("d")), out_specs=P("d"), check_vma=check_vma)
    assert first_of_each(fn(W, X)) == 4


@pytest.mark.slow
def test_replicated_devices_round_alike(shown_keys):
    two = jax.make_mesh((2, 2), ("d", "t"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices("cpu")[:4])
    fn = jax.shard_map(
        lambda w, x: recipe_in(lambda w, x: x @ w)(w, x)[:1, :1], mesh=two, in_specs=(P(), P("d")), out_specs=P("d")
    )  # the out_specs say that nothing varies along t, and JAX checks it
    assert first_of_each(fn(W, X)) == 2


def loops(step):
    """The same step in three kinds of loop."""
    return (
        lambda: lax.scan(lambda c, i: (c, step(i)), 0, jnp.arange(4))[1],
        lambda: lax.fori_loop(0, 4, lambda i, c: c + step(i), jnp.float32(0)),
        lambda: lax.while_loop(lambda s: s[0] < 4, lambda s: (s[0] + 1, s[1] + step(s[0])), (0, jnp.float32(0)))[1],
    )


@pytest.mark.slow
def test_loop_invariant_key_is_refused(shown_keys):
    dot = hb.dot_general("nvfp4", key=KEY, site="mlp/up")
    shared = (
        lambda i: dot(X, W, MATMUL)[0, 0],
        lambda i: recipe_in(lambda w: X @ w)(W)[0, 0],
        lambda i: recipe_in(lambda w: X @ w, step_key(0, 0))(W)[0, 0],  # made inside, of nothing that changes
        lambda i: jax.jit(jax.checkpoint(lambda w: recipe_in(lambda w: X @ w)(w)[0, 0]))(W),
    )
    for step in shared:
        for loop in loops(step):
            with pytest.raises(ValueError, match=r"same in every iteration of the (scan|fori_loop|while_loop) around"):
                loop()


@pytest.mark.slow
def test_key_folded_with_the_counter_is_accepted(shown_keys):
    def by_recipe(i):
        return recipe_in(lambda w: X @ w, layer_key(KEY, i))(W)[0, 0]

    def by_dot(i):
        return hb.dot_general("nvfp4", key=layer_key(KEY, i), site="a")(X, W, MATMUL)[0, 0]

    for step in (by_recipe, by_dot, jax.jit(by_recipe)):
        for loop in loops(step):
            assert first_of_each(loop()) in (1, 4)
        assert first_of_each(loops(step)[0]()) == 4


@pytest.mark.slow
def test_second_operand_of_einsum_is_the_weight(monkeypatch):
    seen = []

    def fake(x, w, *, recipe, out_dtype=None, **_):
        seen.append((x.shape, w.shape))
        return jnp.einsum("...k,kn->...n", x, w)

    monkeypatch.setattr("halfbyte.ops.adapters.dot_general.qdot", fake)
    x, w = jnp.ones((1, 16, 32)), jnp.asarray(np.random.default_rng(2).normal(size=(2, 2, 32, 16)), jnp.float32)
    dot = hb.dot_general("nvfp4", key=KEY, site="kv")
    for spec in ("bsd,ckdh->cbskh", "bsd,ckdh->bsckh"):
        y = jnp.einsum(spec, x, w, _dot_general=dot)
        np.testing.assert_allclose(y, jnp.einsum(spec, x, w), rtol=1e-5, atol=1e-5)
    y = jnp.einsum("ckdh,bsd->cbskh", w, x, _dot_general=hb.dot_general("nvfp4", key=KEY, site="kv", weight="left"))
    assert set(seen) == {((1, 16, 32), (32, 64))}
    assert dot(x[0], w[0, 0], MATMUL).shape == (16, 16)


def test_einsums_of_one_shape_read_their_keys_each(shown_keys):
    count = iter(range(9))
    dot = hb.dot_general("nvfp4", key=lambda: step_key(0, next(count)))
    keys = jax.jit(lambda x: [jnp.einsum("td,df->tf", x, W, _dot_general=dot)[0, 0] for _ in range(3)])(X)
    assert first_of_each(keys) == 3


@pytest.mark.slow
def test_second_derivatives_raise():
    def linear_critic(w):  # its own gradient is w: only the weight is differentiated twice
        return jnp.sum(jax.grad(lambda x: jnp.sum(recipe_in(lambda w, x: x @ w)(w, x)))(X) ** 2)

    def product(w):
        return jnp.sum(jax.grad(lambda w: jnp.mean(hb.qdot(X, w, recipe="nvfp4", key=KEY) ** 2))(w))

    hvp = jax.grad(lambda w: jnp.sum(jax.grad(recipe_in(lambda w: plain({"w": w}, X)))(w)))
    for second in (hvp, jax.grad(linear_critic), jax.grad(product)):
        with pytest.raises(NotImplementedError, match="no second derivative"):
            jax.eval_shape(second, W)


@pytest.mark.slow
def test_program_on_a_mesh_takes_no_single_gpu_kernel():
    gpu = next(device for device in hb.DEVICES.values() if "h200" in device.name.lower())
    x, w = jnp.zeros((4096, 1024), jnp.bfloat16), jnp.zeros((1024, 1024), jnp.bfloat16)

    def kernels():
        text = str(jax.make_jaxpr(jax.grad(lambda w: jnp.sum(recipe_in(lambda w: x @ w)(w).astype(jnp.float32))))(w))
        return text.count("pallas_call") + text.count("triton_kernel_call")

    with compile_for(gpu):
        assert kernels() > 0
        with jax.set_mesh(mesh(AxisType.Auto)):
            assert kernels() == 0


@pytest.mark.slow
def test_linears_of_one_shape_are_lowered_once():
    params = [W] * 6

    def loss(params, x):
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean(x)

    def size(count):
        return len(jax.jit(jax.grad(recipe_in(loss))).lower(params[:count], X).as_text())

    # The first has no gradient of its input, so two and six are of the same two kinds.
    two, six = size(2), size(6)
    assert six < 1.1 * two


def in_a_scan(dot):
    return lambda x: lax.scan(lambda x, w: (dot(x, w, KEY), None), x, jnp.stack([W, W]))[0]


def in_a_remat_in_a_loop(dot):
    return lambda x: lax.fori_loop(0, 2, lambda i, x: jax.checkpoint(lambda x: dot(x, W, KEY))(x), x)


def under_vmap(dot, dims=(0, None, None)):
    return lambda x: jax.vmap(jax.jit(dot), dims)(x.reshape(2, 32, 32), W, KEY)


def of_weights(dot):
    return lambda x: jax.vmap(dot, (None, 0, None))(x, jnp.stack([W, W]), KEY)


def on_devices(dot):
    return lambda x: shard_map(lambda w, x: lax.psum(dot(x, w, KEY), "d"))(W, x)


SHARED = [in_a_scan, in_a_remat_in_a_loop, under_vmap, of_weights, on_devices]
DOTS = {
    "qdot": lambda x, w, key: hb.qdot(x, w, recipe="nvfp4", key=key),
    "mlp": lambda x, w, key: hb.mlp(x, w, w, w, recipe="nvfp4", key=key),
    "apply_recipe": lambda x, w, key: recipe_in(lambda w, x: x @ w, key)(w, x),
}


@pytest.mark.slow(fast_cases=["qdot-in_a_remat_in_a_loop", "qdot-on_devices", "apply_recipe-in_a_remat_in_a_loop"])
@pytest.mark.parametrize("around", SHARED, ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", DOTS)
def test_one_key_for_several_tensors_warns(name, around):
    """`apply_recipe` folds the device's place in itself, and refuses a loop."""
    found = around(DOTS[name])
    if name == "apply_recipe" and around is on_devices:
        jax.eval_shape(found, X)  # warnings are errors
    elif name == "apply_recipe" and around in (in_a_scan, in_a_remat_in_a_loop):
        with pytest.raises(ValueError, match="the same in every iteration"):
            jax.eval_shape(found, X)
    else:
        with pytest.warns(SharedBitsWarning):
            jax.eval_shape(found, X)


@pytest.mark.slow
def test_keys_per_iteration_do_not_warn():
    dot, keys = DOTS["qdot"], jax.random.split(KEY, 2)
    scan = lambda x: lax.scan(lambda x, item: (dot(x, *item), None), x, (jnp.stack([W, W]), keys))[0]  # noqa: E731
    counted = lambda x: lax.fori_loop(0, 2, lambda i, x: dot(x, W, layer_key(KEY, i)), x)  # noqa: E731
    for fn in (scan, counted, lambda x: jax.vmap(dot, (None, 0, 0))(x, jnp.stack([W, W]), keys)):
        jax.eval_shape(fn, X)
    nearest = lambda x: hb.qdot(x, W, recipe="nvfp4_no_sr", key=KEY)  # noqa: E731
    jax.eval_shape(jax.vmap(nearest), X.reshape(2, 32, 32))
