"""Layer policies. Oracle: a lookup of every (path, layer) on its own, without segments; and the paper's own numbers."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfbyte.recipes import Policy, Rule, policy, policy_names, recipe

PATHS = (
    [f"layers/attention/{s}" for s in "qkvo"] + [f"layers/mlp/{s}" for s in ("gate", "up", "down")] + ["embed", "head"]
)
NVFP4, FP8, BF16 = recipe("nvfp4"), recipe("fp8"), recipe("bf16")


def names(recipes):
    return {path: made.name for path, made in recipes.items()}


def test_mlp_is_the_published_scope():
    resolved = policy("mlp", NVFP4).resolve(PATHS, 32)
    (segment,) = resolved.segments
    assert (segment.start, segment.stop) == (0, 32)
    assert {path for path, made in segment.recipes.items() if made == NVFP4} == {p for p in PATHS if "mlp" in p}
    assert names(resolved.non_layer_recipes) == {"embed": "bf16", "head": "bf16"}


def test_all_linear_leaves_embedding_and_head_alone():
    resolved = policy("all_linear", NVFP4).resolve(PATHS, 4)
    assert set(names(resolved.segments[0].recipes).values()) == {"nvfp4"}
    assert set(names(resolved.non_layer_recipes).values()) == {"bf16"}


# 62 blocks: the paper keeps the first 2 and the last 8. The others follow from round(0.13 L).
@pytest.mark.parametrize(("layers", "tail"), [(62, 8), (32, 4), (16, 2), (4, 1)])
def test_paper_keeps_the_first_2_and_the_last_13_percent_in_bf16(layers, tail):
    bounds = [
        (s.start, s.stop, set(names(s.recipes).values()))
        for s in policy("paper", NVFP4).resolve(PATHS, layers).segments
    ]
    assert bounds == [(0, 2, {"bf16"}), (2, layers - tail, {"nvfp4"}), (layers - tail, layers, {"bf16"})]


def test_the_first_match_wins_and_what_no_rule_matches_is_bf16():
    rules = (Rule("layers/mlp/down", FP8), Rule("layers/mlp/*", NVFP4), Rule("head", FP8))
    resolved = Policy("mixed", rules).resolve(PATHS, 2)
    assert resolved.recipe_at("layers/mlp/down", 1) == FP8
    assert resolved.recipe_at("layers/mlp/up", 1) == NVFP4
    assert resolved.recipe_at("layers/attention/q", 0) == BF16
    assert resolved.recipe_at("head") == FP8 and resolved.recipe_at("embed") == BF16


@pytest.mark.parametrize(
    ("rule", "why"),
    [
        (Rule("layers/moe/*", NVFP4), "no linear has such a path"),
        (Rule("layers/mlp/*", NVFP4, layers=(8, 12)), r"its layers \(8, 12\) are none of the model's 4"),
        (Rule("head", NVFP4, layers=(0, 2)), "matches nothing"),
        (Rule("layers/attention/q", NVFP4), "other rules decide every linear that it matches"),
    ],
)
def test_a_rule_that_decides_nothing_is_an_error(rule, why):
    with pytest.raises(ValueError, match=why):
        Policy("idle", (Rule("layers/attention/*", FP8), rule)).resolve(PATHS, 4)


def test_a_run_is_not_left_in_bf16_in_silence():
    exceptions = "mlp; layers[-4:]=bf16"
    assert policy(exceptions, NVFP4).resolve(PATHS, 5).recipe_at("layers/mlp/up", 0) == NVFP4
    with pytest.raises(ValueError, match="leaves nothing to quantize in 4 layers"):
        policy(exceptions, NVFP4).resolve(PATHS, 4)
    assert not policy(exceptions, BF16).resolve(PATHS, 4).recipe_at("layers/mlp/up", 0).quantized
    assert policy(f"{exceptions}; mlp/down=fp8", NVFP4).resolve(PATHS, 4).recipe_at("layers/mlp/down", 0) == FP8


def test_paper_on_a_model_too_small_for_it_is_an_error():
    with pytest.raises(ValueError, match="are none of the model's 2"):
        policy("paper", NVFP4).resolve(PATHS, 2)


def test_bad_rules_and_names():
    with pytest.raises(ValueError, match=r"layers must be \(start, stop\) or None, got 3"):
        Rule("*", NVFP4, layers=3)
    with pytest.raises(ValueError, match=r"a fraction of the layers lies in -1..1, got 1.5"):
        Rule("*", NVFP4, layers=(0, 1.5))
    with pytest.raises(TypeError, match=r"recipe must be a Recipe or a recipe's name, got 4"):
        Rule("*", 4)
    assert Rule("*", "nvfp4") == Rule("*", NVFP4)
    with pytest.raises(ValueError, match=r"no policy named 'everything'; the policies are mlp, all_linear, paper"):
        policy("everything", NVFP4)
    assert policy_names() == ["mlp", "all_linear", "paper", "nemotron3", "experts", "mlp_mxfp8", "mlp_fp8"]


@pytest.mark.parametrize("text, run, attention", [
    ("mlp_mxfp8", "nvfp4", "mxfp8"), ("mlp_fp8", "nvfp4", "fp8"), ("mlp_mxfp8", "mxfp4", "mxfp8"),
    ("mlp_mxfp8", "fp8", "fp8"), ("mlp_mxfp8", "bf16", "bf16"),  # nothing to be higher than
    ("mlp_mxfp8; layers[-1]=bf16", "nvfp4", "mxfp8"),
])  # fmt: skip
def test_attention_is_higher_than_a_4_bit_mlp(text, run, attention):
    resolved = policy(text, run).resolve(["layers/mlp/down", "layers/attention/q"], 4)
    assert resolved.recipe_at("layers/mlp/down", 0).name == run
    assert resolved.recipe_at("layers/attention/q", 0).name == attention
    assert ("bf16" in text) == (resolved.recipe_at("layers/attention/q", 3).name != attention)


BOUNDS = st.one_of(st.none(), st.integers(-6, 6))


@pytest.mark.slow
@given(
    st.integers(1, 8),
    st.lists(st.tuples(st.sampled_from(["layers/mlp/*", "layers/*", "*"]), BOUNDS, BOUNDS), max_size=3),
)
def test_segments_say_the_same_as_a_lookup_layer_by_layer(num_layers, drawn):
    rules = tuple(Rule(pattern, (NVFP4, FP8, recipe("mxfp8"))[i], (a, b)) for i, (pattern, a, b) in enumerate(drawn))
    made = Policy("drawn", rules)
    expected = {}
    for path in (p for p in PATHS if p.startswith("layers/")):
        for layer in range(num_layers):
            fits = [r for r in rules if r.matches(path) and layer in range(num_layers)[slice(*r.layers)]]
            expected[path, layer] = fits[0].recipe if fits else BF16
    used = set(expected.values())
    if any(rule.recipe not in used for rule in rules):
        with pytest.raises(ValueError, match="matches nothing"):
            made.resolve(PATHS, num_layers)
        return
    resolved = made.resolve(PATHS, num_layers)
    assert {(path, layer): resolved.recipe_at(path, layer) for path, layer in expected} == expected
    assert [s.start for s in resolved.segments[1:]] == [s.stop for s in resolved.segments[:-1]]
    assert all(a.recipes != b.recipes for a, b in zip(resolved.segments, resolved.segments[1:], strict=False))


def test_a_resolved_policy_is_hashable_frozen_and_pickles():
    resolved = policy("paper", NVFP4).resolve(PATHS, 32)
    assert hash(resolved) == hash(policy("paper", NVFP4).resolve(PATHS, 32))
    assert pickle.loads(pickle.dumps(resolved)) == resolved
    with pytest.raises(TypeError, match="does not change"):
        resolved.non_layer_recipes["head"] = NVFP4
    assert str(resolved).startswith("layers 0..1: bf16 (attention/q")


def test_fraction_from_the_end_that_rounds_to_zero_is_the_end():
    """The last 1% of 8 layers are none, so `[:-0.01]` is all of them."""
    resolved = Policy("all", (Rule("layers/mlp/*", NVFP4, layers=(0, -0.01)),)).resolve(PATHS, 8)
    (segment,) = resolved.segments
    assert (segment.start, segment.stop) == (0, 8)
    assert NVFP4 in segment.recipes.values()
