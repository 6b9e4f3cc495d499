"""Models that nobody here wrote, tiny: those that other packages ship whole (Gemma's own, Tunix's Llama 3 and Qwen3,
Penzai's), and transformers made of the layers of NNX, haliax, Haiku and Equinox. Each is a function that returns
(loss(params, tokens), params); the loss takes int32 tokens [batch, seq + 1].

What is changed in them is the embedding lookup alone: on explicit axes JAX wants to be told the sharding of a gather,
and these models, written before such axes, do not say it; without a recipe too they do not run there.
"""

import importlib.util
import sys
import types

import equinox as eqx
import haiku as hk
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

VOCAB, EMBED, MLP, HEADS, HEAD, SEQ, BATCH, LAYERS = 32, 32, 64, 2, 16, 16, 8, 1
CAUSAL = jnp.tril(jnp.ones((SEQ, SEQ), bool))


def cross_entropy(logits, tokens):
    hot = jax.nn.one_hot(tokens[:, 1:], VOCAB)
    return -jnp.mean(jnp.sum(jax.nn.log_softmax(logits) * hot, -1))


def embed(table, tokens):
    """A lookup as a product, which meshes with explicit axes take without being told a sharding."""
    return jax.nn.one_hot(tokens, VOCAB) @ table


def positions():
    return jnp.broadcast_to(jnp.arange(SEQ), (BATCH, SEQ))


def gemma():
    transformer = pytest.importorskip("gemma.transformer", reason="pip install --no-deps gemma==2.0.8")
    from gemma import modules

    config = transformer.TransformerConfig(
        num_layers=LAYERS, num_embed=VOCAB, embed_dim=EMBED, hidden_dim=MLP, num_heads=HEADS, head_dim=HEAD,
        num_kv_heads=HEADS, final_logit_softcap=None, use_post_attn_norm=False, use_post_ffw_norm=False,
        attention_types=(modules.AttentionType.GLOBAL,) * LAYERS,
    )  # fmt: skip
    modules.Embedder.encode = lambda self, x: embed(self.input_embedding_table, x) * jnp.sqrt(self.embed_dim)
    model = transformer.Transformer(config)
    mask = jnp.broadcast_to(CAUSAL, (BATCH, SEQ, SEQ))

    def loss(params, tokens):
        return cross_entropy(model.apply(params, tokens[:, :-1], positions(), None, mask)[0], tokens)

    return loss, model.init(jax.random.key(0), jnp.zeros((BATCH, SEQ), jnp.int32), positions(), None, mask)


def tunix_module(name):
    """A model file of Tunix without the reinforcement learning that its own __init__ imports."""
    if "tunix" not in sys.modules:
        found = importlib.util.find_spec("tunix")
        if found is None:
            pytest.skip("pip install --no-deps google-tunix==0.1.7")
        sys.modules["tunix"] = types.ModuleType("tunix")
        sys.modules["tunix"].__path__ = list(found.submodule_search_locations)
    return pytest.importorskip(f"tunix.models.{name}.model", exc_type=ImportError)


def drawn(params):
    """Tunix's models wait for a checkpoint: their MLPs begin with zeros, from which no gradient leads away."""
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    return tree.unflatten(
        [jax.random.normal(key, x.shape) * EMBED**-0.5 if x.ndim == 2 else x for key, x in zip(keys, leaves)]
    )


def tunix(name, kind):
    library = tunix_module(name)
    library.Embedder.encode = lambda self, x: embed(self.input_embedding.value, x)
    config = library.ModelConfig(
        num_layers=LAYERS, vocab_size=VOCAB, embed_dim=EMBED, hidden_dim=MLP, num_heads=HEADS, head_dim=HEAD,
        num_kv_heads=HEADS, rope_theta=10_000, norm_eps=1e-6,
    )  # fmt: skip
    graph, params, rest = nnx.split(getattr(library, kind)(config, rngs=nnx.Rngs(0)), nnx.Param, ...)
    mask = jnp.broadcast_to(CAUSAL, (BATCH, SEQ, SEQ))

    def loss(params, tokens):
        model = nnx.merge(graph, params, rest)
        return cross_entropy(model(tokens[:, :-1], positions(), None, mask)[0], tokens)

    return loss, drawn(params)


def llama3():
    return tunix("llama3", "Llama3")


def qwen3():
    return tunix("qwen3", "Qwen3")


