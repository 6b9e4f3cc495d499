"""Facts about accelerators, each with its source: one table for MFU, roofline, capability gate and compiler.

`DEVICES` is the table, `lookup` finds the entry of a JAX device, `UNITS` are what tensor cores multiply with,
`native_training` and `native_inference` say which of them a device has, `target_config`, `topology` and `lowering_for`
describe it to XLA and to Pallas on a machine that does not have one, `missing_cuda_compiler` finds what that lacks,
`known_to_xla` says whether XLA has a flag, `jax_versions` knows what differs between versions of JAX, `energy` reads
what a GPU draws.
"""

from halfbyte.devices.capability import NOT_ASKED, doubt, native_inference, native_training, settle
from halfbyte.devices.cuda_compiler import check_cuda_compiler, missing_cuda_compiler
from halfbyte.devices.cudnn import cudnn_version, target_cudnn
from halfbyte.devices.energy import Energy, energy
from halfbyte.devices.lookup import lookup
from halfbyte.devices.platform import settle_platform
from halfbyte.devices.table import DEVICES, Device, device
from halfbyte.devices.target import lowering_for, target_config, topology
from halfbyte.devices.units import UNITS, Unit
from halfbyte.devices.xla import known_to_xla
