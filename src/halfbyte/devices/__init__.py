"""Facts about accelerators, each with its source: one table for MFU, roofline, capability checks and compiler.

`DEVICES` is the table, and `lookup` returns the entry of a JAX device. `TENSOR_CORE_FORMATS` are what tensor cores
multiply; `native_training` and `native_inference` tell which a device has. `target_config`, `topology` and
`pallas_lowering_device` describe a device to XLA and Pallas on a machine without one; `missing_cuda_compiler` checks
for the compiler. `is_known_xla_flag` tests a flag of XLA, `jax_versions` holds the differences between JAX versions,
and `open_energy_meter` reads GPU energy counters.
"""

from typing import TYPE_CHECKING

from halfbyte.devices.capability import (
    NOT_ASKED,
    EnergyMeter,
    cudnn_version,
    distrust_reason,
    native_inference,
    native_training,
    open_energy_meter,
    record_device_verdict,
    target_cudnn,
)
from halfbyte.devices.compile_target import (
    check_cuda_compiler,
    force_cpu_without_gpu,
    missing_cuda_compiler,
    pallas_lowering_device,
    target_config,
    topology,
)
from halfbyte.devices.device_table import DEVICES, TENSOR_CORE_FORMATS, Device, TensorCoreFormat, device_by_name, lookup
from halfbyte.devices.xla_flags import is_known_xla_flag
from halfbyte.renamed import old_names

if not TYPE_CHECKING:
    __getattr__ = old_names(__name__)
