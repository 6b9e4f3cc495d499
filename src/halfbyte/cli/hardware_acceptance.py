"""`halfbyte doctor --accept`: what no hardware at hand could show, asked of the machine that this runs on.

One line for each entry of docs/unverified.md, by the name that stands there. A line is held or missed, with its figure;
not possible here, with what is missing; or for a person to look at, with the command. Lines that run whole steps do so
in processes of their own, before this one takes the cards' memory.
"""

import contextlib
import json
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from halfbyte import ops
from halfbyte.devices import lookup, native_training
from halfbyte.devices.xla_flags import visible_gpus
from halfbyte.distributed.supervisor import RANK_COMMAND
from halfbyte.recipes import recipe

HELD, MISSED, NOT_HERE, BY_HAND = "held", "missed", "not possible here", "by hand"
CPUS = 4  # devices that a machine without a GPU shows itself as
BENCH_ARGUMENTS = ("llama3-8b", "--layers", "4", "--unroll", "1", "--seq", "8192", "--steps", "5", "--repeats", "2")
TIME_LIMIT = 1800


def first_device() -> Any:
    """The table's entry of the first device; JAX starts here."""
    return lookup(jax.devices()[0])


@dataclass(frozen=True)
class CheckOutcome:
    """How a line came out, with the figure that says so."""

    outcome: str
    figure: str
    values: Any = None


Check = Callable[[Sequence[str]], CheckOutcome]
"""Given the GPUs, as the driver lists them."""


@dataclass(frozen=True)
class AcceptanceItem:
    """One claim. `check` answers it on a machine of so many `gpus`; without one, `by_hand` is the command for a person
    to run and look at."""

    name: str
    claim: str
    check: Check | None = None
    gpus: int = 0
    manual_command: str = ""

    def answer(self, gpus: Sequence[str]) -> CheckOutcome:
        """What this machine says. An error is an answer too: it is missed, with the error."""
        if self.check is None:
            return CheckOutcome(BY_HAND, self.manual_command)
        if len(gpus) < self.gpus:
            return CheckOutcome(NOT_HERE, f"needs {self.gpus} NVIDIA GPU{'s' * (self.gpus > 1)}, here {len(gpus)}")
        try:
            return self.check(gpus)
        except (RuntimeError, ValueError, OSError, subprocess.SubprocessError) as error:
            last = (str(error).strip().splitlines() or ["without a message"])[-1]
            return CheckOutcome(MISSED, f"{type(error).__name__}: {last[:200]}")


def run_acceptance(gpus: Sequence[str]) -> Iterator[tuple[AcceptanceItem, CheckOutcome, float]]:
    """Every line, what it came to, and its seconds."""
    for line in ACCEPTANCE_ITEMS:
        began = time.monotonic()
        found = line.answer(gpus)
        yield line, found, time.monotonic() - began


def gpus_here() -> list[str]:
    """The GPUs, found before JAX starts; a machine without one shows itself to JAX as several devices."""
    gpus = visible_gpus()
    if not gpus:
        with contextlib.suppress(RuntimeError):  # if JAX has started, it keeps the devices that it has
            jax.config.update("jax_num_cpu_devices", CPUS)
    return gpus


# Whole steps, in processes of their own


def bench_rows(*arguments: str) -> list[dict[str, Any]]:
    """The rows of `halfbyte bench ARGUMENTS --json`."""
    command = [*RANK_COMMAND, "bench", *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIME_LIMIT)
    if not done.stdout.strip():
        last = (done.stderr.strip().splitlines() or ["nothing was said"])[-1]
        raise RuntimeError(f"halfbyte bench ended with {done.returncode}: {last[:160]}")
    rows: list[dict[str, Any]] = json.loads(done.stdout)["rows"]
    return rows


def check_mock_against_real(gpus: Sequence[str]) -> CheckOutcome:
    """Compute only against whole steps of the same mesh."""
    count = str(len(gpus))
    mesh = (*BENCH_ARGUMENTS, "--recipes", "bf16,nvfp4", "--batch", str(2 * len(gpus)), "--mesh", f"fsdp={count}")
    real, mocked = bench_rows(*mesh), bench_rows(*mesh, "--mock-gpus", count)
    ratios = {a["recipe"]: a["milliseconds"] / b["milliseconds"] for a, b in zip(real, mocked, strict=True)}
    told = ", ".join(f"{name} {ratio:.3f}x" for name, ratio in ratios.items())
    held = all(ratio >= 0.98 for ratio in ratios.values())  # 2% is what two runs of one program differ by
    return CheckOutcome(HELD if held else MISSED, f"whole steps take {told} of compute only", ratios)


