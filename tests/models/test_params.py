"""Oracles: the parameter counts that were published, and the shapes of the papers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from halfbyte import models
from halfbyte.distributed import make_mesh

PUBLISHED = {
    "qwen3-0.6b": 596_049_920,
    "llama3.2-1b": 1_235_814_400,
    "qwen3-1.7b": 1_720_574_976,
    "llama3-8b": 8_030_261_248,
    "qwen3-8b": 8_190_735_360,
    "llama3.1-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
}


def test_counts_equal_the_published_ones():
    assert {name: models.count_params(models.preset(name)) for name in PUBLISHED} == PUBLISHED


def test_small_presets():
    dense = {name: cfg for name, cfg in models.presets().items() if not cfg.experts}
    counts = {name: models.count_params(cfg) for name, cfg in dense.items() if name not in PUBLISHED}
    assert list(counts) == ["demo", "llama-60m", "llama-125m", "llama-350m"]
    assert counts["demo"] == pytest.approx(1.5e6, rel=0.05)
    for cfg in models.presets().values():
        assert not any(size % 32 for size in (cfg.vocab_size, cfg.embed, cfg.mlp, cfg.kv_heads * cfg.head_dim))


def test_unknown_preset_names_its_neighbours():
    with pytest.raises(ValueError, match="did you mean llama3-8b"):
        models.preset("llama-3-8b")


@pytest.mark.parametrize("change", [{"layers": 0}, {"kv_heads": 3}, {"head_dim": 15}])
def test_impossible_shapes_are_refused(tiny, change):
    with pytest.raises(ValueError, match=next(iter(change))):
        tiny.replace(**change)


@pytest.mark.slow
def test_init_matches_the_specs(tiny, tiny_params):
    specs = models.flatten_specs(models.param_specs(tiny))
    params = models.flatten_specs(tiny_params)
    assert {p: (x.shape, x.dtype) for p, x in params.items()} == {p: (s.shape, jnp.float32) for p, s in specs.items()}
    for path, spec in specs.items():
        if spec.init is None:
            assert np.all(np.asarray(params[path]) == 1)
        else:  # the standard deviation of 6,000 or more normals is known to about 1%
            assert float(np.std(params[path])) == pytest.approx(spec.init, rel=0.05)


@pytest.mark.slow
def test_init_is_the_same_on_a_mesh(tiny, tiny_params):
    mesh = make_mesh({"fsdp": 4, "tensor": 2}, jax.devices("cpu"))
    shardings = models.param_shardings(tiny, mesh)
    spread = jax.jit(lambda key: models.init(tiny, key), out_shardings=shardings)(jax.random.key(0))
    for a, b in zip(jax.tree.leaves(spread), jax.tree.leaves(tiny_params), strict=True):
        np.testing.assert_allclose(
            a, b, rtol=1e-6
        )  # the same random bits; a vector unit may round their logarithm otherwise
    assert spread["layers"]["mlp"]["up"].sharding.spec == P(None, "fsdp", "tensor")


def test_decay_spares_the_norms(tiny):
    mask = models.flatten_specs(models.weight_decay_mask(tiny))
    assert {path for path, decayed in mask.items() if not decayed} == {
        "layers/attention/norm",
        "layers/mlp/norm",
        "final_norm",
    }


def test_tied_model_has_no_head_of_its_own(tiny):
    assert "head" not in models.param_specs(tiny.replace(tied=True))
    assert models.linear_sites(tiny) == models.linear_sites(tiny.replace(tied=True))
    assert models.linear_sites(tiny) == (
        *(f"layers/attention/{name}" for name in "qkvo"),
        *(f"layers/mlp/{name}" for name in ("gate", "up", "down")),
        "head",
    )


def test_meshes_that_do_not_fit_are_refused(tiny):
    def mesh(**shape):
        return make_mesh(shape, jax.devices("cpu"))

    models.check_mesh(tiny, mesh(fsdp=4, tensor=2), batch=8, seq=32)
    with pytest.raises(ValueError, match="kv_heads of tiny is 2, which tensor=4 does not divide"):
        models.check_mesh(tiny, mesh(fsdp=2, tensor=4))
    with pytest.raises(ValueError, match="'embed' of embed is 64, and fsdp=8 leaves 8"):
        models.check_mesh(tiny, mesh(fsdp=8))
    with pytest.raises(ValueError, match="the global batch is 6"):
        models.check_mesh(tiny, mesh(fsdp=4, tensor=2), batch=6)
    with pytest.raises(ValueError, match="the sequence length is 48, and context=2 x tensor=2 leaves 12"):
        models.check_mesh(tiny, mesh(fsdp=2, tensor=2, context=2), seq=48)
