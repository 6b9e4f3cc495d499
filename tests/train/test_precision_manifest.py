"""Oracle: ANCHORS (65.7% of Llama 3 8B's FLOPs and 78.4% of 405B's are in the MLP at 8192), and the device table."""

import dataclasses
from types import SimpleNamespace

import pytest
from rich.console import Console

from halfbyte.api import precision_plan
from halfbyte.devices import device_by_name
from halfbyte.models import linear_shapes
from halfbyte.ops.activation import SILU
from halfbyte.recipes import GEMM_ROLES, recipe
from halfbyte.train import (
    PrecisionConfig,
    build_precision_manifest,
    manifest_table,
    phases,
    run_mesh,
    session,
)
from halfbyte.train.manifest_entries import backend_summary, manifest_caption, pass_summary
from halfbyte.train.precision_manifest import step_shapes
from halfbyte.train.run_presets import run_config


def manifest_of(name, where, **changes):
    config = dataclasses.replace(run_config(name), **changes)
    (phase, *_) = phases(config)
    return build_precision_manifest(
        config, phase.resolved(config), phase.recipe, seq=config.seq, device=device_by_name(where)
    )


@pytest.mark.parametrize("name, share", [("llama3-8b", 0.657), ("llama3.1-405b", 0.784)])
def test_share_in_4_bits_is_that_of_the_mlp(name, share):
    manifest = manifest_of(name, "gb300")
    assert manifest.share_4bit == pytest.approx(share, abs=5e-4)
    assert manifest.share_by_multiplier["nvfp4"] == pytest.approx(share, abs=5e-4)
    assert sum(manifest.share_by_multiplier.values()) == pytest.approx(1.0)


def test_native_on_blackwell_emulated_on_hopper():
    native = {site.path: site for site in manifest_of("llama3-8b", "gb300").sites}
    emulated = {site.path: site for site in manifest_of("llama3-8b", "h200").sites}
    for path in ("layers/mlp/gate", "layers/mlp/up", "layers/mlp/down"):
        assert {gemm.execution for gemm in native[path].gemms.values()} == {"native"}
        assert {gemm.execution for gemm in emulated[path].gemms.values()} == {"emulated"}
        assert {gemm.runs_in for gemm in emulated[path].gemms.values()} == {"bf16"}
    for path in ("layers/attention/q", "head"):
        assert {gemm.execution for gemm in native[path].gemms.values()} == {"plain"}


def site_of(manifest, path):
    return next(site for site in manifest.sites if site.path == path)


def test_two_term_operand_is_in_the_manifest():
    site = site_of(manifest_of("llama3-8b", "h200", recipe="halfbyte"), "layers/mlp/up")
    assert {gemm for gemm, found in site.gemms.items() if "leaves over" in found.left} == {"fprop"}


def test_run_without_a_mesh_is_described_on_its_default():
    """fsdp over all devices, which cuts weights where they rest, here over the eight of the test run."""
    config = run_config("llama3-8b")
    site = linear_shapes(config.model, config.batch, config.seq)[0]
    resolved = phases(config)[0].resolved(config)
    default, named = (
        step_shapes(dataclasses.replace(config, mesh=mesh), resolved, seq=config.seq, device=device_by_name("h200"))
        .plan(site, recipe("nvfp4"))
        .problem
        for mesh in ("", f"fsdp={run_mesh(config).size}")
    )
    assert default == named and max(named.weight_shards) == 8


@pytest.mark.parametrize("where", ["h200", "gb300"])
def test_norms_name_their_backend_and_the_reason(where):
    one = {"mesh": "fsdp=1", "remat": "none", "batch": 4}
    unrolled = ({"unroll": 0}, {"unroll": 0, "mesh": "fsdp=4,tensor=2"}, {"unroll": 0, **one})
    for changes in (*unrolled, {"mesh": "fsdp=8", "remat": "none"}, one):
        assert manifest_of("llama3-8b", where, **changes).norms == "kernels", changes
    looped, wide = manifest_of("llama3-8b", where), manifest_of("llama3.1-405b", where, unroll=0)
    assert looped.norms.startswith("xla: ") and "stacks" in looped.norms
    assert manifest_of("llama3-8b", where, remat="none", unroll=2).norms == looped.norms
    assert "8192" in wide.norms
    assert looped.norms in manifest_caption(looped)
    assert "norms" not in manifest_caption(manifest_of("demo", "cpu"))


