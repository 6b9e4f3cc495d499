"""Every public name of version 0.1 works under its old spelling and warns once.

Oracle: `names_0_1.json`, the names that each package of 0.1 exported and the imports in its documents, less what was
removed on purpose (CHANGELOG.md, 0.2.0).
"""

import dataclasses
import importlib
import json
import subprocess
import sys
import warnings
from pathlib import Path

import jax.numpy as jnp
import pytest

import halfbyte as hb
from halfbyte import formats, renamed
from halfbyte.cli.flag_parsing import rename_old_flag
from halfbyte.formats.scale_rules import TwoLevelScale
from halfbyte.io import dataclass_json
from halfbyte.study.arms import Arm
from halfbyte.train import TrainConfig
from halfbyte.train.train_config import GuardConfig, PrecisionConfig

NAMES = json.loads(Path(__file__).with_name("names_0_1.json").read_text())


@pytest.fixture(autouse=True)
def process_without_old_names(monkeypatch):
    """Each test is the first to use an old name; none leaves an old module in its package."""
    monkeypatch.setattr(renamed, "_warned", set())
    yield
    for path, module in list(sys.modules.items()):
        if isinstance(module, renamed._OldModule):
            package, _, name = path.rpartition(".")
            del sys.modules[path]
            if parent := sys.modules.get(package):
                delattr(parent, name)
                if function := vars(module).get("function"):
                    setattr(parent, name, function)


def test_import_of_an_old_module_keeps_the_function_of_its_name():
    """In 0.1 `halfbyte.formats.quantize` was a module and, in its package, a function."""
    before = formats.quantize
    importlib.import_module("halfbyte.formats.quantize")
    x = jnp.ones((1, 16), jnp.bfloat16)
    assert jnp.array_equal(formats.quantize(x, hb.NVFP4).dequantize(), before(x, hb.NVFP4).dequantize())


@pytest.mark.filterwarnings("ignore:.*was renamed:FutureWarning")
def test_names_of_0_1_are_importable():
    modules = {package: importlib.import_module(f"halfbyte.{package}") for package in NAMES}
    lost = [
        (package, name) for package in NAMES for name in NAMES[package] if getattr(modules[package], name, None) is None
    ]
    assert len(NAMES) > 30 and lost == []


def test_old_package_serves_the_new_objects_and_warns_once():
    from halfbyte import hlo, recipes

    old = importlib.import_module("halfbyte.recipe")
    with pytest.warns(FutureWarning, match=r"halfbyte\.recipe\.difference was renamed: use halfbyte\.recipes") as seen:
        found = [old.difference, old.difference]
    assert found == [recipes.recipe_diff] * 2 and len(seen) == 1
    with pytest.warns(FutureWarning, match="parse_hlo"):
        from halfbyte.program import read
    assert read is hlo.parse_hlo


