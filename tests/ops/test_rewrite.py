"""apply_recipe. Oracle: the same function with `qdot` written by hand, bit for bit; and reports written down here.

Where only the structure matters, recipes are bf16 or fp8, whose programs compile quickly.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from halfbyte.ops import apply_recipe, qdot
from halfbyte.ops.adapters.model_structure import leaf_names
from halfbyte.recipes import Policy, Rule, layer_key, policy, recipe, site_key, step_key

NVFP4, FP8, BF16 = recipe("nvfp4"), recipe("fp8"), recipe("bf16")
KEY = step_key(0, 3)
LAYERS = 4
QUICK = {"xla_backend_optimization_level": 0}  # compiling is most of the time, and no number depends on it


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) * shape[-2] ** -0.5, jnp.float32)


PARAMS = {"layers": {"a": normal(0, LAYERS, 16, 32), "b": normal(1, LAYERS, 32, 16)}, "head": normal(2, 16, 32)}
X = normal(3, 16, 16)


def rule(pattern, made, layers=None):
    return Policy("test", (Rule(pattern, made, layers),))


def replaced(fn, policy, *args):
    return [site.path for site in apply_recipe(fn, policy, key=KEY).report(*args).replaced]


def same_bits(ours, by_hand, *args):
    """Values and gradients of both, in one program."""
    program = jax.jit(lambda *args: [jax.value_and_grad(f)(*args) for f in (ours, by_hand)], compiler_options=QUICK)
    jax.tree.map(np.testing.assert_array_equal, *program(*args))


def network(dot_a, dot_b, dot_head):
    """A scan with remat and a custom_jvp activation, then jit; `dot_*` (x, w, layer) say how to multiply."""

    def fn(params, x):
        def body(x, item):
            layer, p = item
            block = jax.checkpoint(lambda x: x + dot_b(jax.nn.relu(dot_a(x, p["a"], layer)), p["b"], layer))
            return block(x), jnp.sum(x)

        x, sums = lax.scan(body, x, (jnp.arange(LAYERS), params["layers"]))
        return jnp.mean(jnp.sin(jax.jit(dot_head)(x, params["head"]))) + jnp.sum(sums) * 0.01

    return fn


def plain(x, w, _=None):
    return x @ w


PLAIN = network(plain, plain, plain)


@pytest.mark.slow
def test_rewrite_through_scan_remat_and_jit_equals_qdot():
    def by(made, site):
        def dot(x, w, layer=None):
            key = KEY if layer is None else layer_key(KEY, layer)
            return qdot(x, w, recipe=made, key=site_key(key, site))

        return dot

    policy = Policy("test", (Rule("layers/a", NVFP4), Rule("head", FP8)))
    same_bits(apply_recipe(PLAIN, policy, key=KEY), network(by(NVFP4, "layers/a"), plain, by(FP8, "head")), PARAMS, X)


@pytest.mark.slow
def test_rules_by_layer_split_the_scan():
    policy = Policy("test", (Rule("layers/a", BF16, (1, -1)), Rule("layers/b", BF16, (2, None))))

    def by_hand(params, x):
        sums = []
        for layer in range(LAYERS):
            a, b = params["layers"]["a"][layer], params["layers"]["b"][layer]
            sums.append(jnp.sum(x))
            hidden = qdot(x, a, recipe=BF16) if 1 <= layer < LAYERS - 1 else x @ a
            x = x + (qdot(jax.nn.relu(hidden), b, recipe=BF16) if layer >= 2 else jax.nn.relu(hidden) @ b)
        return jnp.mean(jnp.sin(x @ params["head"])) + jnp.sum(jnp.stack(sums)) * 0.01

    ours = apply_recipe(PLAIN, policy, key=KEY)
    (a, da), (b, db) = jax.jit(lambda p, x: [jax.value_and_grad(f)(p, x) for f in (ours, by_hand)])(PARAMS, X)
    # A loop written out is another program: its sums may be in another order, so 1e-5 instead of equal bits.
    np.testing.assert_allclose(a, b, rtol=1e-5)
    jax.tree.map(lambda u, v: np.testing.assert_allclose(u, v, rtol=2e-4, atol=1e-5), da, db)
    assert [(site.path, site.layers, site.num_executions) for site in ours.report(PARAMS, X).replaced] == [
        ("layers/a", range(1, 2), 1),
        ("layers/a", range(2, 3), 1),
        ("layers/b", range(2, 3), 1),
        ("layers/b", range(3, 4), 1),
    ]


def test_a_layer_rule_that_covers_all_layers_does_not_split():
    sites = apply_recipe(PLAIN, rule("layers/a", FP8, (0, None))).report(PARAMS, X).replaced
    assert [(site.path, site.layers, site.num_executions) for site in sites] == [("layers/a", range(4), 4)]


def test_a_reverse_scan_is_split_from_its_end():
    def fn(params, x):
        def body(x, p):
            return jnp.sin(x @ p), jnp.sum(x)

        x, sums = lax.scan(body, x, params, reverse=True)
        return jnp.sum(x) + jnp.sum(sums * jnp.arange(1.0, LAYERS + 1))

    weights = normal(5, LAYERS, 16, 16)
    ours = apply_recipe(fn, rule("params", BF16, (3, 4)))

    def by_hand(params, x):
        total = jnp.float32(0)
        for layer in reversed(range(LAYERS)):
            total = total + jnp.sum(x) * (layer + 1)
            x = jnp.sin(qdot(x, params[layer], recipe=BF16) if layer == 3 else x @ params[layer])
        return jnp.sum(x) + total

    a, b = jax.jit(lambda p, x: (ours(p, x), by_hand(p, x)))(weights, X)
    np.testing.assert_allclose(a, b, rtol=1e-5)


def test_site_names_of_bare_array_and_list_layers():
    assert replaced(lambda weight, x: x @ weight, rule("weight", FP8), normal(0, 16, 16), X) == ["weight"]
    layers = [{"w": normal(i, 16, 16)} for i in range(3)]

    def fn(layers, x):
        for p in layers:
            x = x @ p["w"]
        return x

    assert replaced(fn, rule("*/w", FP8, (-2, None)), layers, X) == ["1/w", "2/w"]
    stacked = normal(4, 3, 16, 16)
    assert replaced(lambda w, x: x @ w[0] @ w[2], rule("w", FP8, (2, 3)), stacked, X) == ["w#2"]


def test_weight_is_followed_through_casts_and_reshapes():
    weights = {"qkv": normal(0, 16, 2, 3, 8), "t": normal(1, 32, 16), "cut": normal(2, 16, 64)}

    def fn(p, x):
        x = x @ p["qkv"].astype(jnp.bfloat16).astype(jnp.float32).reshape(16, 48)[:, :16]
        x = x @ p["t"].T[:, 16:]
        left, right = jnp.split(p["cut"], 2, axis=1)
        return x @ left + jnp.einsum("td,df->tf", x, right)

    assert replaced(fn, rule("*", FP8), weights, X) == ["qkv", "t", "cut", "cut#2"]


@pytest.mark.slow
def test_a_weight_on_the_left_is_transposed_into_place():
    w = normal(0, 32, 16)

    def fn(w, x):
        return jnp.sum(jnp.sin(jax.vmap(lambda row: w @ row)(x)))

    same_bits(apply_recipe(fn, BF16), lambda w, x: jnp.sum(jnp.sin(qdot(x, w.T, recipe=BF16))), w, X)


def test_what_is_left_alone_and_why():
    @jax.custom_vjp
    def special(x, w):
        return x @ w

    special.defvjp(lambda x, w: (x @ w, (x, w)), lambda res, dy: (dy @ res[1].T, res[0].T @ dy))
    constant = normal(9, 16, 16)

    def fn(p, x):
        x = special(x, p["special"]) @ p["head"]
        x = x @ (p["scaled"] * 2.0) @ constant
        scores = jnp.einsum("td,sd->ts", x, x)
        return jnp.einsum("eti,eio->eto", jnp.stack([x, x]), p["experts"]), scores

    weights = {name: normal(i, 16, 16) for i, name in enumerate(("special", "head", "scaled"))}
    weights["experts"] = normal(7, 2, 16, 16)
    report = apply_recipe(fn, rule("head", FP8)).report(weights, X)
    assert [site.path for site in report.replaced] == ["head"]
    assert [(site.path, site.skip_reason) for site in report.skipped] == [
        ("special", "it is inside custom_vjp_call, whose rules are its own"),
        ("scaled", "no rule matches scaled"),
        (None, "neither operand depends on weights alone"),
        (None, "neither operand depends on weights alone"),
        ("experts", "it has batch dims, so no operand is a single weight"),
    ]
    assert str(report).startswith("apply_recipe: 1 dots replaced, 5 left\n  head  [16, 16] x [16, 16]  -> fp8\n")


def test_data_are_no_weights_and_argnums_says_who_is():
    def fn(x, params):
        return jnp.sum(x @ params["w"])

    weights = {"w": normal(0, 16, 16)}
    with pytest.raises(ValueError, match=r"rule 'w' .* matches nothing \(the weights of dots are x\)"):
        apply_recipe(fn, rule("w", FP8)).report(X, weights)
    report = apply_recipe(fn, FP8, argnums=1).report(X, weights)
    assert [site.path for site in report.replaced] == ["w"]
    with pytest.raises(ValueError, match=r"argnums=\(2,\) names an argument that was not passed by position; got 2"):
        apply_recipe(fn, FP8, argnums=2).report(X, weights)


def test_cond_and_while():
    def fn(w, x, flag):
        x = lax.cond(flag, lambda x: x @ w, lambda x: x, x)
        return lax.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, jnp.sin(s[1] @ w)), (0, x))[1]

    w = normal(0, 16, 16)
    ours = apply_recipe(fn, BF16)
    assert [site.path for site in ours.report(w, X, True).replaced] == ["w", "w#2"]

    def by_hand(w, x, flag):
        dot = lambda x: qdot(x, w, recipe=BF16)  # noqa: E731
        x = jnp.where(flag, dot(x), x)
        return jnp.sin(dot(jnp.sin(dot(x))))

    for flag in (True, False):
        a, b = jax.jit(lambda *args: (ours(*args), by_hand(*args)))(w, X, jnp.asarray(flag))
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_each_use_layer_and_step_has_its_own_key(monkeypatch):
    def show_key(x, w, *, key=None, out_dtype=None, **_):
        words = jax.random.key_data(key)
        return jnp.zeros((*x.shape[:-1], w.shape[-1]), x.dtype) + (words[0] ^ words[1]).astype(x.dtype)

    def show_keys(x, weights, *, keys, **_):
        return [show_key(x, w, key=key) for w, key in zip(weights, keys, strict=True)]

    monkeypatch.setattr("halfbyte.ops.adapters.dot_general.qdot", show_key)
    monkeypatch.setattr("halfbyte.ops.adapters.dot_general.qdots", show_keys)  # of one x

    def fn(params, x):
        once, twice = x @ params["w"], x @ params["w"]
        _, each = lax.scan(lambda c, p: (c, (x @ p)[0, 0]), 0, params["stack"])
        _, again = lax.scan(lambda c, _: (c, (x @ params["w"])[0, 0]), 0, None, length=3)
        _, loop = lax.while_loop(lambda s: s[0] < 1, lambda s: (s[0] + 1, (x @ params["w"])[0, 0]), (0, jnp.float32(0)))
        return jnp.concatenate([jnp.stack([once[0, 0], twice[0, 0], loop]), each, again])

    params = {"w": normal(0, 16, 16), "stack": normal(1, 4, 16, 16)}
    steps = [apply_recipe(fn, NVFP4, key=step_key(0, step), show=None)(params, X) for step in range(2)]
    assert len(set(np.concatenate(steps).tolist())) == 2 * 10
    np.testing.assert_array_equal(steps[0], apply_recipe(fn, NVFP4, key=lambda: step_key(0, 0), show=None)(params, X))


@pytest.mark.slow(fast_cases=["unsafe_rbg"])
@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_keys_of_any_generator_differ_by_step_and_layer(monkeypatch, impl):
    def show_key(x, w, *, key=None, **_):
        first, *_, last = jax.random.key_data(key)
        return jnp.zeros((*x.shape[:-1], w.shape[-1]), x.dtype) + (first ^ last).astype(x.dtype)

    monkeypatch.setattr("halfbyte.ops.adapters.dot_general.qdot", show_key)

    def fn(params, x):
        return lax.scan(lambda c, p: (c, (x @ p)[0, 0]), 0, params)[1]

    params, root = normal(1, 4, 16, 16), jax.random.key(0, impl=impl)
    keys = [apply_recipe(fn, NVFP4, key=jax.random.fold_in(root, step), show=None)(params, X) for step in range(4)]
    assert len(set(np.concatenate(keys).tolist())) == 16


def test_errors_name_the_way_out():
    with pytest.raises(ValueError, match="holds a recipe that rounds stochastically and needs key="):
        apply_recipe(PLAIN, rule("*", NVFP4))
    with pytest.raises(TypeError, match="policy must be a Policy, a Recipe or a recipe's name, got 7"):
        apply_recipe(PLAIN, 7)
    with pytest.raises(ValueError, match="no recipe named 'nvfp5'; did you mean nvfp4"):
        apply_recipe(PLAIN, "nvfp5")
    with pytest.raises(
        ValueError, match=r"rule 'mlp/\*' .* \(the weights of dots are layers/a, layers/b, head\); change or"
    ):
        apply_recipe(PLAIN, rule("mlp/*", FP8)).report(PARAMS, X)
    shadowed = Policy("test", (Rule("*", FP8), Rule("head", BF16)))
    with pytest.raises(ValueError, match=r"rule 'head' .* matches nothing \(head: decided as fp8\)"):
        apply_recipe(PLAIN, shadowed).report(PARAMS, X)
    with pytest.raises(ValueError, match=r"the dot of head belongs to a backward pass.*grad\(apply_recipe"):
        apply_recipe(jax.grad(PLAIN), rule("*", FP8)).report(PARAMS, X)


def test_a_layer_number_that_cannot_be_known_is_refused():
    def traced_index(w, x):
        return lax.fori_loop(0, 4, lambda i, x: x @ w[i], x)

    def grouped(w, x):
        return lax.scan(lambda x, p: (x @ p[0] @ p[1], None), x, w.reshape(2, 2, 16, 16))[0]

    for fn in (traced_index, grouped):
        with pytest.raises(ValueError, match=r"the layer number of w is not known at this dot.*select by path alone"):
            apply_recipe(fn, rule("w", FP8, (1, 3))).report(normal(0, 4, 16, 16), X)
        assert apply_recipe(fn, FP8).report(normal(0, 4, 16, 16), X).replaced


def test_unblockable_shape_is_left_and_its_rule_refused():
    def fn(p, x):
        return x @ p["even"] @ p["odd"]

    params = {"even": normal(0, 16, 32), "odd": normal(1, 32, 24)}
    report = apply_recipe(fn, NVFP4, key=KEY, show=None).report(params, X)
    assert [site.path for site in report.replaced] == ["even"]
    assert "dgrad sums over 24 outputs" in report.skipped[0].skip_reason
    with pytest.raises(ValueError, match=r"rule 'odd' .* matches nothing \(odd: dgrad sums over 24 outputs"):
        apply_recipe(fn, rule("odd", NVFP4), key=KEY).report(params, X)


@pytest.mark.parametrize("odd", ["gate", "in_proj"])
def test_a_named_policy_leaves_one_linear_that_cannot_be_blocked(odd):
    """As a gate of four experts, and as the only linear of its layer that is no MLP (Mamba2: 292 outputs)."""

    def fn(params, x):
        for layer in params["layers"]:
            x = x + jnp.sum(jax.nn.softmax(x @ layer[odd]) ** 2, -1, keepdims=True)
            x = x + jax.nn.relu(x @ layer["up"]) @ layer["down"]
        return jnp.mean(x @ params["head"])

    layer = {odd: normal(0, 16, 4), "up": normal(1, 16, 32), "down": normal(2, 32, 16)}
    params = {"layers": [layer, layer], "head": normal(3, 16, 32)}
    report = apply_recipe(fn, policy("all_linear", NVFP4), key=KEY, show=None).report(params, X)
    assert [site.path.split("/")[-1] for site in report.replaced] == ["up", "down"] * 2
    assert ["4 outputs" in site.skip_reason for site in report.skipped] == [True, True, False]


@pytest.mark.parametrize("params", [{"up": (16, 32), "down": (32, 16)}, [(16, 32), (32, 16)]], ids=["names", "numbers"])
def test_an_ensemble_of_stacked_weights_is_left_whole(params):
    """Its members have tensors of their own: not one is quantized as if they were a single tensor."""

    def member(params, x):
        up, down = jax.tree.leaves(params)[::-1] if isinstance(params, dict) else params
        return jax.nn.relu(x @ up) @ down

    stacked = jax.tree.map(lambda shape: normal(0, 3, *shape), params, is_leaf=lambda leaf: isinstance(leaf, tuple))
    ensemble = lambda params, x: jnp.sum(jax.vmap(member, (0, None))(params["members"], x), 0) @ params["w"]  # noqa: E731
    report = apply_recipe(ensemble, NVFP4, key=KEY, show=None).report({"members": stacked, "w": normal(1, 16, 16)}, X)
    assert [site.path for site in report.replaced] == ["w"] and len(report.skipped) == 2


@pytest.mark.parametrize(
    ("subscripts", "shape", "axes", "replaced"),
    [
        ("td,dnh->tnh", (16, 2, 16), (None, 0), True),
        ("td,ndh->tnh", (2, 16, 16), (None, 0), True),  # heads first, as Gemma's
        ("td,dh->th", (2, 16, 16), (0, None), False),
        ("dh,td->th", (2, 16, 16), (0, None), False),
    ],
)
def test_einsum_under_vmap_of_weight_is_an_ensemble(subscripts, shape, axes, replaced):
    def fn(params, x):
        turned = subscripts.startswith("dh")
        product = lambda w, x: jnp.einsum(subscripts, *((w, x) if turned else (x, w)))  # noqa: E731
        return jax.vmap(product, axes)(params["asked"], x @ params["other"])

    x = X if axes[1] is None else jnp.stack([X, X])
    params = {"asked": normal(0, *shape), "other": normal(1, 16, 16)}
    report = apply_recipe(fn, NVFP4, key=KEY, show=None).report(params, x)
    assert [site.path for site in report.replaced] == ["other", "asked"][: 1 + replaced]


def test_unblockable_tokens_run_forward_and_name_the_weight():
    ours = apply_recipe(lambda w, x: jnp.sum(x @ w), NVFP4, key=KEY, show=None)
    w, x = normal(0, 16, 16), normal(1, 8, 16)
    (site,) = ours.report(w, x).replaced
    assert "forward only: wgrad sums over 8 tokens" in str(site)
    assert jax.eval_shape(ours, w, x).shape == ()
    with pytest.raises(ValueError, match="wgrad sums over 8 tokens"):
        jax.eval_shape(jax.grad(ours), w, x)


def test_the_report_is_printed_once(capsys):
    def fn(printed_once, x):
        return x @ printed_once

    for _ in range(2):
        apply_recipe(fn, BF16)(normal(0, 16, 16), X)
    assert capsys.readouterr().err.count("printed_once  [16, 16] x [16, 16]  -> bf16") == 1


def test_arguments_that_are_no_arrays_stay_as_they_are():
    def fn(p, x, scale, *, act):
        assert isinstance(scale, int)
        return {"y": act(x @ p["w"]) * scale, "none": None}

    out = apply_recipe(fn, BF16, show=None)({"w": normal(0, 16, 16), "name": "layer"}, X, 2, act=jnp.tanh)
    assert out["y"].shape == (16, 16) and out["none"] is None


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["layers/0/up/value", "head/value/data_array"], ["layers/0/up", "head"]),
        (["a/query/value", "a/key/value", "a/value/value"], ["a/query", "a/key", "a/value"]),
        (["a/query", "a/key", "a/value"], ["a/query", "a/key", "a/value"]),
        (["block/value", "block/mlp/up"], ["block/value", "block/mlp/up"]),
    ],
    ids=["wrapped", "wrapped value", "value beside arrays", "value beside a folder"],
)
def test_a_wrapper_is_a_folder_with_nothing_else_in_it(paths, names):
    assert leaf_names(paths) == names


def test_a_weight_that_is_multiplied_whole_has_no_layers():
    """Three dims of an einsum are heads, not layers, where no scan runs over the first."""
    heads = lambda p, x: jnp.einsum("bd,dhk->bhk", x, p["q"]).sum()  # noqa: E731
    (site,) = apply_recipe(heads, "nvfp4", key=KEY).report({"q": jnp.ones((16, 2, 16))}, X).replaced
    assert site.layers is None and "layers" not in str(site)


def test_rule_for_missing_layers_names_the_layers():
    blocks = {f"block_{i}": {"up": jnp.ones((16, 16)), "down": jnp.ones((16, 16))} for i in range(2)}

    def network(params, x):
        for block in params.values():
            x = x + jax.nn.relu(x @ block["up"]) @ block["down"]
        return x.sum()

    with pytest.raises(ValueError, match=r"matches nothing \(block_0/.*it is for layers \(2, .*, and these are 0\)"):
        apply_recipe(network, policy("paper", "nvfp4"), key=KEY).report(blocks, X)


# Weights in the names and layouts of MaxText


def maxtext_block(layers, axis):
    """(params, loss) of gated MLPs in MaxText's names, their layers along `axis`, as it scans over them."""
    shapes = {"wi_0": (16, 32), "wi_1": (16, 32), "wo": (32, 16)}
    stacked = {name: jnp.stack([normal(n, *shape) for n in range(layers)], axis) for name, shape in shapes.items()}

    def loss(params, x):
        stacks = jax.tree.map(lambda w: jnp.moveaxis(w, axis, 0), params["decoder"]["layers"]["mlp"])

        def body(x, w):
            hidden = jax.nn.silu(x @ w["wi_0"]["kernel"]) * (x @ w["wi_1"]["kernel"])
            return x + hidden @ w["wo"]["kernel"], None

        return jnp.mean(lax.scan(body, x, stacks)[0])

    return {"decoder": {"layers": {"mlp": {name: {"kernel": w} for name, w in stacked.items()}}}}, loss


