"""Which dots of somebody else's function are found, what they are called, and which layer they are of.

Oracle: reports written down here; nothing is compiled.
"""

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

import halfbyte as hb
from halfbyte.formats import SharedBitsWarning
from halfbyte.recipes import step_key

KEY = step_key(0, 0)
X = jnp.ones((16, 32))


def square(*lead):
    return jnp.ones((*lead, 32, 32))


def report(fn, policy, *args, **options):
    return hb.apply_recipe(fn, policy, key=KEY, show=None, **options).report(*args)


def paths(sites):
    return [site.path for site in sites]


def rules(*given):
    return hb.Policy("test", tuple(hb.Rule(*rule) for rule in given))


ON_THE_WAY = {
    "take": lambda w: jnp.take(w, jnp.arange(32), axis=1),
    "broadcast": lambda w: w[None][0],
    "stop_gradient": lax.stop_gradient,
    "where": lambda w: jnp.where(jnp.eye(32, dtype=bool), w, 0.0),
    "pad": lambda w: jnp.pad(w, ((0, 0), (0, 32))),
    "scale": lambda w: 1.0 * w / jnp.sqrt(32.0),
    "cast": lambda w: w.astype(jnp.bfloat16).astype(jnp.float32),
    "transpose": lambda w: w.T.reshape(32, 32),
    "index": lambda w: w[jnp.arange(32)],
    "roll": lambda w: jnp.roll(w, 1, 0),
    "norm": lambda w: w / jnp.linalg.norm(w, axis=0, keepdims=True),
    "loop": lambda w: lax.fori_loop(0, 3, lambda i, w: w * 0.5, w),
    "traced index": lambda w: lax.fori_loop(0, 2, lambda i, s: s + jnp.stack([w, w])[i], w * 0),
}


def test_weight_is_followed_through_its_operations():
    for name, way in ON_THE_WAY.items():
        found = report(lambda p, x, way=way: x @ way(p["w"]), "nvfp4", {"w": square()}, X)
        assert (paths(found.replaced), found.skipped) == (["w"], ()), name


def test_weight_is_followed_through_an_all_gather():
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices("cpu")[:4])

    def body(w, x):
        return x @ lax.all_gather(w, "d", axis=0, tiled=True)

    fn = jax.shard_map(body, mesh=mesh, in_specs=(P("d"), P("d")), out_specs=P("d"))
    assert paths(report(fn, "nvfp4", square(), jnp.ones((64, 32))).replaced) == ["w"]


def test_weight_of_several_has_the_name_of_the_largest():
    def fn(p, x):
        x = x @ (p["w"] + p["a"] @ p["b"]) * p["scale"]
        return x @ (p["w"] * jnp.mean(x)), p["table"][jnp.argmax(x, -1)] @ p["v"]

    p = {"w": square(), "v": square(), "a": jnp.ones((32, 2)), "b": jnp.ones((2, 32)), "scale": jnp.ones(()),
         "table": jnp.ones((32, 32))}  # fmt: skip
    found = report(fn, rules(("w", "nvfp4"), ("v", "nvfp4")), p, X)
    assert paths(found.replaced) == ["w", "v"]
    assert (None, "neither operand depends on weights alone") in [(s.path, s.skip_reason) for s in found.skipped]


def test_layers_are_not_experts():
    p = {f"block_{i}": {"experts": square(4)} for i in range(3)}

    def loss(p, x):
        for i in range(3):
            x, _ = lax.scan(lambda c, w: (c + jnp.tanh(c @ w), None), x, p[f"block_{i}"]["experts"])
        return x

    found = report(loss, rules(("*/experts", "nvfp4", (1, -1))), p, X)
    (site,) = found.replaced
    assert (site.path, site.layers, site.num_executions) == ("block_1/experts", range(1, 2), 4)

    def one(p, x):
        return lax.scan(lambda c, w: (c @ w, None), x, p["experts"])[0]

    with pytest.raises(ValueError, match="the layer number of experts is not known"):
        report(one, rules(("*", "nvfp4", (1, -1))), {"experts": square(4)}, X)


@pytest.mark.parametrize(
    ("names", "options"),
    [
        (("layer_0", "layer_1", "layer_2"), {}),
        (("blocks_1", "blocks_2", "blocks_3"), {}),  # counted in their order
        (("linear", "linear_1", "linear_2"), {}),  # as Haiku numbers them
        (("h0", "h1", "h2"), {"layers": "h{layer}/*"}),
    ],
)
def test_layer_numbers_come_from_names(names, options):
    def fn(p, x):
        for name in names:
            x = x @ p[name]["w"]
        return x

    found = report(fn, rules(("*", "nvfp4", (-1, None))), {name: {"w": square()} for name in names}, X, **options)
    assert paths(found.replaced) == [f"{names[-1]}/w"]


