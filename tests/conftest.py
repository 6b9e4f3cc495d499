"""Strictness for every test: dtypes never promote by themselves, ranks never broadcast by accident.

Warnings that our code causes are errors too (`filterwarnings` in pyproject.toml). The CPU shows itself as eight
devices, so that meshes are real; on a GPU machine tests that need several devices take `jax.devices("cpu")`.
"""

import gc
import os
import signal
import sys
import time
from pathlib import Path

# XLA's CPU client blocks a thread in each collective that waits for its peers, and takes as many threads as NPROC says:
# eight devices with two collectives under way would wait for each other for ever on a small machine.
os.environ.setdefault("NPROC", "32")

# Where Python was told to keep no bytecode (an image's usual setting), each worker and each command that a test starts
# would compile every module that it imports: half of what a start costs. It is kept beside pytest's own cache then.
if os.environ.pop("PYTHONDONTWRITEBYTECODE", ""):
    kept = os.environ.setdefault("PYTHONPYCACHEPREFIX", str(Path(__file__).parents[1] / ".pytest_cache" / "bytecode"))
    sys.dont_write_bytecode, sys.pycache_prefix = False, kept

# A shell starts what it puts into the background with Ctrl-C ignored, and so would every command of a test be.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

from halfbyte.devices.compile_target import (
    force_cpu_without_gpu,
    has_compiler_without_gpu,
    import_jax_silencing_stderr,
    missing_cuda_compiler,
)

if has_compiler_without_gpu():
    force_cpu_without_gpu(os.environ)
    import_jax_silencing_stderr()

import jax
import pytest
from hypothesis import HealthCheck, settings
from jax.experimental.compilation_cache import compilation_cache

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_num_cpu_devices", 8)