@pytest.mark.parametrize("axis", [0, 1])
def test_wi_0_and_wi_1_are_not_layers(axis):
    params, loss = maxtext_block(10, axis)
    report = apply_recipe(loss, rule("*wi_*", FP8, (0, 1))).report(params, X)
    assert [(site.path.split("/")[-2], site.layers, site.num_executions) for site in report.replaced] == [
        ("wi_0", range(1), 1),
        ("wi_1", range(1), 1),
    ]


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize(("name", "layers"), [("paper", (2, 9)), ("nemotron3", (0, 8))])
def test_policy_by_layer_splits_a_scan_over_any_dim(axis, name, layers):
    params, loss = maxtext_block(10, axis)
    sites = apply_recipe(loss, policy(name, NVFP4), key=KEY, show=None).report(params, X).replaced
    assert [(site.path.split("/")[-2], site.layers) for site in sites] == [
        (part, range(*layers)) for part in ("wi_0", "wi_1", "wo")
    ]


def test_numbers_of_a_chain_of_linears_stay_layers():
    """`fc_1` and `fc_2` are one MLP; `fc_0` to `fc_3` are four layers."""
    params = {f"fc_{n}": normal(n, 16, 16) for n in range(4)}

    def fn(params, x):
        for n in range(4):
            x = jnp.sin(x @ params[f"fc_{n}"])
        return x

    assert replaced(fn, rule("*", FP8, (1, 3)), params, X) == ["fc_1", "fc_2"]