def test_stacks_of_unequal_length_need_a_pattern():
    p = {"blocks": square(4), "other": square(2)}

    def fn(p, x):
        for name in ("blocks", "other"):
            x = lax.scan(lambda c, w: (c @ w, None), x, p[name])[0]
        return x

    policy = rules(("*", "nvfp4", (1, None)))
    with pytest.raises(ValueError, match=r"stacks of different lengths: blocks has 4, other has 2; .*layers='blocks/"):
        report(fn, policy, p, X)
    found = report(fn, rules(("blocks", "nvfp4", (1, None))), p, X, layers="blocks")
    assert [(site.path, site.layers) for site in found.replaced] == [("blocks", range(1, 4))]


def test_rule_may_leave_a_weight_alone():
    p = {"router": jnp.ones((32, 16)), "up": square()}
    fn = lambda p, x: x @ p["up"] @ p["router"]  # noqa: E731
    found = report(fn, rules(("router", None), ("*", "nvfp4")), p, X)
    assert paths(found.replaced) == ["up"]
    assert [site.skip_reason for site in found.skipped] == ["rule 'router' leaves it alone"]


def test_products_that_are_no_dots_are_skipped():
    p = {"attn": square(), "experts": jnp.ones((4, 32, 128)), "patch": jnp.ones((32, 3, 4, 4))}

    def loss(p, x, image):
        h = lax.ragged_dot(x @ p["attn"], p["experts"], jnp.array([4, 4, 4, 4]))
        return h.mean() + lax.conv_general_dilated(image, p["patch"], (4, 4), "SAME").mean()

    found = report(loss, "nvfp4", p, X, jnp.ones((1, 3, 16, 16)))
    assert [(s.path, s.skip_reason.split(";")[0]) for s in found.skipped] == [
        ("experts", "it is a ragged dot, with one weight a group of tokens"),
        ("patch", "it is a convolution"),
    ]
    with pytest.raises(ValueError, match=r"rule 'experts' .* \(experts: it is a ragged dot"):
        report(loss, rules(("experts", "nvfp4")), p, X, jnp.ones((1, 3, 16, 16)))


@pytest.mark.skipif(not hasattr(jax.core, "is_constant_dim"), reason="haliax 1.4.dev453 does not run on JAX 0.11")
def test_haliax_scales_its_weights():
    In, Out, Batch = hax.Axis("in", 32), hax.Axis("out", 64), hax.Axis("batch", 16)
    model = hnn.Linear.init(In, Out, key=jax.random.key(0), use_bias=False)
    x = hax.ones((Batch, In))
    loss = lambda m, x: hax.mean(m(x) ** 2).scalar()  # noqa: E731
    assert paths(report(loss, "nvfp4", model, x).replaced) == ["weight"]
    dot = hb.dot_general("nvfp4", key=KEY, site="lin")
    injected = eqx.tree_at(lambda m: m.dot_general, model, dot)
    jax.eval_shape(eqx.filter_grad(loss), injected, x)
    assert [(call.site, call.recipe) for call in dot.calls] == [("lin", "nvfp4")]


class Linear(eqx.Module):
    w: jax.Array
    dot: object

    def __call__(self, x):
        return self.dot(x, self.w, (((1,), (0,)), ((), ())))


@pytest.mark.slow
def test_dot_general_is_a_pytree_of_one_child():
    dot = hb.dot_general("nvfp4", key=KEY, site="lin")
    holes = jax.tree.map(lambda _: None, dot)
    assert jax.tree.structure(holes, is_leaf=lambda x: x is None).num_leaves == 1
    model = Linear(square(), dot)
    joined = eqx.combine(*eqx.partition(model, eqx.is_inexact_array))
    assert jax.tree.structure(joined) == jax.tree.structure(model)
    jax.eval_shape(lambda m: eqx.filter_grad(lambda m: jnp.mean(m(X) ** 2))(m).w, model)