def check_overlap_flags(gpus: Sequence[str]) -> CheckOutcome:
    """The recommended flags against fewer collectives at a time and against XLA's own."""
    shape = (*BENCH_ARGUMENTS, "--recipes", "bf16,nvfp4", "--batch", str(2 * len(gpus)))
    sets = {name: bench_rows(*shape, "--flags", name) for name in ("recommended", "four", "serial", "none")}
    times: dict[str, dict[str, float]] = {}
    for name, rows in sets.items():
        for row in rows:
            times.setdefault(row["recipe"], {})[name] = row["milliseconds"]
    held = all(each["recommended"] <= 1.02 * min(each.values()) for each in times.values())
    told = "; ".join(
        f"{recipe}: " + ", ".join(f"{name} {ms:.1f} ms" for name, ms in each.items()) for recipe, each in times.items()
    )
    return CheckOutcome(HELD if held else MISSED, told, times)


# In this process


def check_device_known(gpus: Sequence[str]) -> CheckOutcome:
    """Whether the board's name is in the table."""
    known = bool(first_device().peak)
    return CheckOutcome(HELD if known else MISSED, f"{gpus[0]!r} is {first_device().name}", gpus[0])


def check_below_peak(gpus: Sequence[str]) -> CheckOutcome:
    """A large bf16 GEMM stays below the table's peak."""
    peak = first_device().peak.get("bf16")
    if peak is None:
        return CheckOutcome(NOT_HERE, f"the table knows no peak of {first_device().name}")
    size, times = 8192, 20
    a = jnp.ones((size, size), jnp.bfloat16)
    product = jax.jit(lambda a: jax.lax.fori_loop(0, times, lambda _, b: jnp.dot(a, b), a))
    jax.block_until_ready(product(a))
    began = time.perf_counter()
    jax.block_until_ready(product(a))
    rate = times * 2 * size**3 / (time.perf_counter() - began)
    told = f"bf16 {rate / 1e12:,.0f} of {peak / 1e12:,.0f} TFLOP/s"
    return CheckOutcome(HELD if 0.3 * peak < rate <= peak else MISSED, told, rate)


def accept_native_gemms(gpus: Sequence[str]) -> CheckOutcome:
    """Native NVFP4 and MXFP8 GEMMs against backend `emulated`, all three directions; NVFP4 ones of experts too."""
    if not native_training(first_device(), "nvfp4"):
        return CheckOutcome(NOT_HERE, f"{first_device().name} has no NVFP4 units")
    found: dict[str, float] = {}
    try:
        for name in ("nvfp4", "mxfp8"):
            agreed = ops.compare_native_gemms(recipe(name))
            found |= {f"{name} {gemm}": value for gemm, value in agreed.items()}
        agreed = ops.compare_native_grouped_gemms(recipe("nvfp4"), sides=(512, 256))
        found |= {f"experts' nvfp4 {gemm}": value for gemm, value in agreed.items()}
    except ops.SelfTestFailed as error:
        return CheckOutcome(MISSED, str(error))
    return CheckOutcome(HELD, ", ".join(f"{name} off by {value:.2g}" for name, value in found.items()), found)


def check_operand_bits(recipe_name: str) -> Check:
    """Operands of every backend that serves here against the definition, bit for bit."""

    def check(gpus: Sequence[str]) -> CheckOutcome:
        found = ops.backends_match_reference(recipe(recipe_name))
        told = ", ".join(f"{name} {'equal' if same else 'DIFFER'}" for name, same in found.items())
        return CheckOutcome(HELD if all(found.values()) else MISSED, f"{told} on {first_device().name}", found)

    return check


def check_mesh_operands(gpus: Sequence[str]) -> CheckOutcome:
    """Operands of tensors that are cut over the devices that are here."""
    devices = jax.devices()
    if len(devices) < 2:
        return CheckOutcome(NOT_HERE, "needs two devices, here one")
    cut = devices[: 1 << (len(devices).bit_length() - 1)]
    found = {name: ops.mesh_operand_mismatches(recipe(name), cut, features=128) for name in ("nvfp4", "fp8")}
    wrong = sum(sum(each.values()) for each in found.values())
    told = f"{wrong} numbers differ on {len(cut)} x {first_device().name}, nvfp4 and fp8, tokens and features cut"
    return CheckOutcome(HELD if wrong == 0 else MISSED, told, found)


