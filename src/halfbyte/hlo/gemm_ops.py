"""List the GEMMs and fused attention calls of a program, and count their FLOPs.

A GEMM is a `dot` (standalone or inside a fusion: Triton, cuDNN, a CPU library), a cuBLAS call, a block-scaled cuDNN
call, or this package's Mosaic kernel. All FLOPs count, needed or not: 2 m n k, times the batch, times the trip counts
of enclosing loops. A custom call that is in no list below raises HloParseError, because it might multiply.

Fused attention runs two GEMMs of [queries, keys] by head_dim forward (scores, context) and five backward (the
recomputed scores, and the gradients of values, probabilities, queries and keys). A causal kernel does half of each.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from halfbyte.hlo.hlo_text import FUSIONS, HloArray, HloInstruction, HloModule, HloParseError
from halfbyte.hlo.trip_counts import (
    BranchFn,
    TripCountFn,
    WeightedInstruction,
    every_branch,
    execution_counts,
    trip_count,
)

BLOCK_SCALED = "__cudnn$blockScaledDot"
CUBLAS = ("__cublas$gemm", "__cublas$lt$matmul", "__cublas$lt$matmul$f8")
MOSAIC = "mosaic_gpu"
ATTENTION_TARGETS = re.compile(r"fmha|flash", re.IGNORECASE)
NON_GEMM_TARGETS = re.compile(
    r"^__gpu\$xla\.gpu\.triton$|^triton_kernel_call$|cub\$|gpu\.ext\.cub_|TopK|^SPMD|^Sharding$|^annotate_device_placement$|"
    r"^Move|^ducc_fft|^lapack_|^cu_|^cusolver|^AllocateBuffer$|^xla_ffi_|callback|^PadToStatic$|^SliceToDynamic$|"
    r"^AssumeGatherIndicesInBound$|^CreateBuffer$|^Pin$|^Unpin$|^__cudnn\$norm"
)
NARROW_FORMATS = {"f4": "fp4", "f8": "fp8"}
DOT_OPCODES = ("dot", "scaled-dot")
UNSUPPORTED_DOT_OPCODES = (
    "convolution",
    "ragged-dot",
    "triangular-solve",
    "cholesky",
    "fft",
    "dot-start",
    "custom-call-start",
)
FORWARD_GEMMS, BACKWARD_GEMMS = 2, 5


@dataclass(frozen=True)
class HloGemm:
    """One GEMM of a program. `kind` is the library or kernel that runs it; `dtype` is that of `lhs` in the GEMM."""

    instruction: HloInstruction
    kind: str
    dtype: str
    lhs: HloArray
    rhs: HloArray
    result: HloArray
    k: int
    execution_count: int

    @property
    def format(self) -> str:
        """Returns the format that the hardware multiplies: fp4, fp8, or else the dtype of `lhs`."""
        return next((name for start, name in NARROW_FORMATS.items() if self.dtype.startswith(start)), self.dtype)

    @property
    def flops_per_call(self) -> int:
        """Returns the FLOPs of one call."""
        return 2 * self.result.elements * self.k

    @property
    def rows(self) -> int:
        """Returns the buffer rows of this package's grouped GEMM over experts; 0 for any other GEMM."""
        grouped = self.kind == "mosaic" and 3 in (len(self.rhs.dims), len(self.result.dims))
        return self.lhs.dims[_row_dim(self.lhs, self.result)] if grouped else 0

    @property
    def flops(self) -> int:
        """Returns the FLOPs of a step: `flops_per_call` times executions."""
        return self.flops_per_call * self.execution_count

    def __str__(self) -> str:
        return f"{self.kind} {self.lhs} x {self.rhs} -> {self.result}, {self.execution_count} times"


@dataclass(frozen=True)
class AttentionCall:
    """One call of a fused attention kernel. `scores` is the shape [batch, heads, queries, keys]."""

    instruction: HloInstruction
    scores: tuple[int, int, int, int]
    head_dim: int
    causal: bool
    num_gemms: int
    execution_count: int

    @property
    def flops_per_call(self) -> int:
        """Returns the FLOPs of one call, half of the dense ones if causal."""
        batch, heads, queries, keys = self.scores
        dense_flops = self.num_gemms * 2 * batch * heads * queries * keys * self.head_dim
        return dense_flops // 2 if self.causal else dense_flops

    @property
    def flops(self) -> int:
        """Returns the FLOPs of a step: `flops_per_call` times executions."""
        return self.flops_per_call * self.execution_count


