"""A parameter says what it is: nothing is concluded from its dims. Oracle: a family whose layers have a router and
experts beside the MLP."""

import dataclasses

import jax
import pytest

from halfbyte import models
from halfbyte.hf.tensor_layouts import hf_tensors
from halfbyte.models import ParamSpec, params
from halfbyte.recipes import Policy, Rule, recipe

CFG = models.preset("demo")
ROUTER = ParamSpec((CFG.layers, CFG.embed, 16), ("layers", "embed", None), 1.0)
EXPERTS = ParamSpec((CFG.layers, 16, CFG.embed, 64), ("layers", None, "embed", "mlp"), 1.0)
STARTS = {
    "init": lambda: jax.eval_shape(lambda key: models.init(CFG, key), jax.random.key(0)),
    "policy": lambda: models.linear_sites(CFG),
    "flops": lambda: models.linear_shapes(CFG, 1, 64),
    "decay": lambda: models.weight_decay_mask(CFG),
    "abstract": lambda: models.abstract_params(CFG),
    "export": lambda: hf_tensors(CFG),
    "mesh": lambda: models.check_mesh(CFG, None),
}


@pytest.fixture
def with_leaves(monkeypatch):
    plain = params.param_specs

    def add(**leaves):
        def specs(cfg):
            found = plain(cfg)
            return found | {"layers": found["layers"] | {"moe": leaves}}

        monkeypatch.setattr(params, "param_specs", specs)

    return add


def test_leaf_without_a_kind_is_refused_by_name(with_leaves):
    with_leaves(router=ROUTER)
    for start in STARTS.values():
        with pytest.raises(ValueError, match="layers/moe/router"):
            start()


def test_kind_of_other_dims_or_unknown_is_refused(with_leaves):
    for kind in ("linear", "router", "expert"):
        with_leaves(gate=dataclasses.replace(EXPERTS, kind=kind))
        with pytest.raises(ValueError, match="layers/moe/gate"):
            models.linear_sites(CFG)


def test_router_is_no_linear_and_experts_are(with_leaves):
    with_leaves(
        router=dataclasses.replace(ROUTER, kind="router"),
        gate=dataclasses.replace(EXPERTS, kind="experts", active_experts=2),
    )
    listed = models.linear_sites(CFG)
    assert [path for path in listed if "moe" in path] == ["layers/moe/gate"]
    chosen = Policy("all", (Rule("layers/*", recipe("nvfp4")),)).resolve(listed, CFG.layers).segments[0].recipes
    assert chosen["layers/moe/gate"].name == "nvfp4" and "layers/moe/router" not in chosen
    counted = next(site for site in models.linear_shapes(CFG, 1, 64) if site.path == "layers/moe/gate")
    assert (counted.count, counted.tokens, counted.k, counted.n) == (CFG.layers, 128, CFG.embed, 64)
    assert len([site for site in hf_tensors(CFG) if site.path == "layers/moe/gate"]) == CFG.layers * 16
