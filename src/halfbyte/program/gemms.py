"""The GEMMs of a program and the FLOPs they multiply, by what the hardware is asked for.

A GEMM is a `dot` (alone or inside a fusion: Triton, cuDNN, a CPU library), a call of cuBLAS, a block-scaled call of
cuDNN, or our own Mosaic kernel. Every multiplication and addition counts, needed or not: 2 m n k, times the batch,
times the turns of the loops around it. A custom call that is in no list below is Unreadable: it might multiply.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from .schedule import Branches, Launch, Turns, every_branch, launches, trips
from .text import FUSIONS, Array, Instruction, Program, Unreadable

BLOCK_SCALED = "__cudnn$blockScaledDot"
CUBLAS = ("__cublas$gemm", "__cublas$lt$matmul", "__cublas$lt$matmul$f8")
MOSAIC = "mosaic_gpu"
ATTENTION = re.compile(r"fmha|flash", re.IGNORECASE)
NO_GEMM = re.compile(
    r"^__gpu\$xla\.gpu\.triton$|^triton_kernel_call$|cub\$|gpu\.ext\.cub_|TopK|^SPMD|^Sharding$|^annotate_device_placement$|"
    r"^Move|^ducc_fft|^lapack_|^cu_|^cusolver|^AllocateBuffer$|^xla_ffi_|callback|^PadToStatic$|^SliceToDynamic$|"
    r"^AssumeGatherIndicesInBound$|^CreateBuffer$|^Pin$|^Unpin$|^__cudnn\$norm"
)
NARROW = {"f4": "fp4", "f8": "fp8"}
MULTIPLIES = ("dot", "scaled-dot")
NEVER_SEEN = ("convolution", "ragged-dot", "triangular-solve", "cholesky", "fft", "dot-start", "custom-call-start")


@dataclass(frozen=True)
class Gemm:
    """One GEMM of a program. `kind` is who multiplies; `dtype` is the left operand's, as it is multiplied."""

    instruction: Instruction
    kind: str
    dtype: str
    left: Array
    right: Array
    result: Array
    k: int
    times: int

    @property
    def format(self) -> str:
        """What the hardware multiplies: fp4, fp8, or the operands' own type."""
        return next((name for start, name in NARROW.items() if self.dtype.startswith(start)), self.dtype)

    @property
    def each(self) -> int:
        """FLOPs of one call."""
        return 2 * self.result.elements * self.k

    @property
    def rows(self) -> int:
        """Of our kernel over many experts, the rows that it has room for; 0 for any other GEMM."""
        grouped = self.kind == "mosaic" and 3 in (len(self.right.dims), len(self.result.dims))
        return self.left.dims[_rows_at(self.left, self.result)] if grouped else 0

    @property
    def flops(self) -> int:
        """FLOPs of a step, loops counted."""
        return self.each * self.times

    def __str__(self) -> str:
        return f"{self.kind} {self.left} x {self.right} -> {self.result}, {self.times} times"


def gemms(program: Program, *, turns: Turns = trips, branches: Branches = every_branch) -> list[Gemm]:
    """Every GEMM of a step, attention's fused kernels excepted. Raises Unreadable for calls that it does not know, for
    loops around a GEMM that `turns` cannot count, and where several of the `branches` of one multiply.
    """

    def multiplies(found: Instruction) -> bool:
        return any(True for _ in gemms_of(program, Launch(found, 1)))

    found = launches(program, matters=multiplies, turns=turns, branches=branches)
    return [gemm for launch in found for gemm in gemms_of(program, launch)]


def gemms_of(program: Program, launch: Launch) -> Iterator[Gemm]:
    """The GEMMs that one instruction runs; none for most."""
    found = launch.instruction
    if found.opcode in NEVER_SEEN:
        raise Unreadable(f"{found.name} is a {found.opcode} ({found.origin}), whose FLOPs are not counted here")
    if found.opcode == "custom-call":
        yield from _of_call(program, launch)
    elif found.opcode in MULTIPLIES:
        yield _of_dot(program, found, launch, kind="dot")
    elif found.opcode in FUSIONS:
        kind = fusion_kind(found)
        for part in program.inside(found):
            if part.opcode in MULTIPLIES:
                yield _of_dot(program, part, launch, kind=kind)
            elif part.opcode == "custom-call" and _multiplies(part):
                yield from _of_call(program, Launch(part, launch.times))


def fusion_kind(found: Instruction) -> str:
    """Who runs a fusion that multiplies: triton, cudnn, or `dot` where the compiler emits it itself."""
    kind = str(found.config.get("fusion_backend_config", {}).get("kind", ""))
    return "triton" if "triton" in kind else "cudnn" if "cudnn" in kind else "dot"


