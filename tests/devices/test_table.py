"""The device table is complete and sourced; unknown devices get no peaks; native formats go by capability.

Oracle: the vendor's rack and board figures, divided by the number of GPUs, and the published capability rule.
"""

from types import SimpleNamespace

import jax
import pytest

from halfbyte.devices import (
    DEVICES,
    NOT_ASKED,
    TENSOR_CORE_FORMATS,
    Device,
    compile_target,
    device_by_name,
    distrust_reason,
    force_cpu_without_gpu,
    lookup,
    native_inference,
    native_training,
)
from halfbyte.devices.capability import is_local_device
from halfbyte.devices.device_table import NETWORK_BANDWIDTH, TDP_WATTS

GPUS = [name for name in DEVICES if name != "cpu"]
FACTS = ("capability", "sms", "clock_ghz", "l2_bytes", "memory_bytes", "bandwidth")
LINKS = ("nvlink_bandwidth", "nvlink_domain")


def jax_device(kind, platform="gpu", **more):
    return SimpleNamespace(device_kind=kind, platform=platform, **more)


def test_table_has_its_devices_and_sourced_facts():
    assert {*GPUS} == {"h100", "h200", "b200", "gb200", "b300", "gb300", "rtx-5090", "rtx-pro-6000", "spark"}
    for name in GPUS:
        entry = DEVICES[name]
        for fact in FACTS + (LINKS if entry.capability < (12, 0) else ()):  # workstations have no NVLink
            assert getattr(entry, fact) is not None and entry.sources[fact], (name, fact)
        assert all(entry.sources[unit] for unit in entry.peak), name


def test_devices_with_nvlink_have_network_and_tdp():
    linked = {name for name, entry in DEVICES.items() if entry.nvlink_domain}
    assert linked == NETWORK_BANDWIDTH.keys() == TDP_WATTS.keys()
    assert TDP_WATTS["b200"] < TDP_WATTS["b300"] < TDP_WATTS["gb300"]  # air, and the newer chip; the rack has water


# Dense PFLOP/s of a whole board or rack, as the vendor states them (sparse figures halved), and its GPUs.
PEAKS = [
    ("h100", "bf16", 989.5e-3, 1), ("h100", "fp8", 1979e-3, 1),
    ("h200", "bf16", 989.5e-3, 1), ("h200", "fp8", 1979e-3, 1),
    ("b200", "bf16", 36 / 2, 8), ("b200", "fp8", 72 / 2, 8), ("b200", "nvfp4", 72, 8),
    ("gb200", "bf16", 360 / 2, 72), ("gb200", "fp8", 720 / 2, 72), ("gb200", "nvfp4", 1440 / 2, 72),
    ("b300", "bf16", 36 / 2, 8), ("b300", "fp8", 72 / 2, 8), ("b300", "nvfp4", 105, 8),
    ("gb300", "bf16", 360 / 2, 72), ("gb300", "fp8", 720 / 2, 72), ("gb300", "nvfp4", 1080, 72),
]  # fmt: skip


def test_peaks_are_the_dense_figures_of_the_vendor():
    for name, unit, pflops, gpus in PEAKS:
        assert DEVICES[name].peak[unit] == pytest.approx(pflops * 1e15 / gpus, rel=1e-12), (name, unit)
    # none of what it emulates
    assert set(DEVICES["h200"].peak) == {"bf16", "fp8"}
    assert dict(DEVICES["cpu"].peak) == {}


BOARDS = [
    ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H200", "h200"), ("NVIDIA H200 141GB HBM3e", "h200"),
    ("NVIDIA B200", "b200"), ("NVIDIA GB200", "gb200"), ("NVIDIA B300 SXM6 AC", "b300"), ("NVIDIA GB300", "gb300"),
    ("NVIDIA GeForce RTX 5090", "rtx-5090"), ("NVIDIA GB10", "spark"),
    ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtx-pro-6000"),
]  # fmt: skip
UNKNOWN = (
    "NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA H200 NVL", "NVIDIA GH200 480GB", "NVIDIA A100-SXM4-80GB",
    "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA B200 MIG 1g.23gb", "NVIDIA GeForce RTX 5080",
)  # fmt: skip


def test_lookup_knows_the_boards_of_the_table_and_no_other():
    assert all(lookup(jax_device(kind)) is DEVICES[name] for kind, name in BOARDS)
    for kind in UNKNOWN:
        entry = lookup(jax_device(kind, compute_capability="12.0", core_count=170))
        assert dict(entry.peak) == {} and "not in the device table" in entry.description, kind
        assert (entry.capability, entry.sms, entry.platform) == ((12, 0), 170, "cuda")


