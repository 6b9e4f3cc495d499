"""Memory traffic of a program in bytes per instruction, and the category of each instruction.

An instruction reads its operands and writes its results, with three exceptions. Of an array that is only sliced, the
slices are read. Of one that is updated in place, the update is written. What a fusion produces and consumes inside
itself never leaves the chip. A custom call counts its operands and results; our kernels that get a loop's stack of
layers count one layer. Collectives are not counted here (`collective_ops` has their bytes), nor are repeated reads of
a kernel.

The category (OP_CATEGORIES) depends first on what an instruction does: GEMM, attention call, collective. Otherwise it
depends on the source lines of the instruction and of those fused into it (ORIGINS matches paths and functions of this
package). Our kernels that do not multiply are quantize, except those that only normalize. An optimizer update that
reads a gradient of the MLP is optimizer.
"""

import re

from halfbyte.hlo.collective_ops import collective_kind
from halfbyte.hlo.gemm_ops import DOT_OPCODES, MOSAIC, is_attention, is_mosaic_gemm
from halfbyte.hlo.hlo_text import FUSIONS, HloArray, HloInstruction, HloModule

SLICE_OPCODES = ("dynamic-slice", "slice", "gather")
UPDATE_OPCODES = {"dynamic-update-slice": 1, "scatter": 2}
"""Opcodes that change part of their first operand, and which operand holds the new part."""
DATA_MOVEMENT_OPCODES = {
    "transpose": ("transpose",),
    "update": ("dynamic-update-slice",),
    "slice": ("dynamic-slice", "slice"),
    "fill": ("broadcast",),
    "copy": ("copy", "concatenate"),
}
"""Kinds of instructions that compute nothing, by an opcode that they hold, the first that fits."""
REDUCTION_OPCODES = ("reduce", "dot")  # to one number, if need be
KERNEL = "__gpu$xla.gpu.triton"
IN_PLACE = re.compile(r"\{[\d, ]*\}: \((\d+), \{")  # of output_to_operand_aliasing: the operand of a result
UNINITIALIZED_BUFFER_TARGET = "AllocateBuffer"  # the call that `lax.empty` becomes
ZERO_TRAFFIC_OPCODES = frozenset("parameter constant bitcast tuple get-tuple-element convert".split())
OP_CATEGORIES = ("gemm", "quantize", "attention", "mlp", "optimizer", "communication", "other")
PALLAS_KERNEL_TARGETS = re.compile(r"^__gpu\$xla\.gpu\.triton$|^triton_kernel_call$|^mosaic_gpu")
NORM = re.compile(r"/rms_norm(?:_backward)?/")  # not the kernel that computes the amax of normed rows
CONTAINERS = ("while", "conditional", "call", "async-start", "async-update", "async-done")
ATTENTION_SOURCE = re.compile(r"attention(?!_block\b)")  # the model's attention_block is norms and linears too
# Functions of ops/operand.py that bf16 linears call as well.
ROUNDING_FUNCTIONS = "round_to_bfloat16|round_to_dtype|round_f32_to|add_and_round"
ORIGINS = (
    (
        "quantize",
        re.compile(
            rf"\b(?:formats|kernels)/|ops/operand\.py:\d+:(?!{ROUNDING_FUNCTIONS})"
            r"|ops/(?:quantized_weight|quantize_passes|backends)\b|quantize|hadamard"
        ),
    ),
    ("mlp", re.compile(r"ops/(?:mlp|activation|linear)\b")),
    ("optimizer", re.compile(r"train/(?:optimizers|train_step|dynamic_scaling)\.py")),
)
"""Category and pattern of an origin (op name and source line), the first that matches."""
GEMM_NAME = re.compile(
    r"cublas|blockScaledDot|gemm|matmul|onednn|nvjet|cutlass|xmma|splitK|ynn_fusion|\bdot\b", re.IGNORECASE
)
ATTENTION_NAME = re.compile(r"fmha|flash|attention|sdpa", re.IGNORECASE)
QUANTIZE_NAME = re.compile(r"quantize|maxima|tensor_scale|swiglu|hadamard|unpack", re.IGNORECASE)
COMMUNICATION_NAME = re.compile(r"nccl|^all-|^reduce-scatter|^collective-|nvshmem", re.IGNORECASE)


def data_movement_kind(program: HloModule, found: HloInstruction) -> str | None:
    """Returns the key of DATA_MOVEMENT_OPCODES for an instruction, or None if it computes."""
    opcodes = {found.opcode.removesuffix("-start")}
    if found.opcode in FUSIONS:  # a scalar is an index, unless it was reduced from an array
        parts = (
            part for part in program.nested_instructions(found) if part.opcode in REDUCTION_OPCODES or _several(part)
        )
        opcodes = {part.opcode for part in parts}
    if opcodes - ZERO_TRAFFIC_OPCODES - {opcode for kind in DATA_MOVEMENT_OPCODES.values() for opcode in kind}:
        return None
    return next((kind for kind, named in DATA_MOVEMENT_OPCODES.items() if opcodes & set(named)), None)


def _several(part: HloInstruction) -> bool:
    """Whether it makes more than one number."""
    return any(array.elements > 1 for array in part.results)