def find_gemms(
    program: HloModule, *, turns: TripCountFn = trip_count, branches: BranchFn = every_branch
) -> list[HloGemm]:
    """Returns every GEMM of a step, except those of fused attention.

    Raises HloParseError for unknown calls, for loops around a GEMM whose trip count `turns` does not know, and if
    several `branches` of a conditional multiply.
    """

    def multiplies(instruction: HloInstruction) -> bool:
        return any(True for _ in gemms_of_instruction(program, WeightedInstruction(instruction, 1)))

    launches = execution_counts(program, matters=multiplies, turns=turns, branches=branches)
    return [gemm for launch in launches for gemm in gemms_of_instruction(program, launch)]


def gemms_of_instruction(program: HloModule, launch: WeightedInstruction) -> Iterator[HloGemm]:
    """Yields the GEMMs that one instruction runs; nothing for most instructions."""
    instruction = launch.instruction
    if instruction.opcode in UNSUPPORTED_DOT_OPCODES:
        raise HloParseError(
            f"{instruction.name} is a {instruction.opcode} ({instruction.origin}), whose FLOPs are not counted here"
        )
    if instruction.opcode == "custom-call":
        yield from _of_call(program, launch)
    elif instruction.opcode in DOT_OPCODES:
        yield _of_dot(program, instruction, launch, kind="dot")
    elif instruction.opcode in FUSIONS:
        kind = fusion_kind(instruction)
        for nested in program.nested_instructions(instruction):
            if nested.opcode in DOT_OPCODES:
                yield _of_dot(program, nested, launch, kind=kind)
            elif nested.opcode == "custom-call" and _multiplies(nested):
                yield from _of_call(program, WeightedInstruction(nested, launch.execution_count))


def fusion_kind(fusion: HloInstruction) -> str:
    """Returns what runs a fusion that multiplies: triton, cudnn, or `dot` if XLA emits the code itself."""
    kind = str(fusion.backend_config.get("fusion_backend_config", {}).get("kind", ""))
    return "triton" if "triton" in kind else "cudnn" if "cudnn" in kind else "dot"


def is_attention(instruction: HloInstruction) -> bool:
    """Returns True for a call of a fused attention kernel."""
    return bool(ATTENTION_TARGETS.search(instruction.custom_call_target))


def is_mosaic_gemm(instruction: HloInstruction) -> bool:
    """Returns True for this package's Mosaic GEMM, recognized by the kernel name in its op name."""
    return instruction.custom_call_target.startswith(MOSAIC) and "gemm" in instruction.op_name


def _of_dot(program: HloModule, dot: HloInstruction, launch: WeightedInstruction, *, kind: str) -> HloGemm:
    lhs, rhs = (program.operand(dot, index).results[0] for index in (0, 1))
    dims = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", dot.attributes)
    if dims is None:
        raise HloParseError(f"{dot.name} ({dot.opcode}) does not say what it contracts: {dot.attributes[:120]}")
    k = math.prod(lhs.dims[int(dim)] for dim in dims.group(1).split(",") if dim)
    return HloGemm(launch.instruction, kind, lhs.dtype, lhs, rhs, dot.results[0], k, launch.execution_count)


def _of_call(program: HloModule, launch: WeightedInstruction) -> Iterator[HloGemm]:
    call = launch.instruction
    if not _multiplies(call):
        return
    arrays = program.operand_arrays(call)
    lhs, rhs, result = arrays[0], arrays[1], call.results[0]
    if call.custom_call_target == BLOCK_SCALED:  # [..., m, k] x [..., n, k] -> [..., m, n]
        k, kind = lhs.dims[-1], "block-scaled"
        if rhs.dims[-1] != k or result.dims[-2:] != (lhs.dims[-2], rhs.dims[-2]):
            raise HloParseError(f"{call.name}: {lhs} x {rhs} -> {result} is no block-scaled GEMM that is known")
    elif call.custom_call_target in CUBLAS:
        k, kind = _cublas_k(call, lhs), "cublas-f8" if call.custom_call_target.endswith("f8") else "cublas"
    else:
        k, kind = _contracted_size(call, lhs, rhs, result), "mosaic"
    yield HloGemm(call, kind, lhs.dtype, lhs, rhs, result, k, launch.execution_count)


