"""Stand-ins for modules. Oracle: the import statement that each replaces."""

import subprocess
import sys
from importlib import import_module

import pytest

from halfbyte.io.lazy_import import lazy_module


def test_lazy_module_has_the_attributes_of_the_module():
    modules = {"json": "loads", "os.path": "join", "optax": "chain", "orbax.checkpoint.v1": "training",
               "jax.experimental.pallas.triton": "CompilerParams"}  # fmt: skip
    for name, attribute in modules.items():
        package, _, last = name.rpartition(".")
        module = getattr(import_module(package), last) if last == "v1" else import_module(name)
        assert getattr(lazy_module(name), attribute) is getattr(module, attribute), name


@pytest.mark.slow
def test_nothing_slow_is_imported_for_the_help_of_train():
    slow = "'optax', 'orbax.checkpoint', 'jax.experimental.mosaic.gpu', 'torch', 'grain'"
    listed = f"repr([name for name in ({slow}) if name in sys.modules])"
    code = f"import sys; from halfbyte.cli.main import main; main(['train', '--help']); sys.exit({listed})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.strip().endswith("[]"), done.stderr[-500:]
