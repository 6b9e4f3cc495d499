"""The GEMMs and fused attention calls of a program, and their FLOPs.

A GEMM is a `dot` (by itself or inside a fusion: Triton, cuDNN, a CPU library), a cuBLAS call, a block-scaled cuDNN
call, or our Mosaic kernel. All FLOPs count, needed or not: 2 m n k, times the batch, times the trip counts of
enclosing loops. A custom call that is in no list below raises HloParseError, because it might multiply.

Fused attention runs two GEMMs of [queries, keys] by head_dim forward (scores, context) and five backward (scores again,
and the gradients of values, probabilities, queries and keys). A causal kernel does half of each.
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
    """One GEMM of a program. `kind` is who multiplies; `dtype` is the left operand's, as it is multiplied."""

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
        """What the hardware multiplies: fp4, fp8, or the operands' own type."""
        return next((name for start, name in NARROW_FORMATS.items() if self.dtype.startswith(start)), self.dtype)

    @property
    def flops_per_call(self) -> int:
        """FLOPs of one call."""
        return 2 * self.result.elements * self.k

    @property
    def rows(self) -> int:
        """Of our kernel over many experts, the rows of its buffer; 0 for any other GEMM."""
        grouped = self.kind == "mosaic" and 3 in (len(self.rhs.dims), len(self.result.dims))
        return self.lhs.dims[_row_dim(self.lhs, self.result)] if grouped else 0

    @property
    def flops(self) -> int:
        """FLOPs of a step, loops counted."""
        return self.flops_per_call * self.execution_count

    def __str__(self) -> str:
        return f"{self.kind} {self.lhs} x {self.rhs} -> {self.result}, {self.execution_count} times"


@dataclass(frozen=True)
class AttentionCall:
    """One call of a fused attention kernel; scores are [batch, heads, queries, keys]."""

    instruction: HloInstruction
    scores: tuple[int, int, int, int]
    head_dim: int
    causal: bool
    num_gemms: int
    execution_count: int

    @property
    def flops_per_call(self) -> int:
        """FLOPs of one call."""
        batch, heads, queries, keys = self.scores
        whole = self.num_gemms * 2 * batch * heads * queries * keys * self.head_dim
        return whole // 2 if self.causal else whole

    @property
    def flops(self) -> int:
        """FLOPs of a step, loops counted."""
        return self.flops_per_call * self.execution_count


def find_gemms(
    program: HloModule, *, turns: TripCountFn = trip_count, branches: BranchFn = every_branch
) -> list[HloGemm]:
    """Returns every GEMM of a step, except those of fused attention. Raises HloParseError for unknown calls, for loops
    around a GEMM that `turns` cannot count, and where several `branches` of a conditional multiply.
    """

    def multiplies(found: HloInstruction) -> bool:
        return any(True for _ in gemms_of_instruction(program, WeightedInstruction(found, 1)))

    found = execution_counts(program, matters=multiplies, turns=turns, branches=branches)
    return [gemm for launch in found for gemm in gemms_of_instruction(program, launch)]


def gemms_of_instruction(program: HloModule, launch: WeightedInstruction) -> Iterator[HloGemm]:
    """The GEMMs that one instruction runs; none for most."""
    found = launch.instruction
    if found.opcode in UNSUPPORTED_DOT_OPCODES:
        raise HloParseError(f"{found.name} is a {found.opcode} ({found.origin}), whose FLOPs are not counted here")
    if found.opcode == "custom-call":
        yield from _of_call(program, launch)
    elif found.opcode in DOT_OPCODES:
        yield _of_dot(program, found, launch, kind="dot")
    elif found.opcode in FUSIONS:
        kind = fusion_kind(found)
        for part in program.nested_instructions(found):
            if part.opcode in DOT_OPCODES:
                yield _of_dot(program, part, launch, kind=kind)
            elif part.opcode == "custom-call" and _multiplies(part):
                yield from _of_call(program, WeightedInstruction(part, launch.execution_count))


def fusion_kind(found: HloInstruction) -> str:
    """Who runs a fusion that multiplies: triton, cudnn, or `dot` where the compiler emits it itself."""
    kind = str(found.backend_config.get("fusion_backend_config", {}).get("kind", ""))
    return "triton" if "triton" in kind else "cudnn" if "cudnn" in kind else "dot"


def is_attention(found: HloInstruction) -> bool:
    """Whether this is a call of a fused attention kernel."""
    return bool(ATTENTION_TARGETS.search(found.custom_call_target))


def is_mosaic_gemm(found: HloInstruction) -> bool:
    """Whether this is our Mosaic GEMM, which is known by the name that it was given."""
    return found.custom_call_target.startswith(MOSAIC) and "gemm" in found.op_name


def _of_dot(program: HloModule, dot: HloInstruction, launch: WeightedInstruction, *, kind: str) -> HloGemm:
    left, right = (program.operand(dot, at).results[0] for at in (0, 1))
    dims = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", dot.attributes)
    if dims is None:
        raise HloParseError(f"{dot.name} ({dot.opcode}) does not say what it contracts: {dot.attributes[:120]}")
    k = math.prod(left.dims[int(dim)] for dim in dims.group(1).split(",") if dim)
    return HloGemm(launch.instruction, kind, left.dtype, left, right, dot.results[0], k, launch.execution_count)


