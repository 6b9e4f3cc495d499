"""Compile targets: describes a GPU to XLA and Pallas without one, and finds the CUDA compiler. JAX is imported late.

- Target: XLA reads the properties of a GPU from a text `GpuTargetConfigProto`, and a topology as partitions x hosts x
  devices, so programs for a cluster are compiled without one. Properties that the device table lacks follow from the
  compute capability (CUDA C++ Programming Guide, technical specifications; openxla/xla h200.txtpb, rtx6000pro.txtpb).
- Compiler: the CUDA plugin of JAX and the assembler `ptxas`.
- Platform: a CUDA plugin without a GPU prints pages of tracebacks; `force_cpu_without_gpu` must run before JAX is
  imported.
- Architectures: JAX before 0.12 assembles all Mosaic GPU kernels of a process for the first one. Kernels record what
  they are traced for, and `explained_compile_errors` names cause and remedy.
"""

import contextlib
import ctypes
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from glob import glob
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from halfbyte.devices.device_table import Device, lookup
from halfbyte.devices.jax_versions import mosaic_keeps_first_architecture
from halfbyte.io.install_command import install_command

# Device nodes of an NVIDIA driver: native, Jetson, WSL.
DRIVER_NODES = ("/dev/nvidiactl", "/dev/nvidia[0-9]*", "/dev/nvhost-gpu", "/dev/dxg")
CUDA_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")
OTHER_PLUGINS = ("libtpu", "jax_rocm60_plugin", "jax_rocm7_plugin", "jax_metal", "intel_extension_for_openxla")
CUDA_DATA_DIR = "--xla_gpu_cuda_data_dir="
WHEELS = ("cuda_nvcc", "cu13")  # folders below site-packages/nvidia: nvidia-cuda-nvcc-cu12, nvidia-cuda-nvcc
TOOLKITS = ("/usr/local/cuda", "/opt/cuda")
INSTALL = install_command("plan")

# Versions of the compile target. Block-scaled GEMMs on SM 10.3 and cuDNN attention need cuDNN >= 9.11. The target has
# cuDNN's version twice: JAX 0.10 reads `dnn_version_info`, JAX 0.11 the device's own `dnn_version`, without which it
# silently dequantizes instead of using block-scaled GEMMs.
CUDNN_VERSION = (9, 15, 0)
CUDA_VERSION = (12, 9, 0)

DATACENTER_SMEM = {"shared": 232_448, "shared_core": 233_472, "threads": 2048}
WORKSTATION_SMEM = {"shared": 101_376, "shared_core": 131_072, "threads": 1536}

XLA_MESSAGES = ("Pass pipeline failed", "ptxas")
_TEMPLATE = """\
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {shared_core}
  threads_per_core_limit: {threads}
  core_count: {sms}
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth}
  l2_cache_size: {l2_bytes}
  clock_rate_ghz: {clock_ghz}
  device_memory_size: {memory_bytes}
  shared_memory_per_block_optin: {shared}
  cuda_compute_capability {{
    major: {major}
    minor: {minor}
    feature_extension: ACCELERATED_FEATURES
  }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  dnn_version: "{cudnn[0]}.{cudnn[1]}.{cudnn[2]}"
}}
platform_name: "CUDA"
dnn_version_info {{
  major: {cudnn[0]}
  minor: {cudnn[1]}
}}
runtime_version {{
  major: {cuda[0]}
  minor: {cuda[1]}
  patch: {cuda[2]}
}}
device_description_str: "{description}"
"""
_traced: dict[tuple[int, int], None] = {}  # compute capabilities of this process's Mosaic GPU kernels, in order


def has_nvidia_driver() -> bool:
    """True if this machine shows an NVIDIA device node."""
    return any(glob(node) for node in DRIVER_NODES)


def any_installed(names: tuple[str, ...]) -> bool:
    return any(find_spec(name) is not None for name in names)


def force_cpu_without_gpu(environ: MutableMapping[str, str]) -> str | None:
    """Sets JAX_PLATFORMS=cpu if a CUDA plugin is the only accelerator plugin and there is no GPU.

    Otherwise JAX prints a page of tracebacks about missing CUDA libraries on every start. A JAX_PLATFORMS that is set
    already is never changed. Returns the value that was set, or None.
    """
    if "JAX_PLATFORMS" in environ or not has_compiler_without_gpu() or any_installed(OTHER_PLUGINS):
        return None
    environ["JAX_PLATFORMS"] = "cpu"
    return "cpu"