class Stateful(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(32, 32, rngs=rngs)
        self.tied = self.up.kernel
        self.norm = nnx.BatchNorm(32, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.drop(self.norm(self.up(x))) @ self.tied[...]


@pytest.mark.slow
def test_nnx_state_written_by_the_function_is_kept():
    model, loss = Stateful(nnx.Rngs(0)), lambda m, x: jnp.mean((m(x) - x) ** 2)
    ours = hb.apply_recipe(loss, "fp8", show=None)
    assert len(ours.report(model, X).replaced) == 2
    x = jax.random.normal(jax.random.key(0), X.shape)
    nnx.jit(nnx.value_and_grad(ours))(model, x)
    assert int(model.drop.rngs.count[...]) == 1 and float(jnp.abs(model.norm.mean[...]).sum()) > 0


class Block(nnx.Module):
    def __init__(self, rngs):
        dot = hb.dot_general("nvfp4", key=rngs.quantize)
        self.up = nnx.Linear(32, 64, dot_general=dot.at("up"), rngs=rngs)
        self.down = nnx.Linear(64, 32, dot_general=dot.at("down"), rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.relu(self.up(x)))


@pytest.mark.slow
def test_stacked_nnx_layers_scan():
    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def make(rngs):
        return Block(rngs)

    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    def forward(model, x):
        return model(x)

    model = make(nnx.Rngs(0, quantize=1))
    assert model.up.dot_general.key.key[...].shape == (3,)
    shapes = nnx.eval_shape(lambda m, x: nnx.grad(lambda m, x: jnp.mean(forward(m, x) ** 2))(m, x), model, X)
    assert shapes.up.kernel.shape == (3, 32, 64)


@pytest.mark.slow
def test_rewritten_function_hashes():
    f = hb.apply_recipe(lambda p, x: jnp.sum((x @ p["w"]) ** 2), "nvfp4", key=KEY, show=None)
    p = {"w": square()}
    assert {f: 1}[f] == 1
    for use in (
        jax.jit(f),
        jax.grad(jax.jit(f)),
        jax.grad(jax.checkpoint(f)),
        eqx.filter_jit(f),
    ):
        jax.eval_shape(use, p, jnp.ones((2, 16, 32)))
    with pytest.warns(SharedBitsWarning):
        jax.eval_shape(jax.vmap(f, (None, 0)), p, jnp.ones((2, 16, 32)))
    nnx.eval_shape(lambda p, x: nnx.grad(f)(p, x), p, X)


def transformer_names():
    attention = {name: {"kernel": square()} for name in ("query", "key", "value", "out")}
    return {f"layer_{i}": {"attn": attention, "mlp": {"Dense_0": square(), "Dense_1": square()}} for i in range(3)}


def test_named_policies_find_mlps_by_name():
    def fn(p, x):
        for layer in p.values():
            for weight in jax.tree.leaves(layer):
                x = x + x @ weight
        return x

    mlps = [f"layer_{i}/mlp/Dense_{j}" for i in range(3) for j in range(2)]
    assert paths(report(fn, hb.policy("mlp", "nvfp4"), transformer_names(), X).replaced) == mlps
    assert len(report(fn, hb.policy("all_linear", "nvfp4"), transformer_names(), X).replaced) == 18


@pytest.mark.slow
def test_named_policies_find_mlps_by_what_they_compute():
    model = eqx.nn.MLP(32, 32, width_size=64, depth=2, key=jax.random.key(0))
    found = report(lambda m, x: jax.vmap(m)(x), hb.policy("mlp", "nvfp4"), model, X)
    assert paths(found.replaced) == ["layers/0/weight", "layers/1/weight", "layers/2/weight"]

    def block(p, x):
        scores = jax.nn.softmax(jnp.einsum("td,sd->ts", x @ p["a"], x @ p["b"]))
        x = x + (scores @ (x @ p["c"])) @ p["d"]
        x = x * lax.rsqrt(jnp.mean(x**2, -1, keepdims=True))
        return x + (jax.nn.silu(x @ p["e"]) * (x @ p["f"])) @ p["g"]

    assert paths(report(block, hb.policy("mlp", "nvfp4"), {n: square() for n in "abcdefg"}, X).replaced) == [
        "e", "f", "g"
    ]  # fmt: skip


def test_value_of_a_gated_mlp_is_mlp_and_norm_scale_no_weight():
    """As Penzai writes them: `value` is the ungated half of an MLP, and a norm multiplies by an einsum."""
    names = [f"block_0/{name}" for name in ("pre_ffw_norm", "mlp/gate", "mlp/value", "mlp/out", "attention/value")]

    def fn(p, x):
        x = jnp.einsum("td,d->td", x, p[names[0]])
        x = x + (jax.nn.silu(x @ p[names[1]]) * (x @ p[names[2]])) @ p[names[3]]
        return x + x @ p[names[4]]

    params = {name: jnp.ones(32) if "norm" in name else square() for name in names}
    assert paths(report(fn, hb.policy("mlp", "nvfp4"), params, X).replaced) == names[1:4]