def instruction_bytes(program: HloModule, found: HloInstruction) -> tuple[int, int]:
    """(read, written) by one execution of one instruction."""
    results = sum(array.bytes for array in found.results)
    if found.opcode in FUSIONS:
        return _of_fusion(program, found)
    if found.custom_call_target == UNINITIALIZED_BUFFER_TARGET:
        return 0, 0
    if found.custom_call_target == KERNEL:
        return _of_kernel(program, found)
    if found.custom_call_target.startswith(MOSAIC):
        return sum(_of_layer(found, array) for array in program.operand_arrays(found)), results
    if found.opcode in ("dynamic-slice", "slice"):
        return results, results
    if found.opcode == "gather":
        return results + _operand_bytes(program, found, 1), results
    if found.opcode in UPDATE_OPCODES:
        part = _operand_bytes(program, found, UPDATE_OPCODES[found.opcode])
        return part, part
    if found.opcode in ("iota", "broadcast", "rng-bit-generator"):
        return sum(array.bytes for array in program.operand_arrays(found)), results
    if found.opcode == "copy-start":  # results: destination, source, context
        return found.results[0].bytes, found.results[0].bytes
    return sum(array.bytes for array in program.operand_arrays(found)), results


def _of_fusion(program: HloModule, found: HloInstruction) -> tuple[int, int]:
    (name,) = found.called_computations[:1]
    body = program.computations[name]
    users: dict[str, list[HloInstruction]] = {}
    for part in body:
        for operand in part.operands if part.opcode != "parameter" else ():
            users.setdefault(operand, []).append(part)
    parameters = {int(part.operands[0]): part for part in body if part.opcode == "parameter"}
    read = sum(
        _read(parameters[at], users, sum(array.bytes for array in parameters[at].results))
        for at in range(len(found.operands))
        if at in parameters
    )
    return read, sum(_written(program, root) for root in _roots(program, body))


def _of_kernel(program: HloModule, found: HloInstruction) -> tuple[int, int]:
    """Stacks are known by the other arrays of the call, which have a layer's dims. What is written in place is not
    read.
    """
    operands = program.operand_arrays(found)
    layers = {array.dims for array in (*operands, *found.results) if len(array.dims) > 1}

    def touched(array: HloArray) -> int:
        return array.bytes // array.dims[0] if array.dims[1:] in layers else array.bytes

    in_place = {int(at) for at in IN_PLACE.findall(found.attributes)}
    read = sum(touched(array) for at, array in enumerate(operands) if at not in in_place)
    return read, sum(map(touched, found.results))


def _of_layer(found: HloInstruction, array: HloArray) -> int:
    """Bytes that a kernel without tiles reads of an array. It is given arrays of one dim, but for stacks."""
    stacked = len(array.dims) > 1 and all(len(result.dims) == 1 for result in found.results)
    return array.bytes // array.dims[0] if stacked else array.bytes


def _read(value: HloInstruction, users: dict[str, list[HloInstruction]], whole: int) -> int:
    """Bytes read of a parameter, or of a view of it: slices where only slices and updates in place use it."""
    total = 0
    for user in users.get(value.name, ()):
        first = user.operands[0] == value.name
        if user.opcode in SLICE_OPCODES and first:
            total += sum(array.bytes for array in user.results)
        elif user.opcode in UPDATE_OPCODES and first and user.operands.count(value.name) == 1:
            continue  # written in part, in place
        elif user.opcode == "bitcast":
            total += _read(user, users, whole)
        else:
            return whole
    return min(total, whole)


def _roots(program: HloModule, body: list[HloInstruction]) -> list[HloInstruction]:
    root = next(part for part in body if part.root)
    if root.opcode != "tuple":
        return [root]
    return [program.operand(root, at) for at in range(len(root.operands))]


def _written(program: HloModule, root: HloInstruction) -> int:
    part = root
    while part.opcode in ("bitcast", "copy") and part.operands:
        part = program.operand(part, 0)
    if part.opcode in UPDATE_OPCODES:
        return _operand_bytes(program, part, UPDATE_OPCODES[part.opcode])
    return sum(array.bytes for array in root.results)


def _operand_bytes(program: HloModule, found: HloInstruction, at: int) -> int:
    return sum(array.bytes for array in program.operand(found, at).results)


def op_category(program: HloModule, found: HloInstruction) -> str | None:
    """Returns one of OP_CATEGORIES; None for an instruction that only contains others or that waits for one."""
    if found.opcode in CONTAINERS:
        return None
    if collective_kind(found) or is_collective_done(found):
        return "communication"
    inside = [found, *program.nested_instructions(found)]
    if ATTENTION_SOURCE.search(found.origin) or any(is_attention(part) for part in inside):
        return "attention"
    dots = [part.origin for part in inside if _multiplies(part)]
    if dots:  # what else is fused into a GEMM may come from anywhere
        return "attention" if ATTENTION_SOURCE.search(" ".join(dots)) else "gemm"
    if PALLAS_KERNEL_TARGETS.search(found.custom_call_target):
        return "other" if NORM.search(found.origin) else "quantize"
    name = _category_from_source(" ".join(part.origin for part in inside))
    return "optimizer" if name == "mlp" and _category_from_source(found.origin) == "optimizer" else name


def _category_from_source(origins: str) -> str:
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


def is_collective_done(found: HloInstruction) -> bool:
    """Whether this waits for a collective."""
    return found.opcode.endswith("-done") and bool(COMMUNICATION_NAME.search(found.opcode))


def _multiplies(part: HloInstruction) -> bool:
    return part.opcode in DOT_OPCODES or is_mosaic_gemm(part) or bool(GEMM_NAME.search(part.custom_call_target))