def penzai():
    pytest.importorskip("penzai", exc_type=ImportError)
    from penzai import pz
    from penzai.models.transformer.variants import llamalike_common as variant

    config = variant.LlamalikeTransformerConfig(
        num_kv_heads=HEADS, query_head_multiplier=1, embedding_dim=EMBED, projection_dim=HEAD, mlp_hidden_dim=MLP,
        num_decoder_blocks=LAYERS, vocab_size=VOCAB, mlp_variant="swiglu", tie_embedder_and_logits=False,
    )  # fmt: skip
    model = variant.build_llamalike_transformer(config, init_base_rng=jax.random.key(0))

    def lookup(self, tokens, **_):
        table = self.table.embeddings.value.unwrap("vocabulary", "embedding")
        return pz.nx.wrap(embed(table, tokens.unwrap("batch", "seq"))).tag("batch", "seq", "embedding")

    pz.nn.EmbeddingLookup.__call__ = lookup
    model, variables = pz.unbind_params(model, freeze=True)
    labels = [variable.label for variable in variables]

    def loss(params, tokens):
        named = pz.nx.wrap(tokens[:, :-1]).tag("batch", "seq")
        places = pz.nx.wrap(jnp.arange(SEQ)).tag("seq")
        bound = pz.bind_variables(model, [pz.ParameterValue(label=label, value=params[label]) for label in labels])
        logits = bound(named, token_positions=places).unwrap("batch", "seq", "vocabulary")
        return cross_entropy(logits, tokens)

    return loss, {variable.label: variable.value for variable in variables}


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.norm, self.norm2 = nnx.LayerNorm(EMBED, rngs=rngs), nnx.LayerNorm(EMBED, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(num_heads=HEADS, in_features=EMBED, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(EMBED, MLP, rngs=rngs), nnx.Linear(MLP, EMBED, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm(x), mask=nnx.make_causal_mask(jnp.ones(x.shape[:2])))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class NnxModel(nnx.Module):
    def __init__(self, rngs):
        self.table = nnx.Param(jax.random.normal(rngs.params(), (VOCAB, EMBED)))
        self.blocks = nnx.List([NnxBlock(rngs) for _ in range(LAYERS)])
        self.norm, self.head = nnx.LayerNorm(EMBED, rngs=rngs), nnx.Linear(EMBED, VOCAB, rngs=rngs)

    def __call__(self, tokens):
        x = embed(self.table[...], tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def nnx_model():
    graph, params, rest = nnx.split(NnxModel(nnx.Rngs(0)), nnx.Param, ...)

    def loss(params, tokens):
        return cross_entropy(nnx.merge(graph, params, rest)(tokens[:, :-1]), tokens)

    return loss, params


def haliax_model():
    if not hasattr(jax.core, "is_constant_dim"):
        pytest.skip("haliax 1.4.dev453 needs jax.core.is_constant_dim, which JAX 0.11 has removed")
    Embed, Vocab, Layers = hax.Axis("embed", EMBED), hax.Axis("vocab", VOCAB), hax.Axis("layers", LAYERS)
    Seq, Batch = hax.Axis("seq", SEQ), hax.Axis("batch", BATCH)
    keys = jax.random.split(jax.random.key(0), 3)
    mlp = hnn.Stacked.init(Layers, hnn.MLP)(
        Embed, Embed, MLP, 1, key=jax.random.split(keys[0], LAYERS), use_bias=False, init_scale=0.5
    )
    table = hax.random.normal(keys[1], (Vocab, Embed)) * 0.3
    head = hnn.Linear.init(Embed, Vocab, key=keys[2], use_bias=False)

    def loss(params, tokens):
        table, mlp, head = params
        now = hax.named(embed(table.array, tokens[:, :-1]), (Batch, Seq, Embed))
        before = hax.named(jnp.pad(now.array, ((0, 0), (1, 0), (0, 0)))[:, :-1], (Batch, Seq, Embed))
        x = mlp.fold(now + 0.5 * before)
        return cross_entropy(head(x).rearrange((Batch, Seq, Vocab)).array, tokens)

    return loss, (table, mlp, head)


def haiku_model():
    def forward(tokens):
        x = embed(hk.get_parameter("table", (VOCAB, EMBED), init=hk.initializers.RandomNormal()), tokens)
        mask = jnp.broadcast_to(jnp.tril(jnp.ones((SEQ, SEQ), bool)), (BATCH, 1, SEQ, SEQ))
        for i in range(LAYERS):
            h = hk.LayerNorm(-1, True, True, name=f"norm_{i}")(x)
            attention = hk.MultiHeadAttention(2, 16, w_init=hk.initializers.VarianceScaling(), name=f"attention_{i}")
            x = x + attention(h, h, h, mask=mask)
            h = hk.LayerNorm(-1, True, True, name=f"norm2_{i}")(x)
            x = x + hk.nets.MLP([MLP, EMBED], activation=jax.nn.gelu, name=f"mlp_{i}")(h)
        return hk.Linear(VOCAB, name="head")(hk.LayerNorm(-1, True, True, name="norm")(x))

    net = hk.without_apply_rng(hk.transform(forward))

    def loss(params, tokens):
        return cross_entropy(net.apply(params, tokens[:, :-1]), tokens)

    return loss, net.init(jax.random.key(0), jnp.zeros((BATCH, SEQ), jnp.int32))


class EquinoxBlock(eqx.Module):
    attention: eqx.nn.MultiheadAttention
    norms: list
    mlp: eqx.nn.MLP

    def __init__(self, key):
        one, two = jax.random.split(key)
        self.attention = eqx.nn.MultiheadAttention(HEADS, EMBED, key=one)
        self.norms = [eqx.nn.LayerNorm(EMBED) for _ in range(2)]
        self.mlp = eqx.nn.MLP(EMBED, EMBED, MLP, 1, activation=jax.nn.gelu, key=two)

    def __call__(self, x):
        h = jax.vmap(self.norms[0])(x)
        x = x + self.attention(h, h, h, mask=CAUSAL)
        return x + jax.vmap(self.mlp)(jax.vmap(self.norms[1])(x))


def equinox_model():
    keys = jax.random.split(jax.random.key(0), LAYERS + 2)
    blocks = [EquinoxBlock(key) for key in keys[:LAYERS]]
    head = eqx.nn.Linear(EMBED, VOCAB, key=keys[-1])
    params, static = eqx.partition((jax.random.normal(keys[-2], (VOCAB, EMBED)), blocks, head), eqx.is_array)

    def loss(params, tokens):
        table, blocks, head = eqx.combine(params, static)
        x = embed(table, tokens[:, :-1])
        for block in blocks:
            x = jax.vmap(block)(x)
        return cross_entropy(jax.vmap(jax.vmap(head))(x), tokens)

    return loss, params


MODELS = {
    "gemma": gemma, "llama3": llama3, "qwen3": qwen3, "penzai": penzai, "nnx": nnx_model, "haliax": haliax_model,
    "haiku": haiku_model, "equinox": equinox_model,
}  # fmt: skip