def _of_call(program: HloModule, launch: WeightedInstruction) -> Iterator[HloGemm]:
    found = launch.instruction
    if not _multiplies(found):
        return
    arrays = program.operand_arrays(found)
    left, right, result = arrays[0], arrays[1], found.results[0]
    if found.custom_call_target == BLOCK_SCALED:  # [..., m, k] x [..., n, k] -> [..., m, n]
        k, kind = left.dims[-1], "block-scaled"
        if right.dims[-1] != k or result.dims[-2:] != (left.dims[-2], right.dims[-2]):
            raise HloParseError(f"{found.name}: {left} x {right} -> {result} is no block-scaled GEMM that is known")
    elif found.custom_call_target in CUBLAS:
        k, kind = _cublas_k(found, left), "cublas-f8" if found.custom_call_target.endswith("f8") else "cublas"
    else:
        k, kind = _contracted_size(found, left, right, result), "mosaic"
    yield HloGemm(found, kind, left.dtype, left, right, result, k, launch.execution_count)


def _multiplies(found: HloInstruction) -> bool:
    """Whether a custom call is a GEMM. Raises HloParseError for a target that is in no list."""
    target = found.custom_call_target
    if target == BLOCK_SCALED or target in CUBLAS:
        return True
    if target.startswith(MOSAIC):
        if "anonymous" in found.op_name or not found.op_name:
            raise HloParseError(f"{found.name} calls a Mosaic kernel without a name, which might multiply; give it one")
        return is_mosaic_gemm(found)
    if is_attention(found) or NON_GEMM_TARGETS.search(target):
        return False
    if re.search(r"onednn\$matmul|EigenMatMul|ynn", target):
        raise HloParseError(f"{found.name} calls {target!r}: a GEMM of a CPU library, whose shapes are not read here")
    raise HloParseError(
        f"{found.name} calls {target!r} ({found.origin or 'no source'}), which halfbyte.hlo does not know; say in "
        "halfbyte/hlo/gemm_ops.py whether it multiplies"
    )


def _cublas_k(found: HloInstruction, left: HloArray) -> int:
    try:
        dims = found.backend_config["gemm_backend_config"]["dot_dimension_numbers"]["lhs_contracting_dimensions"]
    except KeyError:
        raise HloParseError(f"{found.name} ({found.custom_call_target}) does not say what it contracts") from None
    return math.prod(left.dims[int(dim)] for dim in dims)


def _row_dim(left: HloArray, result: HloArray) -> int:
    """The dim of rows in the left operand of a GEMM over experts: the last where 4-bit codes are summed over them."""
    return 1 if len(result.dims) == 3 and left.dtype.startswith("f4") else 0


def _contracted_size(found: HloInstruction, left: HloArray, right: HloArray, result: HloArray) -> int:
    """The contracted size of two matrices, in whatever orders the kernel takes them: (mk)(kn)(mn) is a square. Of rows
    times a matrix of each expert's, their width; of an expert's rows, how many there are on average, filled up.
    """
    ranks = len(left.dims), len(right.dims), len(result.dims)
    if ranks == (2, 3, 2):  # [rows, k] x [experts, k, n] (codes: [experts, n, k]) -> [rows, n]
        return left.dims[1]
    if ranks == (2, 2, 3):  # [rows, m] x [rows, n] (codes: [m, rows] x [n, rows]) -> [experts, m, n]
        return -(-left.dims[_row_dim(left, result)] // result.dims[0])
    if not result.elements or any(len(array.dims) != 2 for array in (left, right, result)):
        raise HloParseError(f"{found.name}: {left} x {right} -> {result} are not three matrices")
    square = left.elements * right.elements * result.elements
    k = math.isqrt(square) // result.elements
    if k * k * result.elements**2 != square or k not in left.dims or k not in right.dims:
        raise HloParseError(f"{found.name}: {left} x {right} -> {result} is no GEMM of two matrices")
    return k


def find_attention_calls(program: HloModule) -> list[AttentionCall]:
    """Every fused attention of a step."""
    return [found for launch in execution_counts(program) for found in attention_call_of(program, launch)]


def attention_call_of(program: HloModule, launch: WeightedInstruction) -> Iterator[AttentionCall]:
    """The fused attention that an instruction is; nothing for others. Raises HloParseError without its shapes."""
    found = launch.instruction
    if not is_attention(found):
        return
    config = found.backend_config.get("cudnn_fmha_backend_config", {})
    dims = config.get("intermediate_tensor_shape", {}).get("dimensions", ())
    if len(dims) != 4 or "mask_type" not in config:
        raise HloParseError(
            f"{found.name} ({found.custom_call_target}) does not say the shape of its scores or its mask"
        )
    batch, heads, queries, keys = (int(size) for size in dims)
    causal = "CAUSAL" in config["mask_type"]
    products = BACKWARD_GEMMS if "Backward" in found.custom_call_target else FORWARD_GEMMS
    head_dim = program.operand(found, 0).results[0].dims[-1]
    yield AttentionCall(found, (batch, heads, queries, keys), head_dim, causal, products, launch.execution_count)
