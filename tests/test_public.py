"""The public API: every name of `halfbyte` is there, whatever was imported first, and importing it costs no JAX."""

import subprocess
import sys

import pytest

import halfbyte as hb


def test_public_names_resolve():
    assert len(hb._PACKAGE_OF) > 30
    assert [name for name in hb._PACKAGE_OF if getattr(hb, name, None) is None or name not in dir(hb)] == []


def test_unknown_name_is_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'quantise'"):
        _ = hb.quantise


@pytest.mark.slow(fast_cases=["hb.NVFP4"])
@pytest.mark.parametrize(
    "first", ["import halfbyte.recipes", "import halfbyte.recipes as r; r.ROLES", "hb.NVFP4", "pass"]
)
def test_recipe_is_package_and_function_in_any_import_order(first):
    code = f"""
import halfbyte as hb
{first}
assert hb.recipe("nvfp4").name == "nvfp4"
from halfbyte.recipes import recipe
import halfbyte.recipes as room
assert room.recipe is recipe and len(room.ROLES) == 6
assert hb.recipe("mxfp4").name == "mxfp4"
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_importing_halfbyte_does_not_import_jax():
    subprocess.run([sys.executable, "-c", "import sys, halfbyte; sys.exit('jax' in sys.modules)"], check=True)