@pytest.mark.parametrize("kind, doubted", [
    ("NVIDIA H200 141GB HBM3e", None), ("NVIDIA GeForce RTX 5080", NOT_ASKED),
    ("NVIDIA RTX PRO 6000 Blackwell Server Edition", NOT_ASKED),
])  # fmt: skip
def test_board_of_any_edition_is_local(monkeypatch, kind, doubted):
    board = jax_device(kind, compute_capability="12.0")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [board])
    assert is_local_device(lookup(board)) and not is_local_device(DEVICES["b200"])
    assert distrust_reason(lookup(board)) == doubted


def test_lookup_of_other_vendors_and_of_the_cpu():
    amd = lookup(jax_device("AMD Instinct MI300X", compute_capability="gfx942"))
    assert (amd.capability, amd.platform, dict(amd.peak)) == (None, "rocm", {})
    assert lookup(jax_device("TPU v5e", platform="tpu")).platform == "tpu"
    assert lookup(jax.devices("cpu")[0]) is DEVICES["cpu"]


def test_nvfp4_trains_on_devices_with_its_units():
    trains = {name: name not in ("h100", "h200", "cpu") for name in DEVICES}
    for unit in ("nvfp4", "mxfp4", "mxfp8"):
        assert {name: native_training(entry, unit) for name, entry in DEVICES.items()} == trains
        assert {name: native_inference(entry, unit) for name, entry in DEVICES.items()} == trains
    thor = lookup(jax_device("NVIDIA Thor", compute_capability="11.0"))
    assert not native_training(thor, "nvfp4")
    assert native_inference(thor, "nvfp4")
    assert native_training(lookup(jax_device("NVIDIA GeForce RTX 5080", compute_capability="12.0")), "nvfp4")
    assert not any(native_training(entry, None) or native_inference(entry, None) for entry in DEVICES.values())


def test_fp8_and_bf16_gates():
    assert native_training(DEVICES["h100"], "fp8")
    assert not native_training(DEVICES["cpu"], "fp8")
    assert all(native_training(entry, "bf16") for entry in DEVICES.values())
    assert not native_training(lookup(jax_device("NVIDIA A100-SXM4-80GB", compute_capability="8.0")), "fp8")


def test_unknown_devices_and_units_are_refused():
    with pytest.raises(ValueError, match="unknown device 'b2000'; did you mean b200"):
        device_by_name("b2000")
    with pytest.raises(ValueError, match="unknown unit 'int3'"):
        native_training(DEVICES["b200"], "int3")
    with pytest.raises(ValueError, match="no source for the peak of \\['fp8'\\]"):
        Device(name="x", description="x", platform="cuda", peak={"fp8": 1.0})
    with pytest.raises(ValueError, match="peak of unknown units"):
        Device(name="x", description="x", platform="cuda", peak={"fp3": 1.0}, sources={"fp3": "nowhere"})


def test_entries_are_values():
    assert device_by_name("H200") is DEVICES["h200"]
    assert len({DEVICES["h200"], DEVICES["h100"], device_by_name("h200")}) == 2
    assert set(DEVICES["gb300"].peak) == set(TENSOR_CORE_FORMATS)
    with pytest.raises(TypeError):
        DEVICES["h200"].peak["nvfp4"] = 1.0


@pytest.mark.parametrize(
    "environ, driver, cuda, other, result",
    [
        ({}, False, True, False, "cpu"),  # the compiler plugin alone, no GPU
        ({}, True, True, False, None),  # a GPU
        ({}, False, False, False, None),  # no plugin: JAX is quiet by itself
        ({}, False, True, True, None),  # another accelerator's plugin decides
        ({"JAX_PLATFORMS": "tpu"}, False, True, False, None),  # the person decides
    ],
)
def test_platform_is_forced_only_without_a_gpu(monkeypatch, environ, driver, cuda, other, result):
    def installed(names):
        return cuda if any("cuda" in name for name in names) else other

    monkeypatch.setattr(compile_target, "has_nvidia_driver", lambda: driver)
    monkeypatch.setattr(compile_target, "any_installed", installed)
    assert force_cpu_without_gpu(environ) == result
    assert environ.get("JAX_PLATFORMS") == (result or environ.get("JAX_PLATFORMS"))
