"""Policies as text. Oracle: the linears that a person would count by hand."""

import pytest

from halfbyte.recipes import policy, read_policy_text, recipe

PATHS = [f"layers/attention/{n}" for n in "qkvo"] + [f"layers/mlp/{n}" for n in ("gate", "up", "down")] + ["head"]
NVFP4, BF16, MXFP8 = recipe("nvfp4"), recipe("bf16"), recipe("mxfp8")


def quantized(text, layers=8, default=NVFP4):
    """{(path, layer): recipe name} of what leaves bf16."""
    resolved = policy(text, default).resolve(PATHS, layers)
    sites = [(path, layer) for path in PATHS[:-1] for layer in range(layers)]
    return {site: resolved.recipe_at(*site).name for site in sites if resolved.recipe_at(*site).quantized}


def test_the_last_rule_that_matches_decides():
    found = quantized("mlp/*=nvfp4; layers[-4:]=bf16")
    assert found == {(f"layers/mlp/{n}", at): "nvfp4" for n in ("gate", "up", "down") for at in range(4)}


def test_names_may_be_joined_by_exceptions():
    found = quantized("all_linear; layers[0]=bf16; layers[-0.25:]/mlp/down=mxfp8")
    assert ("layers/attention/q", 0) not in found and ("layers/attention/q", 7) in found
    assert {at for (path, at), name in found.items() if name == "mxfp8"} == {6, 7}
    assert len(found) == 7 * 7


def test_a_rule_without_a_recipe_takes_the_runs():
    assert set(quantized("attention/*", default=MXFP8).values()) == {"mxfp8"}
    assert set(quantized("*/down").keys()) == {("layers/mlp/down", at) for at in range(8)}


def test_the_last_layer_alone():
    assert set(quantized("layers[-1]")) == {(path, 7) for path in PATHS[:-1]}
    assert {at for _, at in quantized("layers[2:-1]/mlp/up")} == {2, 3, 4, 5, 6}


def test_blends_are_recipes():
    forward_only = recipe("nvfp4+bf16_backward")
    assert forward_only.fprop_x == NVFP4.fprop_x and forward_only.wgrad_dy == BF16.wgrad_dy
    assert recipe(forward_only.name) == forward_only
    assert set(quantized("mlp=nvfp4+bf16_backward").values()) == {"nvfp4+bf16_backward"}


def test_a_backward_pass_alone_has_nothing_to_quantize_once_more():
    whole, backward_only = recipe("quartet2"), recipe("quartet2+bf16_forward")
    assert {whole.dgrad_w.source, whole.wgrad_x.source} == {"requantize_forward"}
    assert {backward_only.dgrad_w.source, backward_only.wgrad_x.source} == {"as_is"}
    assert backward_only.dgrad_dy == whole.dgrad_dy and not backward_only.fprop_x.format.quantized
    assert recipe("quartet2+nvfp4_forward").wgrad_x.source == "requantize_forward"


def test_a_file_may_have_comments(tmp_path):
    file = tmp_path / "policy.txt"
    file.write_text("all_linear   # everything\n\n# but\nlayers[-4:]=bf16;\n")
    assert read_policy_text(f"@{file}") == "all_linear; layers[-4:]=bf16"
    assert read_policy_text("mlp") == "mlp"


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "policy is empty"),
        ("everything", "no policy named 'everything'"),
        ("mlp/*=", "names no recipe"),
        ("mlp/*=nvfp5", "no recipe named 'nvfp5'"),
        ("layers[a:b]=bf16", "a bound is a layer"),
        ("layers[0.5]=bf16", "one layer or START:STOP"),
        ("layers[0:2=bf16", "cannot read rule"),
        ("mlp/* nvfp4", "cannot read rule"),
        ("@nowhere.txt", "no file nowhere.txt"),
        ("nvfp4+bf16_sideways=x", "no policy named|cannot read rule|no recipe"),
    ],
)
def test_what_cannot_be_read_is_said(text, message):
    with pytest.raises(ValueError, match=message):
        policy(read_policy_text(text), NVFP4)


def test_a_rule_that_decides_nothing_is_refused():
    with pytest.raises(ValueError, match="matches nothing"):
        policy("mlp/gaet=nvfp4", NVFP4).resolve(PATHS, 8)
    with pytest.raises(ValueError, match="other rules decide"):
        policy("mlp/down=mxfp8; mlp", NVFP4).resolve(PATHS, 8)
    assert quantized("all_linear; attention/*=bf16") == quantized("mlp")