def is_attention(found: Instruction) -> bool:
    """Whether this is a call of a fused attention kernel."""
    return bool(ATTENTION.search(found.target))


def is_own_gemm(found: Instruction) -> bool:
    """Whether this is our Mosaic GEMM, which is known by the name that it was given."""
    return found.target.startswith(MOSAIC) and "gemm" in found.op_name


def _of_dot(program: Program, dot: Instruction, launch: Launch, *, kind: str) -> Gemm:
    left, right = (program.operand(dot, at).results[0] for at in (0, 1))
    dims = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", dot.attributes)
    if dims is None:
        raise Unreadable(f"{dot.name} ({dot.opcode}) does not say what it contracts: {dot.attributes[:120]}")
    k = math.prod(left.dims[int(dim)] for dim in dims.group(1).split(",") if dim)
    return Gemm(launch.instruction, kind, left.dtype, left, right, dot.results[0], k, launch.times)


def _of_call(program: Program, launch: Launch) -> Iterator[Gemm]:
    found = launch.instruction
    if not _multiplies(found):
        return
    arrays = program.operand_arrays(found)
    left, right, result = arrays[0], arrays[1], found.results[0]
    if found.target == BLOCK_SCALED:  # [..., m, k] x [..., n, k] -> [..., m, n]
        k, kind = left.dims[-1], "block-scaled"
        if right.dims[-1] != k or result.dims[-2:] != (left.dims[-2], right.dims[-2]):
            raise Unreadable(f"{found.name}: {left} x {right} -> {result} is no block-scaled GEMM that is known")
    elif found.target in CUBLAS:
        k, kind = _cublas_k(found, left), "cublas-f8" if found.target.endswith("f8") else "cublas"
    else:
        k, kind = _inner(found, left, right, result), "mosaic"
    yield Gemm(found, kind, left.dtype, left, right, result, k, launch.times)


def _multiplies(found: Instruction) -> bool:
    """Whether a custom call is a GEMM. Raises Unreadable for a target that is in no list."""
    target = found.target
    if target == BLOCK_SCALED or target in CUBLAS:
        return True
    if target.startswith(MOSAIC):
        if "anonymous" in found.op_name or not found.op_name:
            raise Unreadable(f"{found.name} calls a Mosaic kernel without a name, which might multiply; give it one")
        return is_own_gemm(found)
    if is_attention(found) or NO_GEMM.search(target):
        return False
    if re.search(r"onednn\$matmul|EigenMatMul|ynn", target):
        raise Unreadable(f"{found.name} calls {target!r}: a GEMM of a CPU library, whose shapes are not read here")
    raise Unreadable(
        f"{found.name} calls {target!r} ({found.origin or 'no source'}), which halfbyte.program does not know; say in "
        "halfbyte/program/gemms.py whether it multiplies"
    )


def _cublas_k(found: Instruction, left: Array) -> int:
    try:
        dims = found.config["gemm_backend_config"]["dot_dimension_numbers"]["lhs_contracting_dimensions"]
    except KeyError:
        raise Unreadable(f"{found.name} ({found.target}) does not say what it contracts") from None
    return math.prod(left.dims[int(dim)] for dim in dims)


def _rows_at(left: Array, result: Array) -> int:
    """The dim of rows in the left operand of a GEMM over experts: the last where 4-bit codes are summed over them."""
    return 1 if len(result.dims) == 3 and left.dtype.startswith("f4") else 0


def _inner(found: Instruction, left: Array, right: Array, result: Array) -> int:
    """The contracted size of two matrices, in whatever orders the kernel takes them: (mk)(kn)(mn) is a square. Of rows
    times a matrix of each expert's, their width; of an expert's rows, how many there are on average, filled up.
    """
    ranks = len(left.dims), len(right.dims), len(result.dims)
    if ranks == (2, 3, 2):  # [rows, k] x [experts, k, n] (codes: [experts, n, k]) -> [rows, n]
        return left.dims[1]
    if ranks == (2, 2, 3):  # [rows, m] x [rows, n] (codes: [m, rows] x [n, rows]) -> [experts, m, n]
        return -(-left.dims[_rows_at(left, result)] // result.dims[0])
    if not result.elements or any(len(array.dims) != 2 for array in (left, right, result)):
        raise Unreadable(f"{found.name}: {left} x {right} -> {result} are not three matrices")
    square = left.elements * right.elements * result.elements
    k = math.isqrt(square) // result.elements
    if k * k * result.elements**2 != square or k not in left.dims or k not in right.dims:
        raise Unreadable(f"{found.name}: {left} x {right} -> {result} is no GEMM of two matrices")
    return k