def test_rule_by_layer_refuses_a_scan_over_groups_of_layers():
    """Gemma 3 in MaxText scans over groups of six layers: the number in a path is the layer's inside its group."""
    params = {f"layers_{n}": normal(n, 3, 16, 16) for n in range(2)}

    def fn(params, x):
        return lax.scan(lambda x, w: (jnp.sin(x @ w["layers_0"]) @ w["layers_1"], None), x, params)[0]

    with pytest.raises(ValueError, match=r"layers_0, whose path holds a number, but a scan of 3 iterations repeats"):
        apply_recipe(fn, rule("*", FP8, (1, None))).report(params, X)
    stacks = apply_recipe(fn, rule("*", FP8, (1, None)), layers="layers_*")
    assert [site.layers for site in stacks.report(params, X).replaced] == [range(1, 3)] * 2


def experts(kind):
    """(params, fn) of a block of experts in MaxText's names, all experts in one einsum or in ragged dots."""
    block = {name: normal(n, 4, 16, 16) for n, name in enumerate(("wi_0", "wi_1", "wo"))}
    params = {"self_attention": {"query": {"kernel": normal(5, 16, 16)}, "out": {"kernel": normal(6, 16, 16)}}}
    params["MoeBlock_0"] = {**block, "gate": {"kernel": normal(3, 16, 4)}}
    sizes = jnp.full(4, 4, jnp.int32)

    def fn(params, x):
        attention, w = params["self_attention"], params["MoeBlock_0"]
        x = x + jax.nn.softmax(x @ attention["query"]["kernel"] @ x.T) @ x @ attention["out"]["kernel"]
        x = x * jnp.max(jax.nn.softmax(x @ w["gate"]["kernel"]), -1, keepdims=True)
        if kind == "ragged":
            hidden = jax.nn.silu(lax.ragged_dot(x, w["wi_0"], sizes)) * lax.ragged_dot(x, w["wi_1"], sizes)
            return jnp.mean(lax.ragged_dot(hidden, w["wo"], sizes))
        hidden = jax.nn.silu(jnp.einsum("td,edf->etf", x, w["wi_0"])) * jnp.einsum("td,edf->etf", x, w["wi_1"])
        return jnp.mean(jnp.einsum("etf,efd->etd", hidden, w["wo"]))

    return params, fn


@pytest.mark.parametrize("kind", ["dense", "ragged"])
def test_named_policy_leaves_experts_and_reports_them(kind):
    """One tensor scale over the weights of all experts would couple them; a ragged dot has one weight per expert."""
    params, fn = experts(kind)
    with pytest.warns(
        UserWarning, match=r"replaces no dot for its rule 'layers/mlp/\*': the MLPs of this model are exp"
    ):
        report = apply_recipe(fn, policy("mlp", FP8), show=None).report(params, X)
    assert report.replaced == ()
    reasons = {site.path: site.skip_reason for site in report.skipped if site.path and "MoeBlock_0/w" in site.path}
    assert len(reasons) == 3
    attention = apply_recipe(fn, policy("all_linear", FP8), show=None).report(params, X)
    assert [site.path.split("/")[1] for site in attention.replaced] == ["query", "out"]
