"""A device described to the compiler: programs for a Blackwell cluster are compiled on a machine without a GPU.

XLA takes the facts of a GPU as a `GpuTargetConfigProto` in text form, and a topology as partitions x hosts x devices.
What is not in the table goes by capability: limits of the CUDA programming model (CUDA C++ Programming Guide, technical
specifications by compute capability; openxla/xla h200.txtpb and rtx6000pro.txtpb).
"""

import contextlib
from typing import Any

from halfbyte.devices.cuda_compiler import check_cuda_compiler
from halfbyte.devices.lookup import lookup
from halfbyte.devices.table import Device

# The versions the compiled program is for. Block-scaled GEMMs on SM 10.3 and cuDNN attention need cuDNN >= 9.11. The
# target states cuDNN's twice: JAX 0.10 reads `dnn_version_info`, JAX 0.11 the device's own `dnn_version`, without which
# it makes no block-scaled GEMM and says nothing: what should be 4-bit is dequantized.
CUDNN_VERSION = (9, 15, 0)
CUDA_VERSION = (12, 9, 0)

DATACENTER = {"shared": 232_448, "shared_core": 233_472, "threads": 2048}
WORKSTATION = {"shared": 101_376, "shared_core": 131_072, "threads": 1536}


def limits(device: Device) -> dict[str, int]:
    """Bytes of shared memory that a block may have (`shared`) and a core has, and threads of a core."""
    return WORKSTATION if device.capability is not None and device.capability[0] >= 12 else DATACENTER


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


def target_config(device: Device) -> str:
    """The text `GpuTargetConfigProto` of `device`, for compiling without one."""
    facts = ("capability", "sms", "clock_ghz", "l2_bytes", "memory_bytes", "bandwidth")
    missing = [name for name in facts if getattr(device, name) is None]
    if device.platform != "cuda" or device.capability is None or device.bandwidth is None or missing:
        raise ValueError(f"cannot compile for {device.name}: not an NVIDIA GPU of the device table (missing {missing})")
    return _TEMPLATE.format(
        **limits(device),
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


def lowering_for(device: Device) -> contextlib.AbstractContextManager[Any]:
    """Within it, Pallas lowers kernels for `device`: without a GPU, JAX 0.11 asks the mesh of the context for one. That
    mesh has no axes, so that nothing else is changed; a mesh that is there already is left alone.
    """
    import jax

    if device.platform != "cuda" or not jax.sharding.get_abstract_mesh().empty:
        return contextlib.nullcontext()
    described = jax.sharding.AbstractDevice(device_kind=device.kind, num_cores=device.sms, platform="gpu")
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=described))


def lowering_capability() -> tuple[int, int] | None:
    """Returns the compute capability for which Mosaic GPU lowers kernels now: that of `lowering_for`, else that of this
    machine's GPU, else None.
    """
    import jax

    described = jax.sharding.get_abstract_mesh().abstract_device
    return lookup(described or jax.local_devices()[0]).capability


def topology(device: Device, *, hosts: int, per_host: int) -> Any:
    """A JAX topology of hosts x per_host devices to compile for; `.devices` make a mesh. Needs the extra `plan`."""
    if hosts < 1 or per_host < 1:
        raise ValueError(f"a topology needs at least one host and one device, got hosts={hosts}, per_host={per_host}")
    config = target_config(device)
    check_cuda_compiler()
    from jax.experimental import topologies

    return topologies.get_topology_desc(platform="cuda", target_config=config, topology=f"1x{hosts}x{per_host}")