# Examples are derived from the test itself: a failure on one machine is the same failure on the next, and none comes of
# how long a machine takes to draw them.
settings.register_profile(
    "halfbyte", deadline=None, derandomize=True, max_examples=50, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("halfbyte")


@pytest.fixture(scope="session")
def until():
    """until(condition): waits for what another thread does. The limit ends a hang; no busy machine reaches it."""

    def wait(condition):
        for _ in range(60_000):
            if condition():
                return
            time.sleep(0.01)
        raise AssertionError("it has not happened in ten minutes")

    return wait


@pytest.fixture(autouse=True)
def signals_as_before():
    """A command that a test calls may end with its own handlers in place, since its process would end with it."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


@pytest.fixture
def quick_code():
    """Programs as they are, without the optimizations that only make them fast. `quick_compiles` has a cache, too."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(scope="session")
def compiled_programs(tmp_path_factory, request):
    """Folder of what was compiled in this test run, by any of its workers."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if hasattr(request.config, "workerinput") else own) / "compiled"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def quick_compiles(compiled_programs):
    """For rooms that train small models again and again: without the optimizations that only make programs fast, and
    what another test of the run has compiled is loaded. Not for tests of bits under default flags, of program texts, or
    of compiling itself. A process looks for a cache when it first compiles, so it is told to look again."""
    jax.config.update("jax_disable_most_optimizations", True)
    use_cache(str(compiled_programs))
    yield
    use_cache(None)
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def float32_products():
    """On a GPU float32 GEMMs are TF32 unless asked; comparisons to the last digits need real ones."""
    with jax.default_matmul_precision("float32"):
        yield


def use_cache(folder):
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    compilation_cache.reset_cache()


@pytest.fixture(scope="module")
def one_cache(quick_compiles):
    """For studies, whose runs keep what they compile in a directory of the study: here the test run's serves them all.
    Gives the directories that were named instead."""
    named = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("halfbyte.train.run.enable_compile_cache", lambda directory: named.append(Path(directory)))
        yield named


@pytest.fixture(scope="module")
def one_device():
    """For runs that are not about meshes. A run over eight costs half as much again: replicas save in slices, each
    with a program of its own. Gives all there are, for the one test of a room that is."""
    seen = {name: getattr(jax, name) for name in ("devices", "local_devices")}
    with pytest.MonkeyPatch.context() as patch:
        for name, all_of in seen.items():
            patch.setattr(jax, name, lambda *given, all_of=all_of, **named: all_of(*given, **named)[:1])
        patch.setattr(jax, "device_count", lambda: 1)
        patch.setattr(jax, "local_device_count", lambda: 1)
        yield seen["devices"]("cpu")


@pytest.fixture(scope="session")
def quick_environment(compiled_programs):
    """The same for commands that a test starts: variables to add to their environment."""
    return {
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "JAX_COMPILATION_CACHE_DIR": str(compiled_programs),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


def pytest_collection_finish():
    """What is imported by now stays, and tracing makes millions of small objects: look for garbage among those alone,
    and less often. A fifth of the time of a test that traces."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


# Mosaic GPU of JAX 0.11 assembles all kernels of a process for its first target, so files that compile for Blackwell
# run where nothing compiles for Hopper: test_other_targets.py starts a process for each target, with all its files.
BLACKWELL = {
    "gb200": (
        "plan_bench/test_operand_traffic.py",
        "plan_bench/test_own_turn.py",
        "hlo/test_blackwell_program.py",
        "ops/test_blackwell.py",
        "ops/kernels/test_block_scaled_gemms.py",
    ),
    "gb300": (
        "plan_bench/test_405b.py",
        "plan_bench/test_experts_on_blackwell.py",
        "ops/kernels/test_blackwell_codes.py",
        "ops/kernels/test_blackwell_norms.py",
    ),
    "rtx-pro-6000": ("ops/test_workstation.py",),
    "spark": ("ops/test_spark.py",),
}


def pytest_generate_tests(metafunc):
    if "blackwell_files" in metafunc.fixturenames:
        metafunc.parametrize("blackwell_files", BLACKWELL.values(), ids=BLACKWELL)


def named_paths(config):
    paths = (Path(config.invocation_params.dir, argument.split("::")[0]) for argument in config.args)
    return {path.resolve() for path in paths}


def pytest_configure(config):
    """A Blackwell's file beside another target's would fail wherever that one happened to compile first."""
    here, named = Path(__file__).parent, named_paths(config)
    for target, files in BLACKWELL.items():
        own = {here / file for file in files}
        if named & own and named - own:
            beside = ", ".join(sorted(path.name for path in named & own))
            raise pytest.UsageError(f"{beside}: compiled for {target}, in a process without other files (conftest.py)")


def pytest_ignore_collect(collection_path, config):
    """Files that compile for Blackwell run in processes of their own, or where they are named."""
    here = Path(__file__).parent
    is_blackwell = collection_path in {here / file for files in BLACKWELL.values() for file in files}
    return True if is_blackwell and collection_path not in named_paths(config) else None


# One test of these files takes a minute or more: begun first, so that no worker is left alone with one at the end.
LONGEST = {
    "test_other_targets.py", "test_processes.py", "test_exercises.py", "test_family.py", "test_subset.py",
    "test_resume.py", "test_guard.py", "test_own_recipe.py", "test_published.py", "test_command.py",
    "test_remainder.py", "test_radar_experts.py", "test_inspection.py", "test_experts_mesh.py", "test_loop.py",
    "test_digests.py",
}  # fmt: skip


@pytest.hookimpl(tryfirst=True)  # before pytest evaluates -m
def pytest_collection_modifyitems(items):
    keep_fast_cases(items)
    items.sort(key=lambda item: item.path.name not in LONGEST)
    if missing_cuda_compiler() is not None:
        missing = pytest.mark.skip(reason="needs the CUDA compiler: pip install 'halfbyte[plan]'")
        for item in items:
            if item.get_closest_marker("cuda_compiler"):
                item.add_marker(missing)


def keep_fast_cases(items):
    """Removes the mark `slow(fast_cases=[...])` from the named cases. A name without a case is an error, so that a
    renamed case does not leave the fast tier unnoticed."""
    collected = {}
    for item in items:
        for mark in item.own_markers:
            if mark.name == "slow" and "fast_cases" in mark.kwargs:
                function = item.nodeid.split("[")[0]
                _, named = collected.setdefault(function, (set(), set(mark.kwargs["fast_cases"])))
                collected[function][0].add(item.callspec.id)
                if item.callspec.id in named:
                    item.own_markers.remove(mark)
                break
    for function, (cases, named) in collected.items():
        if len(cases) > 1 and named - cases:  # one case: it was selected by its id
            raise pytest.UsageError(f"{function}: slow(fast_cases={sorted(named - cases)}) names no case of this test")


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