def test_old_package_recipe_is_still_the_public_function():
    code = """
import warnings; warnings.simplefilter("ignore")
import halfbyte as hb
from halfbyte.recipe import step_key
assert hb.recipe("nvfp4").name == "nvfp4" and callable(step_key)
import halfbyte.recipe
assert hb.recipe("mxfp4").name == "mxfp4"
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_unknown_names_of_old_and_new_packages_are_errors():
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        importlib.import_module("halfbyte.formats").nonsense  # noqa: B018
    with pytest.raises(ImportError, match="nonsense"):
        from halfbyte.recipe import nonsense  # noqa: F401
    with pytest.raises(ModuleNotFoundError, match="halfbyte.rooms"):
        importlib.import_module("halfbyte.rooms")


def test_old_field_names_build_and_warn_once():
    for make, new, value in (
        (lambda: GuardConfig(returns=5), "max_rollbacks", 5),
        (lambda: GuardConfig(skips=7), "max_skipped_steps", 7),
        (lambda: GuardConfig(spike=3.0), "spike_threshold", 3.0),
        (lambda: PrecisionConfig(twin=2), "noise_seed", 2),
        (lambda: TwoLevelScale(among=(6.0, 4.0)), "candidate_targets", (6.0, 4.0)),
        (lambda: dataclasses.replace(hb.recipe("fp8_delayed"), history=16), "amax_history_len", 16),
    ):
        with pytest.warns(FutureWarning, match=f"use .*{new}") as seen:
            values = [getattr(make(), new) for _ in range(2)]
        assert values == [value, value] and len(seen) == 1, new


def test_old_attributes_read_and_warn():
    policy = hb.recipe("nvfp4").fprop_x
    with pytest.warns(FutureWarning, match="quantization_group_size"):
        assert policy.run == policy.quantization_group_size
    with pytest.warns(FutureWarning, match="uses_random_bits"):
        assert policy.draws_bytes is policy.uses_random_bits
    with pytest.warns(FutureWarning, match="hardware_unit"):
        assert hb.NVFP4.unit == hb.NVFP4.hardware_unit
    codes = hb.quantize(jnp.ones((16, 16)), hb.NVFP4)
    with pytest.warns(FutureWarning, match="dequantize_blocks"):
        assert (codes.carrier() == codes.dequantize_blocks()).all()


def test_old_config_keys_are_read_and_the_new_ones_written(tmp_path):
    old = {"guard": {"returns": 4, "skips": 9}, "precision": {"twin": 1}}
    fields = dataclass_json.merge_fields(dataclass_json.to_dict(hb.run_config("demo")), old)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = dataclass_json.from_dict(TrainConfig, fields)
        assert dataclass_json.from_file(TrainConfig, fields, tmp_path / "config.json") == config
    assert (config.guard.max_rollbacks, config.guard.max_skipped_steps, config.precision.noise_seed) == (4, 9, 1)
    assert dataclass_json.to_dict(config)["guard"].keys() >= {"max_rollbacks"}
    with pytest.warns(FutureWarning, match=r"mine\.json: returns was renamed: use max_rollbacks"):
        assert dataclass_json.from_file(TrainConfig, fields, tmp_path / "mine.json") == config


def test_old_flags_become_the_new_ones():
    with pytest.warns(FutureWarning, match="--guard.max-rollbacks"):
        assert rename_old_flag("--guard.returns=3") == "--guard.max-rollbacks=3"
    assert rename_old_flag("--guard.max-rollbacks") == "--guard.max-rollbacks"


def test_arms_of_plans_of_0_1_have_the_new_field():
    assert Arm("a-twin", "twin", {"precision.twin": 1}).changes == {"precision.noise_seed": 1}


def test_version_says_when_old_names_go():
    assert hb.__version__ == "0.2.0" and renamed.REMOVED_IN == "0.3.0"


def test_old_parameters_and_values_of_ops_compute_the_same():
    x, w = jnp.ones((16, 16), jnp.bfloat16), jnp.ones((16, 16))
    bf16 = hb.recipe("bf16")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        y = hb.mlp(x, w, w, w, recipe="bf16", mode="fast", weights_kept="master", sharded=False, backend="carrier")
        z = hb.qdot(x, w, recipe=bf16, weights_kept="codes", sharded=True)
    assert jnp.array_equal(y, hb.mlp(x, w, w, w, recipe="bf16", residuals="operands", backend="emulated"))
    assert jnp.array_equal(z, hb.qdot(x, w, recipe=bf16))
    shown = " ".join(str(each.message) for each in warned)
    new = ("mlp(residuals=)", "mlp(weight_residual=)", "mlp(partitioned_by_xla=)", "qdot(weight_residual=)",
           "residuals='operands'", "backend='emulated'")  # fmt: skip
    assert all(name in shown for name in new), shown


def test_old_values_of_fields_become_the_new_ones():
    with pytest.warns(renamed.RenamedWarning, match="source='requantize_forward'"):
        assert hb.OperandPolicy(hb.NVFP4, source="forward").source == "requantize_forward"
    with pytest.warns(renamed.RenamedWarning, match="backend='emulated'"):
        assert PrecisionConfig(backend="carrier").backend == "emulated"
