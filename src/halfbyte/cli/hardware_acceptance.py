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

from halfbyte import conformance
from halfbyte.devices import lookup, native_training
from halfbyte.launch import visible_gpus
from halfbyte.launch.supervise import ENTRY
from halfbyte.recipe import recipe

HELD, MISSED, NOT_HERE, BY_HAND = "held", "missed", "not possible here", "by hand"
CPUS = 4  # devices that a machine without a GPU shows itself as
STEP = ("llama3-8b", "--layers", "4", "--unroll", "1", "--seq", "8192", "--steps", "5", "--repeats", "2")
TIME_LIMIT = 1800


def device() -> Any:
    """The table's entry of the first device; JAX starts here."""
    return lookup(jax.devices()[0])


@dataclass(frozen=True)
class Outcome:
    """How a line came out, with the figure that says so."""

    outcome: str
    figure: str
    values: Any = None


Check = Callable[[Sequence[str]], Outcome]
"""Given the GPUs, as the driver lists them."""


@dataclass(frozen=True)
class Line:
    """One claim. `check` answers it on a machine of so many `gpus`; without one, `by_hand` is the command for a person
    to run and look at."""

    name: str
    claim: str
    check: Check | None = None
    gpus: int = 0
    by_hand: str = ""

    def answer(self, gpus: Sequence[str]) -> Outcome:
        """What this machine says. An error is an answer too: it is missed, with the error."""
        if self.check is None:
            return Outcome(BY_HAND, self.by_hand)
        if len(gpus) < self.gpus:
            return Outcome(NOT_HERE, f"needs {self.gpus} NVIDIA GPU{'s' * (self.gpus > 1)}, here {len(gpus)}")
        try:
            return self.check(gpus)
        except (RuntimeError, ValueError, OSError, subprocess.SubprocessError) as error:
            last = (str(error).strip().splitlines() or ["without a message"])[-1]
            return Outcome(MISSED, f"{type(error).__name__}: {last[:200]}")


def answers(gpus: Sequence[str]) -> Iterator[tuple[Line, Outcome, float]]:
    """Every line, what it came to, and its seconds."""
    for line in LINES:
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
    command = [*ENTRY, "bench", *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIME_LIMIT)
    if not done.stdout.strip():
        last = (done.stderr.strip().splitlines() or ["nothing was said"])[-1]
        raise RuntimeError(f"halfbyte bench ended with {done.returncode}: {last[:160]}")
    rows: list[dict[str, Any]] = json.loads(done.stdout)["rows"]
    return rows


def mocked_beside_real(gpus: Sequence[str]) -> Outcome:
    """Compute only against whole steps of the same mesh."""
    count = str(len(gpus))
    mesh = (*STEP, "--recipes", "bf16,nvfp4", "--batch", str(2 * len(gpus)), "--mesh", f"fsdp={count}")
    real, mocked = bench_rows(*mesh), bench_rows(*mesh, "--mock-gpus", count)
    ratios = {a["recipe"]: a["milliseconds"] / b["milliseconds"] for a, b in zip(real, mocked, strict=True)}
    told = ", ".join(f"{name} {ratio:.3f}x" for name, ratio in ratios.items())
    held = all(ratio >= 0.98 for ratio in ratios.values())  # 2% is what two runs of one program differ by
    return Outcome(HELD if held else MISSED, f"whole steps take {told} of compute only", ratios)


def flags_overlap(gpus: Sequence[str]) -> Outcome:
    """The recommended flags against fewer collectives at a time and against XLA's own."""
    shape = (*STEP, "--recipes", "bf16,nvfp4", "--batch", str(2 * len(gpus)))
    sets = {name: bench_rows(*shape, "--flags", name) for name in ("recommended", "four", "serial", "none")}
    times: dict[str, dict[str, float]] = {}
    for name, rows in sets.items():
        for row in rows:
            times.setdefault(row["recipe"], {})[name] = row["milliseconds"]
    held = all(each["recommended"] <= 1.02 * min(each.values()) for each in times.values())
    told = "; ".join(
        f"{recipe}: " + ", ".join(f"{name} {ms:.1f} ms" for name, ms in each.items()) for recipe, each in times.items()
    )
    return Outcome(HELD if held else MISSED, told, times)


# In this process


def known_by_name(gpus: Sequence[str]) -> Outcome:
    """Whether the board's name is in the table."""
    known = bool(device().peak)
    return Outcome(HELD if known else MISSED, f"{gpus[0]!r} is {device().name}", gpus[0])


def below_peak(gpus: Sequence[str]) -> Outcome:
    """A large bf16 GEMM stays below the table's peak."""
    peak = device().peak.get("bf16")
    if peak is None:
        return Outcome(NOT_HERE, f"the table knows no peak of {device().name}")
    size, times = 8192, 20
    a = jnp.ones((size, size), jnp.bfloat16)
    product = jax.jit(lambda a: jax.lax.fori_loop(0, times, lambda _, b: jnp.dot(a, b), a))
    jax.block_until_ready(product(a))
    began = time.perf_counter()
    jax.block_until_ready(product(a))
    rate = times * 2 * size**3 / (time.perf_counter() - began)
    told = f"bf16 {rate / 1e12:,.0f} of {peak / 1e12:,.0f} TFLOP/s"
    return Outcome(HELD if 0.3 * peak < rate <= peak else MISSED, told, rate)


