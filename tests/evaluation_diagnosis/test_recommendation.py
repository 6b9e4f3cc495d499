"""The shortest policy. Oracle: by hand, and the policy itself, resolved."""

import itertools

import pytest

from halfbyte.evaluation.inspection import minimal_rules, recommend_policy
from halfbyte.recipes import policy, recipe

KINDS = [f"attention/{n}" for n in "qkvo"] + [f"mlp/{n}" for n in ("gate", "up", "down")]
EVERYTHING = set(itertools.product(range(6), KINDS))
PATHS = [f"layers/{kind}" for kind in KINDS]


@pytest.mark.parametrize(
    "short, rules",
    [
        (set(), []),
        ({(2, "mlp/down")}, ["layers[2]/mlp/down"]),
        ({(at, "mlp/down") for at in range(6)}, ["mlp/down"]),
        ({(at, kind) for at in (4, 5) for kind in KINDS}, ["layers[4:6]"]),
        ({(at, f"mlp/{n}") for at in (1, 2) for n in ("gate", "up", "down")}, ["layers[1:3]/mlp/*"]),
        ({(at, kind) for at in (4, 5) for kind in KINDS} | {(0, "mlp/down")}, ["layers[4:6]", "layers[0]/mlp/down"]),
    ],
)
def test_the_shortest_rules(short, rules):
    assert minimal_rules(short, EVERYTHING) == rules


def test_the_recommended_policy_keeps_exactly_what_falls_short():
    snr = {site: 9.0 if site in {(5, "mlp/down"), (0, "attention/q")} else 15.0 for site in EVERYTHING}
    text = recommend_policy(snr, EVERYTHING, wanted=12.0, policy="all_linear")
    resolved = policy(text, recipe("nvfp4")).resolve(PATHS, 6)
    plain = {(at, kind) for at, kind in EVERYTHING if not resolved.recipe_at(f"layers/{kind}", at).quantized}
    assert plain == {(5, "mlp/down"), (0, "attention/q")}
    assert recommend_policy(snr, EVERYTHING, wanted=5.0, policy="all_linear") == "all_linear"
    assert recommend_policy(snr, EVERYTHING, wanted=50.0, policy="all_linear") == "*=bf16"
    assert recommend_policy(snr, {(5, "mlp/down"), (4, "mlp/down")}, wanted=12.0, policy="x") == "x; layers[5]=bf16"


def test_what_is_not_finite_falls_short():
    assert recommend_policy({(0, "mlp/up"): float("nan"), (0, "mlp/down"): 20.0}, {(0, "mlp/up"), (0, "mlp/down")},
                     wanted=1.0, policy="mlp") == "mlp; mlp/up=bf16"  # fmt: skip