def has_compiler_without_gpu() -> bool:
    """Returns True if a CUDA plugin is installed and there is no GPU, which its libraries would report on stderr."""
    return any_installed(CUDA_PLUGINS) and not has_nvidia_driver()


def unused_gpu_hint(environ: Mapping[str, str], platform: str) -> str | None:
    """Returns a hint if this machine has an NVIDIA card and JAX runs on the CPU, else None."""
    if platform != "cpu" or not has_nvidia_driver():
        return None
    if not any_installed(CUDA_PLUGINS):
        return (
            "an NVIDIA card is here, and JAX runs on the CPU: its CUDA plugin is not installed; "
            f"{install_command('cuda12')} (or cuda13: docs/install.md), or `make train GPU=1`"
        )
    if "cpu" in environ.get("JAX_PLATFORMS", ""):
        return f"an NVIDIA card is here, and JAX runs on the CPU, as JAX_PLATFORMS={environ['JAX_PLATFORMS']} says"
    return (
        "an NVIDIA card is here, the CUDA plugin is installed, and JAX runs on the CPU all the same: the driver is too "
        "old for it, or the plugin's version is not that of jax (docs/install.md)"
    )


def import_jax_silencing_stderr() -> None:
    """Imports JAX and the CUDA plugin's libraries without their stderr messages about a missing driver."""
    with suppress_stderr():
        import_module("jax")
        for name in filter(find_spec, CUDA_PLUGINS):
            import_module(f"{name}.cuda_plugin_extension")
        for library in _plugin_libraries():
            ctypes.CDLL(library)  # JAX loads it later, then without a message


def _plugin_libraries() -> list[str]:
    """Returns the compiler's shared libraries inside the namespace package of JAX plugins."""
    shared = find_spec("jax_plugins")
    folders = (shared.submodule_search_locations or []) if shared else []
    return [library for folder in folders for library in glob(f"{folder}/xla_cuda*/xla_cuda_plugin.so")]


@contextlib.contextmanager
def suppress_stderr() -> Iterator[None]:
    """Context in which nothing written to file descriptor 2 is shown, even by a C library."""
    saved, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(nowhere)


def missing_cuda_compiler(environ: Mapping[str, str] = os.environ) -> str | None:
    """Returns what compiling for a GPU lacks and how to install it, or None if nothing is missing."""
    if not any_installed(CUDA_PLUGINS):
        return f"compiling for a GPU needs the CUDA compiler plugin; {INSTALL}"
    if find_ptxas(environ) is None:
        return (
            "compiling for a GPU needs the assembler ptxas: there is none in this Python environment, in PATH or in "
            f"{' or '.join(TOOLKITS)}. {INSTALL} brings it (nvidia-cuda-nvcc-cu12), or add the bin folder of a CUDA "
            "toolkit to PATH"
        )
    return None


def check_cuda_compiler() -> None:
    """Raises ValueError if compiling for a GPU lacks something. Without `ptxas`, XLA would crash the process."""
    if missing := missing_cuda_compiler():
        raise ValueError(missing)