def native_gemms(gpus: Sequence[str]) -> Outcome:
    """Native NVFP4 and MXFP8 GEMMs against the carrier, all three directions; NVFP4 ones of experts too."""
    if not native_training(device(), "nvfp4"):
        return Outcome(NOT_HERE, f"{device().name} has no NVFP4 units")
    found: dict[str, float] = {}
    try:
        for name in ("nvfp4", "mxfp8"):
            agreed = conformance.native_gemms_agree(recipe(name))
            found |= {f"{name} {gemm}": value for gemm, value in agreed.items()}
        agreed = conformance.native_experts_agree(recipe("nvfp4"), sides=(512, 256))
        found |= {f"experts' nvfp4 {gemm}": value for gemm, value in agreed.items()}
    except conformance.SelfTestFailed as error:
        return Outcome(MISSED, str(error))
    return Outcome(HELD, ", ".join(f"{name} off by {value:.2g}" for name, value in found.items()), found)


def operand_bits(recipe_name: str) -> Check:
    """Operands of every backend that serves here against the definition, bit for bit."""

    def check(gpus: Sequence[str]) -> Outcome:
        found = conformance.operands_agree(recipe(recipe_name))
        told = ", ".join(f"{name} {'equal' if same else 'DIFFER'}" for name, same in found.items())
        return Outcome(HELD if all(found.values()) else MISSED, f"{told} on {device().name}", found)

    return check


def mesh_codes(gpus: Sequence[str]) -> Outcome:
    """Operands of tensors that are cut over the devices that are here."""
    devices = jax.devices()
    if len(devices) < 2:
        return Outcome(NOT_HERE, "needs two devices, here one")
    cut = devices[: 1 << (len(devices).bit_length() - 1)]
    found = {name: conformance.operands_on_mesh(recipe(name), cut, features=128) for name in ("nvfp4", "fp8")}
    wrong = sum(sum(each.values()) for each in found.values())
    told = f"{wrong} numbers differ on {len(cut)} x {device().name}, nvfp4 and fp8, tokens and features cut"
    return Outcome(HELD if wrong == 0 else MISSED, told, found)


LINES = (
    Line("mesh-mock", "compute only is a lower bound of a real mesh's step", mocked_beside_real, gpus=2),
    Line("mesh-flags", "no set of flags is more than 2% faster than the recommended", flags_overlap, gpus=2),
    Line("device-name", "the board's name is in the device table", known_by_name, gpus=1),
    Line("device-peak", "a large GEMM stays below the table's peak", below_peak, gpus=1),
    Line("native-gemms", "native NVFP4 and MXFP8 GEMMs equal the carrier's", native_gemms),
    Line("kernel-bits", "operands of nvfp4 equal the definition, bit for bit", operand_bits("nvfp4")),
    Line("fp8-bits", "operands of fp8 equal the definition, bit for bit", operand_bits("fp8")),
    Line("mesh-codes", "codes do not depend on the mesh", mesh_codes),
    Line("context-attention", "cuDNN's parts of attention add up", by_hand="pytest tests/ops/test_attention.py"),
    Line("largest-batch", "the largest batches of docs/speed.md fit",
         by_hand="halfbyte bench llama3.2-1b --remat none,quantized --unroll 1 --seq 4096 --largest-batch"),
    Line("kernel-codes", "kernels that write codes, at any width",
         by_hand="python benchmarks/gpu_kernels.py --only codes --out codes.json"),
    Line("mesh-order", "a mesh's step is no slower in the order of the roofline",
         by_hand="halfbyte bench llama3-8b --batch 16 --unroll 1 --remat quantized, and again with --schedule-by xla"),
    Line("experts", "a GPU's experts are those of the CPU", by_hand="pytest tests/ops/test_grouped.py"),
    Line("experts-mesh", "experts train on a mesh of GPUs", by_hand="halfbyte train moe-demo --mesh expert=8"),
    Line("deterministic", "a GPU run repeats itself after kill -9", by_hand="python benchmarks/deterministic.py"),
    Line("overheads", "guards and saving cost little at 1B", by_hand="python benchmarks/overheads.py"),
    Line("faults", "every fault ends as it must", by_hand="make faults && make soak"),
    Line("rank-failures", "NCCL's errors take the same way out", by_hand="docs/faults.md, on several hosts"),
    Line("serving", "vLLM, SGLang and TensorRT-LLM load an export", by_hand="vllm serve out/nvfp4"),
    Line("published-checkpoints", "published checkpoints import", by_hand="halfbyte import FOLDER --out RUN"),
    Line("shared-scales", "what nvfp4_shared_scales costs",
         by_hand="halfbyte bench llama3.2-1b --recipes bf16,nvfp4,nvfp4_shared_scales"),
    Line("league-recipes", "recipes after nvfp4 on a GPU: their bits, what they cost",
         by_hand="pytest tests/formats/test_league.py tests/ops/test_league.py tests/ops/test_remainder.py"),
    Line("halfbyte-kernels", "the kernels of halfbyte on a GPU: their bits, what they cost",
         by_hand="pytest tests/ops/kernels/test_on_gpu.py -k forward_operand"),
    Line("quartet2-kernels", "the kernels of quartet2 on a GPU: their bits, what they cost",
         by_hand="pytest tests/ops/kernels/test_on_gpu.py -k quartet2"),
    Line("plan", "a plan is within its band of a step",
         by_hand="halfbyte plan llama3-8b --device h200 --count 1 --layers 16 --batch 2"),
    Line("dockerfile", "the image builds", by_hand="docker build -f deploy/Dockerfile ."),
    Line("cluster-files", "deploy/train.sbatch and jobset.yaml run", by_hand="sbatch deploy/train.sbatch"),
)  # fmt: skip
