"""Oracle: the figures published for Llama 3 8B and 3.1 405B at 8,192 tokens."""

import pytest

from halfbyte import models


@pytest.mark.parametrize("name, flops, mlp", [("llama3-8b", 51.47e9, 0.657), ("llama3.1-405b", 2.524e12, 0.784)])
def test_flops_per_token(name, flops, mlp):
    cfg = models.preset(name)
    assert models.flops_per_token(cfg, 8192) == pytest.approx(flops, rel=2e-4)
    shares = models.flops_by_component(cfg, 8192)
    assert shares["mlp"] / sum(shares.values()) == pytest.approx(mlp, abs=5e-4)


def test_gemm_sites_hold_all_flops_but_attention():
    cfg = models.preset("llama3-8b")
    sites = models.linear_shapes(cfg, 2, 8192)
    assert [site.path for site in sites] == list(models.linear_sites(cfg))
    assert sites[0] == models.LinearShape("layers/attention/q", 32, 16384, 4096, 4096)
    linear = models.flops_per_token(cfg, 8192) - models.flops_by_component(cfg, 8192)["attention"]
    assert sum(site.flops for site in sites) == pytest.approx(2 * 8192 * linear)