def _multiplies(call: HloInstruction) -> bool:
    """Returns True if a custom call is a GEMM. Raises HloParseError for a target that is in no list."""
    target = call.custom_call_target
    if target == BLOCK_SCALED or target in CUBLAS:
        return True
    if target.startswith(MOSAIC):
        if "anonymous" in call.op_name or not call.op_name:
            raise HloParseError(f"{call.name} calls a Mosaic kernel without a name, which might multiply; give it one")
        return is_mosaic_gemm(call)
    if is_attention(call) or NON_GEMM_TARGETS.search(target):
        return False
    if re.search(r"onednn\$matmul|EigenMatMul|ynn", target):
        raise HloParseError(f"{call.name} calls {target!r}: a GEMM of a CPU library, whose shapes are not read here")
    raise HloParseError(
        f"{call.name} calls {target!r} ({call.origin or 'no source'}), which halfbyte.hlo does not know; say in "
        "halfbyte/hlo/gemm_ops.py whether it multiplies"
    )


def _cublas_k(call: HloInstruction, lhs: HloArray) -> int:
    try:
        dims = call.backend_config["gemm_backend_config"]["dot_dimension_numbers"]["lhs_contracting_dimensions"]
    except KeyError:
        raise HloParseError(f"{call.name} ({call.custom_call_target}) does not say what it contracts") from None
    return math.prod(lhs.dims[int(dim)] for dim in dims)


def _row_dim(lhs: HloArray, result: HloArray) -> int:
    """Returns the row dim of `lhs` in a grouped GEMM: the last one in wgrad of 4-bit codes, which are K-major."""
    return 1 if len(result.dims) == 3 and lhs.dtype.startswith("f4") else 0


def _contracted_size(call: HloInstruction, lhs: HloArray, rhs: HloArray, result: HloArray) -> int:
    """Returns k of a GEMM of two matrices, whose operands the kernel may take in either order.

    The product of the three sizes is (mk)(kn)(mn) = (mnk)^2, and its root over mn is k. In a grouped GEMM over experts,
    k is the width of the rows (fprop, dgrad) or the average number of rows per expert, rounded up (wgrad).
    """
    ranks = len(lhs.dims), len(rhs.dims), len(result.dims)
    if ranks == (2, 3, 2):  # [rows, k] x [experts, k, n] (codes: [experts, n, k]) -> [rows, n]
        return lhs.dims[1]
    if ranks == (2, 2, 3):  # [rows, m] x [rows, n] (codes: [m, rows] x [n, rows]) -> [experts, m, n]
        return -(-lhs.dims[_row_dim(lhs, result)] // result.dims[0])
    if not result.elements or any(len(array.dims) != 2 for array in (lhs, rhs, result)):
        raise HloParseError(f"{call.name}: {lhs} x {rhs} -> {result} are not three matrices")
    squared = lhs.elements * rhs.elements * result.elements
    k = math.isqrt(squared) // result.elements
    if k * k * result.elements**2 != squared or k not in lhs.dims or k not in rhs.dims:
        raise HloParseError(f"{call.name}: {lhs} x {rhs} -> {result} is no GEMM of two matrices")
    return k


def find_attention_calls(program: HloModule) -> list[AttentionCall]:
    """Returns every fused attention call of a step."""
    return [call for launch in execution_counts(program) for call in attention_call_of(program, launch)]


def attention_call_of(program: HloModule, launch: WeightedInstruction) -> Iterator[AttentionCall]:
    """Yields the AttentionCall of an instruction, nothing for others. Raises HloParseError if shapes are missing."""
    instruction = launch.instruction
    if not is_attention(instruction):
        return
    config = instruction.backend_config.get("cudnn_fmha_backend_config", {})
    dims = config.get("intermediate_tensor_shape", {}).get("dimensions", ())
    if len(dims) != 4 or "mask_type" not in config:
        raise HloParseError(
            f"{instruction.name} ({instruction.custom_call_target}) does not say the shape of its scores or its mask"
        )
    batch, heads, queries, keys = (int(size) for size in dims)
    causal = "CAUSAL" in config["mask_type"]
    num_gemms = BACKWARD_GEMMS if "Backward" in instruction.custom_call_target else FORWARD_GEMMS
    head_dim = program.operand(instruction, 0).results[0].dims[-1]
    yield AttentionCall(instruction, (batch, heads, queries, keys), head_dim, causal, num_gemms, launch.execution_count)
