"""One model in the parameter trees of five frameworks: the same linears under the named policies, and never the
embedding, the head or the router. Oracle: the names that the model's author gave.
"""

import haiku as hk
import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx

import halfbyte as hb
from halfbyte.recipes import step_key

VOCAB, EMBED, HIDDEN, EXPERTS, LAYERS = 48, 32, 64, 16, 2
WIDTHS = {"q": (EMBED, EMBED), "o": (EMBED, EMBED), "router": (EMBED, EXPERTS), "up": (EMBED, HIDDEN),
          "down": (HIDDEN, EMBED)}  # fmt: skip
POLICIES = {"mlp": {"up", "down"}, "all_linear": {"q", "o", "up", "down"}}
TOKENS = jnp.ones((4, 32), jnp.int32)


def forward(tokens, table, linear, head):
    """linear(layer, name, x) and head(x) are the framework's; the table is tied to nothing."""
    x = jnp.take(table, tokens, axis=0)
    for layer in range(LAYERS):
        x = x + linear(layer, "o", jax.nn.softmax(linear(layer, "q", norm(x))))
        chosen = jnp.sum(jax.nn.softmax(linear(layer, "router", norm(x))) ** 2, -1, keepdims=True)
        x = x + chosen * linear(layer, "down", jax.nn.silu(linear(layer, "up", norm(x))))
    return jnp.mean(jax.nn.log_softmax(head(norm(x))) ** 2)


def norm(x):
    return x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True))


def plain(wrap=lambda w: w, unwrap=lambda w: w):
    """Nested dicts and lists, each array inside what `wrap` puts around it."""
    layers = [{name: wrap(jnp.ones(shape)) for name, shape in WIDTHS.items()} for _ in range(LAYERS)]
    params = {"embed": wrap(jnp.ones((VOCAB, EMBED))), "layers": layers, "lm_head": wrap(jnp.ones((EMBED, VOCAB)))}

    def loss(params, tokens):
        linear = lambda i, name, x: x @ unwrap(params["layers"][i][name])  # noqa: E731
        return forward(tokens, unwrap(params["embed"]), linear, lambda x: x @ unwrap(params["lm_head"]))

    return loss, params


class NnxModel(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCAB, EMBED, rngs=rngs)
        linears = [{n: nnx.Linear(*s, rngs=rngs) for n, s in WIDTHS.items()} for _ in range(LAYERS)]
        self.layers = nnx.List([nnx.Dict(layer) for layer in linears])
        self.lm_head = nnx.Linear(EMBED, VOCAB, rngs=rngs)

    def __call__(self, tokens):
        table = self.embed.embedding[...]
        return forward(tokens, table, lambda i, n, x: self.layers[i][n](x), self.lm_head)


def nnx_state():
    graph, state = nnx.split(NnxModel(nnx.Rngs(0)))
    return lambda state, tokens: nnx.merge(graph, state)(tokens), state


def nnx_module():
    return lambda model, tokens: model(tokens), NnxModel(nnx.Rngs(0))


def linen(boxed=False):
    init = nn.initializers.lecun_normal()
    init = nn.with_partitioning(init, (None, None)) if boxed else init

    class Model(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            table = self.param("embed", nn.initializers.ones, (VOCAB, EMBED))
            dense = lambda i, n, x: nn.Dense(WIDTHS[n][1], name=f"layers_{i}_{n}", kernel_init=init)(x)  # noqa: E731
            return forward(tokens, table, dense, nn.Dense(VOCAB, name="lm_head", kernel_init=init))

    return Model().apply, Model().init(jax.random.key(0), TOKENS)


def haiku(names=True):
    def model(tokens):
        table = hk.get_parameter("embed", (VOCAB, EMBED), init=jnp.ones)
        name = lambda i, n: f"layers_{i}_{n}" if names else None  # noqa: E731
        linear = lambda i, n, x: hk.Linear(WIDTHS[n][1], name=name(i, n))(x)  # noqa: E731
        return forward(tokens, table, linear, hk.Linear(VOCAB, name="lm_head" if names else None))

    net = hk.without_apply_rng(hk.transform(model))
    return net.apply, net.init(jax.random.key(0), TOKENS)


def penzai():
    pz = pytest.importorskip("penzai.pz", exc_type=ImportError)
    wrap = lambda w: pz.ParameterValue(label="w", value=pz.nx.wrap(w).tag("in", "out"))  # noqa: E731
    return plain(wrap, lambda boxed: boxed.value.unwrap("in", "out"))


TREES = {
    "plain": plain, "haiku": haiku, "linen": linen, "linen boxed": lambda: linen(boxed=True), "penzai": penzai,
    "nnx state": nnx_state, "nnx module": nnx_module,
}  # fmt: skip


def replaced(loss, params, policy):
    rewritten = hb.apply_recipe(loss, hb.policy(policy, "nvfp4"), key=step_key(0, 0), show=None)
    return rewritten.report(params, TOKENS)


@pytest.mark.slow(fast_cases=["nnx module-mlp"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # other people's code, older than this JAX
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("tree", TREES)
def test_linears_are_the_same_in_every_tree(tree, policy):
    report = replaced(*TREES[tree](), policy)
    wanted = sorted((str(layer), name) for layer in range(LAYERS) for name in POLICIES[policy])
    parts = [site.path.replace(".", "/").replace("_", "/").split("/") for site in report.replaced]
    assert sorted((p[p.index("layers") + 1], p[p.index("layers") + 2]) for p in parts) == wanted, report


@pytest.mark.slow
def test_linears_without_names_are_found_by_use():
    """Haiku's own numbers, in the order in which they are made: the head, and of each layer q, o, router, up, down."""
    report = replaced(*haiku(names=False), "mlp")
    assert [site.path for site in report.replaced] == ["linear_4/w", "linear_5/w", "linear_9/w", "linear_10/w"]
    everything = {site.path for site in replaced(*haiku(names=False), "all_linear").replaced}
    assert everything >= {"linear_1/w", "linear_2/w", "linear_4/w"} and "linear/w" not in everything