def test_operands_of_each_gemm_are_named():
    site = site_of(manifest_of("llama3-8b", "gb300"), "layers/mlp/up")
    assert (site.tokens, site.k, site.n, site.layers) == (32 * 8192, 4096, 14336, (0, 32))
    fprop, dgrad, wgrad = (site.gemms[name] for name in ("fprop", "dgrad", "wgrad"))
    assert (fprop.left, fprop.right) == ("nvfp4 1d rne", "nvfp4 2d rne")
    assert (dgrad.left, dgrad.right) == ("nvfp4 1d stochastic", "nvfp4 2d rne")
    assert (wgrad.left, wgrad.right) == ("nvfp4 1d rne hadamard", "nvfp4 1d stochastic hadamard")


def test_fp8_runs_in_fp8_on_hopper():
    manifest = manifest_of("llama3-8b", "h200", recipe="fp8", policy="all_linear")
    assert manifest.share_4bit == 0
    assert manifest.share_by_multiplier["fp8"] > 0.75
    peak = device_by_name("h200").peak
    assert peak["bf16"] < manifest.peak(device_by_name("h200")) < peak["fp8"]
    assert manifest_of("demo", "cpu").peak(device_by_name("cpu")) is None


def test_policy_paper_splits_layers():
    manifest = manifest_of("llama3.1-405b", "gb300", policy="paper")
    spans = [(site.layers, site.recipe) for site in manifest.sites if site.path == "layers/attention/o"]
    assert spans == [((0, 2), "bf16"), ((2, 110), "nvfp4"), ((110, 126), "bf16")]


def test_unsupported_backend_is_refused_by_path():
    with pytest.raises(ValueError, match=r"layers/mlp/gate.*native"):
        manifest_of("demo", "cpu", precision=PrecisionConfig(backend="native"))


def test_gemms_and_passes_by_xla_are_named():
    """On an H200 the demo's sizes are too small for the GEMM kernel in two of three; on a mesh XLA makes weights."""
    gate = site_of(manifest_of("demo", "h200"), "layers/mlp/gate")
    left = [name for name, gemm in gate.gemms.items() if gemm.multiplied_by == "xla"]
    assert backend_summary(gate.backend, gate.gemms) == f"fused; {' '.join(left)} by xla" and left
    assert pass_summary(gate.gemms) == "fused"
    mixed = {
        name: dataclasses.replace(gemm, made_by=("fused", "xla")) if name == "dgrad" else gemm
        for name, gemm in gate.gemms.items()
    }
    assert pass_summary(mixed) == "fprop wgrad: fused; dgrad: fused+xla"


def test_table_fits_80_columns_and_names_a_backend_once(capsys):
    Console(width=80).print(manifest_table(manifest_of("llama3.1-405b", "gb300")))
    out = capsys.readouterr().out
    assert "78.4% of FLOPs in 4 bits" in out and "…" not in out
    assert max(map(len, out.splitlines())) <= 80
    Console(width=80).print(manifest_table(manifest_of("demo", "cpu")))  # `emulated`: how it runs, and its backend
    out = capsys.readouterr().out
    assert "emulated" in out and "emulated (emulated)" not in out
    Console(width=80).print(manifest_table(manifest_of("llama3-8b", "h200")))
    assert "emulated (fused" in capsys.readouterr().out


def test_selftest_compares_native_linears_by_recipe(monkeypatch):
    """A policy may have two native recipes; neither the first of them nor the run's stands for the other."""
    config = dataclasses.replace(run_config("llama3-8b"), policy="mlp; attention/*=mxfp8; layers[-1]/mlp/*=nvfp4_no_sr")
    manifest, asked, said = manifest_of("llama3-8b", "gb200", policy=config.policy), [], []

    def agree(sites):
        asked.extend(sites)
        return {path: dict.fromkeys(GEMM_ROLES, 0.0) for path, _, _ in sites}

    monkeypatch.setattr(session, "compare_native_linears", agree)
    started = SimpleNamespace(config=config, preflight=SimpleNamespace(manifests=[manifest]), say=said.append)
    session.selftest_native_gemms(started)
    recipes = {path: recipe.name for path, recipe, _ in asked}
    sizes = {site.path: site.on_device for site in manifest.sites}
    assert all(size == sizes[path.split(",")[0]] for path, _, size in asked)
    assert recipes == {
        **{f"layers/attention/{name}, layers 0 to 31": "mxfp8" for name in "qkvo"},
        **{f"layers/mlp/{name}, layers 0 to 30": "nvfp4" for name in ("gate", "up", "down")},
        **{f"layers/mlp/{name}, layers 31 to 31": "nvfp4_no_sr" for name in ("gate", "up", "down")},
    }
    assert "native mxfp8, nvfp4, nvfp4_no_sr GEMMs" in said[0]


