"""Facts about accelerators, each with its source: one table for MFU, roofline, capability gate and compiler.

`DEVICES` is the table, `lookup` finds the entry of a JAX device, `native_training` and `native_inference` say which
formats its tensor cores take, `target_config` and `topology` describe it to XLA on a machine that does not have one.
"""

from halfbyte.devices.capability import native_inference, native_training
from halfbyte.devices.lookup import lookup
from halfbyte.devices.platform import settle_platform
from halfbyte.devices.table import DEVICES, FORMATS, Device, device
from halfbyte.devices.target import target_config, topology

__all__ = [
    "DEVICES",
    "FORMATS",
    "Device",
    "device",
    "lookup",
    "native_inference",
    "native_training",
    "settle_platform",
    "target_config",
    "topology",
]