def find_ptxas(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Returns the first executable `ptxas` where JAX and XLA look for one, or None."""
    if in_path := shutil.which("ptxas", path=environ.get("PATH", os.defpath)):
        return Path(in_path)
    candidates = (root / "bin" / "ptxas" for root in _cuda_roots(environ))
    return next((file for file in candidates if file.is_file() and os.access(file, os.X_OK)), None)


def _cuda_roots(environ: Mapping[str, str]) -> Iterator[Path]:
    """Yields the folders where JAX (`jax._src.lib.cuda_path`) and XLA (`cuda_root_path.cc`) look for a toolkit."""
    for word in environ.get("XLA_FLAGS", "").split():
        if word.startswith(CUDA_DATA_DIR):
            yield Path(word.removeprefix(CUDA_DATA_DIR))
    if root := environ.get("CUDA_ROOT"):
        yield Path(root)
    nvidia = find_spec("nvidia")
    for folder in (nvidia.submodule_search_locations or []) if nvidia else []:
        yield from (Path(folder) / wheel for wheel in WHEELS)
    yield from map(Path, TOOLKITS)
    yield Path(sys.prefix)  # a conda environment with NVIDIA's packages


def block_limits(device: Device) -> dict[str, int]:
    """Returns bytes of shared memory per block (`shared`) and per core, and threads per core."""
    return WORKSTATION_SMEM if device.capability is not None and device.capability[0] >= 12 else DATACENTER_SMEM


def target_config(device: Device) -> str:
    """Returns the text `GpuTargetConfigProto` of `device`, for compiling without one."""
    facts = ("capability", "sms", "clock_ghz", "l2_bytes", "memory_bytes", "bandwidth")
    missing = [name for name in facts if getattr(device, name) is None]
    if device.platform != "cuda" or device.capability is None or device.bandwidth is None or missing:
        raise ValueError(f"cannot compile for {device.name}: not an NVIDIA GPU of the device table (missing {missing})")
    return _TEMPLATE.format(
        **block_limits(device),
        sms=device.sms,
        bandwidth=round(device.bandwidth),
        l2_bytes=device.l2_bytes,
        clock_ghz=device.clock_ghz,
        memory_bytes=device.memory_bytes,
        major=device.capability[0],
        minor=device.capability[1],
        cudnn=CUDNN_VERSION,
        cuda=CUDA_VERSION,
        description=device.kind,
    )


def pallas_lowering_device(device: Device) -> contextlib.AbstractContextManager[Any]:
    """Returns a context in which Pallas lowers kernels for `device`.

    Without a GPU, JAX 0.11 reads the device from the mesh of the context. The mesh that is set here has no axes, so
    that nothing else changes; a mesh that is set already is kept.
    """
    import jax

    if device.platform != "cuda" or not jax.sharding.get_abstract_mesh().empty:
        return contextlib.nullcontext()
    described = jax.sharding.AbstractDevice(device_kind=device.kind, num_cores=device.sms, platform="gpu")
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=described))


def lowering_device() -> Device:
    """Returns the device that kernels are lowered for now: that of `pallas_lowering_device`, else this machine's."""
    import jax

    return lookup(jax.sharding.get_abstract_mesh().abstract_device or jax.local_devices()[0])


def topology(device: Device, *, hosts: int, per_host: int) -> Any:
    """Returns a JAX topology of hosts x per_host devices to compile for; its `.devices` form a mesh. Extra `plan`."""
    if hosts < 1 or per_host < 1:
        raise ValueError(f"a topology needs at least one host and one device, got hosts={hosts}, per_host={per_host}")
    config = target_config(device)
    check_cuda_compiler()
    from jax.experimental import topologies

    return topologies.get_topology_desc(platform="cuda", target_config=config, topology=f"1x{hosts}x{per_host}")


class TraceFlag:
    """A `jax.make_user_context` that is created when it is first entered: JAX retraces a function where it differs.

    JAX's key of a traced program lists every user context of the process. A context that an import creates while JAX
    traces changes that key, and the program that is being traced is traced and compiled a second time at its next call.
    """

    def __init__(self, default: Any) -> None:
        self._default = default
        self._context: Any = None

    @property
    def value(self) -> Any:
        """The value of the innermost entered context, else the default."""
        return self._default if self._context is None else self._context.value

    def __call__(self, value: Any) -> contextlib.AbstractContextManager[None]:
        """Returns a context manager that sets the value."""
        if self._context is None:
            import jax

            self._context = jax.make_user_context(self._default)
        return self._context(value)


def record_architecture() -> None:
    """Records the compute capability that a Mosaic GPU kernel is traced for. Call it before `plgpu.kernel`."""
    if (capability := lowering_device().capability) is not None:
        _traced.setdefault(capability)


@contextlib.contextmanager
def explained_compile_errors() -> Iterator[None]:
    """Raises RuntimeError from XLA's compile error if this process has kernels for two architectures and JAX assembles
    all of them for the first. Other exceptions pass.
    """
    try:
        yield
    except Exception as error:
        second = lowering_device().capability
        others = [capability for capability in _traced if capability != second]
        is_compile_error = any(message in str(error) for message in XLA_MESSAGES)
        if not (mosaic_keeps_first_architecture() and is_compile_error and second in _traced and others):
            raise
        import jax

        this, first = ("sm_{}{}a".format(*capability) for capability in (second, others[0]))
        raise RuntimeError(
            f"kernels for {this} cannot be compiled in a process that has kernels for {first}: JAX {jax.__version__} "
            f"assembles all Mosaic GPU kernels of a process for the first architecture. Start another process for "
            f"{this}, or install JAX 0.12."
        ) from error
