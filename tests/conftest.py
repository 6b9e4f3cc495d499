"""Strictness for every test: dtypes never promote by themselves, ranks never broadcast by accident.

Warnings are errors too (`filterwarnings` in pyproject.toml). The CPU shows itself as eight devices, so that meshes are
real; on a GPU machine tests that need several devices take `jax.devices("cpu")`.
"""

import os

# XLA's CPU client blocks a thread in each collective that waits for its peers, and takes as many threads as NPROC says:
# eight devices with two collectives under way would wait for each other for ever on a small machine.
os.environ.setdefault("NPROC", "32")

from halfbyte.devices.platform import load_jax_quietly, settle_platform

if settle_platform(os.environ):
    load_jax_quietly()

from pathlib import Path

import jax
from hypothesis import settings

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_num_cpu_devices", 8)

# Examples are derived from the test itself: a failure on one machine is the same failure on the next.
settings.register_profile("halfbyte", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("halfbyte")


# Mosaic GPU assembles all kernels of a process for the first target that it meets, so files that compile for Blackwell
# run where nothing compiles for Hopper: test_other_targets.py starts a process for each.
BLACKWELL = (
    "bench/test_405b.py",
    "bench/test_operand_traffic.py",
    "ops/test_blackwell.py",
    "program/test_blackwell_program.py",
)


def pytest_generate_tests(metafunc):
    if "blackwell_file" in metafunc.fixturenames:
        metafunc.parametrize("blackwell_file", BLACKWELL)


def pytest_ignore_collect(collection_path, config):
    """Files that compile for Blackwell run in processes of their own, or where they are named."""
    here = Path(__file__).parent
    named = {Path(config.invocation_params.dir, argument.split("::")[0]).resolve() for argument in config.args}
    is_blackwell = collection_path in {here / file for file in BLACKWELL}
    return True if is_blackwell and collection_path not in named else None


def pytest_terminal_summary(terminalreporter):
    """How much of tests/golden was compared, and on which device: the line to quote for a machine."""
    reports = terminalreporter.getreports("passed")
    compared = [value for report in reports for name, value in report.user_properties if name == "golden"]
    if compared:
        device = jax.devices()[0]
        files, arrays = len({file for file, _ in compared}), sum(count for _, count in compared)
        terminalreporter.write_line(
            f"golden: {files} files, {arrays} arrays compared inside jit on {device.platform} ({device.device_kind})"
        )
