"""What an instruction is for: GEMM, attention, communication, quantize, MLP, optimizer, or other.

What it does comes first (it multiplies, it calls an attention kernel, it communicates), then where it came from: the
lines of ours that it and the instructions fused into it were written on. Our own kernels that do not multiply make
operands: quantize; but for those that norm alone. An update of the optimizer that reads a gradient of the MLP is the
optimizer's.
"""

import re

from .collectives import kind_of
from .gemms import MULTIPLIES, is_attention, is_own_gemm
from .text import Instruction, Program

CATEGORIES = ("gemm", "quantize", "attention", "mlp", "optimizer", "communication", "other")
OWN_KERNEL = re.compile(r"^__gpu\$xla\.gpu\.triton$|^triton_kernel_call$|^mosaic_gpu")
NORM = re.compile(r"/rms_norm(?:_backward)?/")  # and not that which finds maxima of what it norms
CONTAINERS = ("while", "conditional", "call", "async-start", "async-update", "async-done")
ATTENTION = re.compile(r"attention(?!_block\b)")  # the model's attention_block is norms and linears too
ROUNDINGS = "to_bfloat16|pinned|rounded|add_rounded"  # functions of ops/operand.py that bf16 linears call as well
ORIGINS = (
    (
        "quantize",
        re.compile(
            rf"\b(?:formats|kernels)/|ops/operand\.py:\d+:(?!{ROUNDINGS})|ops/(?:weight|passes|backends)\b"
            r"|quantize|hadamard"
        ),
    ),
    ("mlp", re.compile(r"ops/(?:mlp|activation|linear)\b")),
    ("optimizer", re.compile(r"\boptim/|train/(?:step|scaling)\.py")),
)
"""Category and what of an origin tells it, the first that fits. An origin is an operation's name and a source line."""
GEMM_NAME = re.compile(
    r"cublas|blockScaledDot|gemm|matmul|onednn|nvjet|cutlass|xmma|splitK|ynn_fusion|\bdot\b", re.IGNORECASE
)
ATTENTION_NAME = re.compile(r"fmha|flash|attention|sdpa", re.IGNORECASE)
QUANTIZE_NAME = re.compile(r"quantize|maxima|tensor_scale|swiglu|hadamard|unpack", re.IGNORECASE)
COMMUNICATION_NAME = re.compile(r"nccl|^all-|^reduce-scatter|^collective-|nvshmem", re.IGNORECASE)


def category(program: Program, found: Instruction) -> str | None:
    """One of CATEGORIES; None for an instruction that only contains others or that waits for one."""
    if found.opcode in CONTAINERS:
        return None
    if kind_of(found) or kind_of_done(found):
        return "communication"
    inside = [found, *program.inside(found)]
    if ATTENTION.search(found.origin) or any(is_attention(part) for part in inside):
        return "attention"
    dots = [part.origin for part in inside if _multiplies(part)]
    if dots:  # what else is fused into a GEMM may come from anywhere
        return "attention" if ATTENTION.search(" ".join(dots)) else "gemm"
    if OWN_KERNEL.search(found.target):
        return "other" if NORM.search(found.origin) else "quantize"
    name = _by_origin(" ".join(part.origin for part in inside))
    return "optimizer" if name == "mlp" and _by_origin(found.origin) == "optimizer" else name


def _by_origin(origins: str) -> str:
    return next((name for name, pattern in ORIGINS if pattern.search(origins)), "other")


def category_of_name(name: str) -> str:
    """The category of a kernel of which only the name is known, as a library or a compiler gives it."""
    if COMMUNICATION_NAME.search(name):
        return "communication"
    if ATTENTION_NAME.search(name):
        return "attention"
    if QUANTIZE_NAME.search(name):
        return "quantize"
    return "gemm" if GEMM_NAME.search(name) else "other"


def kind_of_done(found: Instruction) -> bool:
    """Whether this waits for a collective."""
    return found.opcode.endswith("-done") and bool(COMMUNICATION_NAME.search(found.opcode))


def _multiplies(part: Instruction) -> bool:
    return part.opcode in MULTIPLIES or is_own_gemm(part) or bool(GEMM_NAME.search(part.target))