ACCEPTANCE_ITEMS = (
    AcceptanceItem("mesh-mock", "compute only is a lower bound of a real mesh's step", check_mock_against_real, gpus=2),
    AcceptanceItem("mesh-flags", "no set of flags is more than 2% faster than the recommended",
         check_overlap_flags, gpus=2),
    AcceptanceItem("device-name", "the board's name is in the device table", check_device_known, gpus=1),
    AcceptanceItem("device-peak", "a large GEMM stays below the table's peak", check_below_peak, gpus=1),
    AcceptanceItem("native-gemms", "native NVFP4 and MXFP8 GEMMs equal those of backend emulated", accept_native_gemms),
    AcceptanceItem("kernel-bits", "operands of nvfp4 equal the definition, bit for bit", check_operand_bits("nvfp4")),
    AcceptanceItem("fp8-bits", "operands of fp8 equal the definition, bit for bit", check_operand_bits("fp8")),
    AcceptanceItem("mesh-codes", "codes do not depend on the mesh", check_mesh_operands),
    AcceptanceItem("context-attention", "cuDNN's parts of attention add up",
         manual_command="pytest tests/ops/test_attention.py"),
    AcceptanceItem("largest-batch", "the largest batches of docs/speed.md fit",
         manual_command="halfbyte bench llama3.2-1b --remat none,quantized --unroll 1 --seq 4096 --largest-batch"),
    AcceptanceItem("kernel-codes", "kernels that write codes, at any width",
         manual_command="python benchmarks/gpu_kernels.py --only codes --out codes.json"),
    AcceptanceItem("mesh-order", "a mesh's step is no slower in the order of the roofline",
         manual_command="halfbyte bench llama3-8b --batch 16 --unroll 1 --remat quantized, "
                        "and again with --schedule-by xla"),
    AcceptanceItem("experts", "a GPU's experts are those of the CPU",
         manual_command="pytest tests/ops/test_grouped.py"),
    AcceptanceItem("experts-mesh", "experts train on a mesh of GPUs",
         manual_command="halfbyte train moe-demo --mesh expert=8"),
    AcceptanceItem("deterministic", "a GPU run repeats itself after kill -9",
         manual_command="python benchmarks/deterministic.py"),
    AcceptanceItem("overheads", "guards and saving cost little at 1B", manual_command="python benchmarks/overheads.py"),
    AcceptanceItem("faults", "every fault ends as it must", manual_command="make faults && make soak"),
    AcceptanceItem("rank-failures", "NCCL's errors take the same way out",
         manual_command="docs/faults.md, on several hosts"),
    AcceptanceItem("serving", "vLLM, SGLang and TensorRT-LLM load an export", manual_command="vllm serve out/nvfp4"),
    AcceptanceItem("published-checkpoints", "published checkpoints import",
         manual_command="halfbyte import FOLDER --out RUN"),
    AcceptanceItem("shared-scales", "what nvfp4_shared_scales costs",
         manual_command="halfbyte bench llama3.2-1b --recipes bf16,nvfp4,nvfp4_shared_scales"),
    AcceptanceItem("league-recipes", "recipes after nvfp4 on a GPU: their bits, what they cost",
         manual_command="pytest tests/formats/test_league.py tests/ops/test_league.py tests/ops/test_remainder.py"),
    AcceptanceItem("halfbyte-kernels", "the kernels of halfbyte on a GPU: their bits, what they cost",
         manual_command="pytest tests/ops/kernels/test_on_gpu.py -k forward_operand"),
    AcceptanceItem("quartet2-kernels", "the kernels of quartet2 on a GPU: their bits, what they cost",
         manual_command="pytest tests/ops/kernels/test_on_gpu.py -k quartet2"),
    AcceptanceItem("plan", "a plan is within its band of a step",
         manual_command="halfbyte plan llama3-8b --device h200 --count 1 --layers 16 --batch 2"),
    AcceptanceItem("dockerfile", "the image builds", manual_command="docker build -f deploy/Dockerfile ."),
    AcceptanceItem("cluster-files", "deploy/train.sbatch and jobset.yaml run",
         manual_command="sbatch deploy/train.sbatch"),
)  # fmt: skip