def test_selftest_compares_native_experts_by_size(monkeypatch):
    """Where a kernel serves; `emulated` by name is the loop of tiles."""
    config = run_config("qwen3-30b-a3b")
    manifest, said, asked = manifest_of("qwen3-30b-a3b", "gb300", policy=config.policy), [], []
    sites = {site.path: site for site in manifest.sites if "expert_" in site.path}
    assert len(sites) == 3 and {site.backend for site in sites.values()} == {"tiles"}
    gemms = [gemm for site in sites.values() for gemm in site.gemms.values()]
    assert {(gemm.multiplied_by, gemm.made_by, gemm.runs_in) for gemm in gemms} == {
        ("native", ("native", "native"), "nvfp4")
    }

    def agree(recipe, *, sides, site):
        asked.append((recipe.name, sides, site.split(",")[0].rpartition("_")[2]))
        return dict.fromkeys(GEMM_ROLES, 0.0)

    monkeypatch.setattr(session, "compare_native_grouped_gemms", agree)
    started = SimpleNamespace(config=config, preflight=SimpleNamespace(manifests=[manifest]), say=said.append)
    session.selftest_native_gemms(started)
    assert asked == [("nvfp4", (2048, 768), "up"), ("nvfp4", (768, 2048), "down")]  # gate is as up is
    assert said[0].startswith("comparing") and len(said) == 2  # before a program that has never run anywhere
    assert "native nvfp4 GEMMs of experts against backend emulated passed" in said[1]


@pytest.mark.parametrize(
    "device, backend, recipe, passed",
    [
        ("gb300", "emulated", "nvfp4", None), ("gb300", "auto", "mxfp8", "NVFP4 kernels"),
        ("h200", "auto", "nvfp4", None), ("h200", "auto", "fp8", None),
    ],
)  # fmt: skip
def test_experts_without_a_native_kernel_say_why(device, backend, recipe, passed):
    """Kernels of Hopper multiply carriers of fp8 too, though the card has its unit."""
    config = run_config("qwen3-30b-a3b")
    precision = PrecisionConfig(backend=backend)
    manifest = manifest_of("qwen3-30b-a3b", device, policy=config.policy, recipe=recipe, precision=precision)
    sites = [site for site in manifest.sites if "expert_" in site.path]
    multipliers = {gemm.multiplied_by for site in sites for gemm in site.gemms.values()}
    assert multipliers == {"fused" if device == "h200" else "xla"}
    assert {(gemm.runs_in, gemm.execution) for site in sites for gemm in site.gemms.values()} == {("bf16", "emulated")}
    for site in sites:
        assert site.passed_over == {} if passed is None else passed in site.passed_over["native"]


@pytest.mark.parametrize("remat, asked", [("none", [("nvfp4", "fused"), ("fp8", "fp8")]), ("quantized", [])])
def test_selftest_compares_stacked_residuals_by_recipe(monkeypatch, remat, asked):
    """A segment of one layer has no stack."""
    policy = "mlp; layers[-3:]/mlp/*=fp8; layers[-1]/mlp/*=mxfp8"
    config = dataclasses.replace(run_config("llama3-8b"), policy=policy, unroll=1, remat=remat)
    manifest, found, said = manifest_of("llama3-8b", "h200", policy=config.policy), [], []

    def check(recipes, backend, activation):
        found.extend(dict.fromkeys((recipe.name, backend) for recipe in recipes))
        assert len(recipes) == 3 and activation is SILU
        return True

    monkeypatch.setattr(session, "stacked_residuals_match_reference", check)
    started = SimpleNamespace(config=config, manifest_of=lambda phase: manifest, say=said.append)
    session.check_stacked_residuals_of_loops(started, phases(config))
    assert found == asked
    assert len(said) == len(asked)
    assert all(f"that {backend} keeps" in line for (_, backend), line in zip(asked, said, strict=True))


def test_precision_plan_of_a_name_is_the_manifest_of_its_config():
    config = dataclasses.replace(run_config("llama3-8b"), mesh="fsdp=8")
    assert precision_plan(config, device="b200") == manifest_of("llama3-8b", "b200", mesh="fsdp=8")
    assert {"mlp/down", "14336×4096", "native"} <= set(str(precision_plan(config, device="b200")).split())


def test_precision_plan_at_a_step_has_the_recipe_of_its_phase():
    later = PrecisionConfig(switch_to="bf16", switch_at=0.5)
    config = dataclasses.replace(run_config("demo"), precision=later, mesh="fsdp=1")
    first, last = (precision_plan(config, device="h200", step=step) for step in (0, config.steps - 1))
    assert first.share_4bit > 0.7 and last.share_4bit == 0.0
    with pytest.raises(ValueError, match=f"step must be between 0 and {config.steps - 1}"):
        precision_plan(config, device="h200", step=config.steps)
