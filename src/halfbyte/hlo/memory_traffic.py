"""Count the memory traffic of each instruction in bytes, and assign each instruction to a category.

An instruction reads its operands and writes its results, with three exceptions. Of an array that is only sliced, the
slices are read. Of an array that is updated in place, the update is written. Intermediates of a fusion stay on the
chip. A custom call reads its operands and writes its results; this package's kernels that get the stack of all layers
read one layer of it. Collectives are not counted here (`collective_ops` has their bytes), nor are repeated reads inside
a kernel.

The category (OP_CATEGORIES) depends first on what an instruction does: GEMM, attention call, collective. Otherwise it
depends on the source lines of the instruction and of those fused into it (ORIGINS matches paths and functions of this
package). Kernels of this package that do not multiply are quantize, except those that only normalize. An optimizer
update that reads a gradient of the MLP is optimizer.
"""

import re

from halfbyte.hlo.collective_ops import collective_kind
from halfbyte.hlo.gemm_ops import DOT_OPCODES, MOSAIC, is_attention, is_mosaic_gemm
from halfbyte.hlo.hlo_text import FUSIONS, HloArray, HloInstruction, HloModule

SLICE_OPCODES = ("dynamic-slice", "slice", "gather")
UPDATE_OPCODES = {"dynamic-update-slice": 1, "scatter": 2}
"""Opcodes that overwrite a slice of their first operand -> index of the operand that holds the update."""
DATA_MOVEMENT_OPCODES = {
    "transpose": ("transpose",),
    "update": ("dynamic-update-slice",),
    "slice": ("dynamic-slice", "slice"),
    "fill": ("broadcast",),
    "copy": ("copy", "concatenate"),
}
"""Kind of a data movement -> opcodes that identify it; the first match in this order decides."""
REDUCTION_OPCODES = ("reduce", "dot")  # compute even if their result is a scalar
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
"""(category, pattern of the op name and source line); the first match decides."""
GEMM_NAME = re.compile(
    r"cublas|blockScaledDot|gemm|matmul|onednn|nvjet|cutlass|xmma|splitK|ynn_fusion|\bdot\b", re.IGNORECASE
)
COMMUNICATION_NAME = re.compile(r"nccl|^all-|^reduce-scatter|^collective-|nvshmem", re.IGNORECASE)
KERNEL_NAMES = (
    ("communication", COMMUNICATION_NAME),
    ("attention", re.compile(r"fmha|flash|attention|sdpa", re.IGNORECASE)),
    ("quantize", re.compile(r"quantize|maxima|tensor_scale|swiglu|hadamard|unpack", re.IGNORECASE)),
    ("gemm", GEMM_NAME),
)
"""Category and pattern of a kernel's own name, the first that matches."""


def data_movement_kind(program: HloModule, instruction: HloInstruction) -> str | None:
    """Returns the key of DATA_MOVEMENT_OPCODES for an instruction, or None if it computes."""
    opcodes = {instruction.opcode.removesuffix("-start")}
    if instruction.opcode in FUSIONS:  # a scalar is an index, unless it was reduced from an array
        value_instructions = (
            nested
            for nested in program.nested_instructions(instruction)
            if nested.opcode in REDUCTION_OPCODES or _has_several_elements(nested)
        )
        opcodes = {nested.opcode for nested in value_instructions}
    if opcodes - ZERO_TRAFFIC_OPCODES - {opcode for kind in DATA_MOVEMENT_OPCODES.values() for opcode in kind}:
        return None
    return next((kind for kind, kind_opcodes in DATA_MOVEMENT_OPCODES.items() if opcodes & set(kind_opcodes)), None)


def _has_several_elements(instruction: HloInstruction) -> bool:
    """Returns True if a result has more than one element."""
    return any(array.elements > 1 for array in instruction.results)


def instruction_bytes(program: HloModule, instruction: HloInstruction) -> tuple[int, int]:
    """Returns the bytes (read, written) by one execution of an instruction."""
    results = sum(array.bytes for array in instruction.results)
    if instruction.opcode in FUSIONS:
        return _of_fusion(program, instruction)
    if instruction.custom_call_target == UNINITIALIZED_BUFFER_TARGET:
        return 0, 0
    if instruction.custom_call_target == KERNEL:
        return _of_kernel(program, instruction)
    if instruction.custom_call_target.startswith(MOSAIC):
        return sum(_of_layer(instruction, array) for array in program.operand_arrays(instruction)), results
    if instruction.opcode in ("dynamic-slice", "slice"):
        return results, results
    if instruction.opcode == "gather":
        return results + _operand_bytes(program, instruction, 1), results
    if instruction.opcode in UPDATE_OPCODES:
        update_bytes = _operand_bytes(program, instruction, UPDATE_OPCODES[instruction.opcode])
        return update_bytes, update_bytes
    if instruction.opcode == "copy-start":  # results: destination, source, context
        return instruction.results[0].bytes, instruction.results[0].bytes
    return sum(array.bytes for array in program.operand_arrays(instruction)), results


def _of_fusion(program: HloModule, fusion: HloInstruction) -> tuple[int, int]:
    (name,) = fusion.called_computations[:1]
    body = program.computations[name]
    users: dict[str, list[HloInstruction]] = {}
    for instruction in body:
        for operand in instruction.operands if instruction.opcode != "parameter" else ():
            users.setdefault(operand, []).append(instruction)
    parameters = {
        int(instruction.operands[0]): instruction for instruction in body if instruction.opcode == "parameter"
    }
    read = sum(_read(parameters[index], users) for index in range(len(fusion.operands)) if index in parameters)
    return read, sum(_written(program, root) for root in _roots(program, body))


def _of_kernel(program: HloModule, call: HloInstruction) -> tuple[int, int]:
    """Returns the bytes (read, written) of a Triton kernel. An operand that is overwritten in place is not read.

    An array is a stack of layers if another array of the call has its dims without the first; one layer counts.
    """
    operands = program.operand_arrays(call)
    layers = {array.dims for array in (*operands, *call.results) if len(array.dims) > 1}

    def bytes_moved(array: HloArray) -> int:
        return array.bytes // array.dims[0] if array.dims[1:] in layers else array.bytes

    in_place = {int(index) for index in IN_PLACE.findall(call.attributes)}
    read = sum(bytes_moved(array) for index, array in enumerate(operands) if index not in in_place)
    return read, sum(map(bytes_moved, call.results))


def _of_layer(call: HloInstruction, array: HloArray) -> int:
    """Returns the bytes that a Mosaic kernel reads of an array: one layer of a stack.

    Kernels that are not tiled take flat arrays, so that an operand with more dims next to flat results is a stack.
    """
    stacked = len(array.dims) > 1 and all(len(result.dims) == 1 for result in call.results)
    return array.bytes // array.dims[0] if stacked else array.bytes


def _read(value: HloInstruction, users: dict[str, list[HloInstruction]]) -> int:
    """Returns the bytes read of a parameter (or view): those of its slices if only slices and in-place updates use it.

    Any other user reads all of them.
    """
    total, all_bytes = 0, sum(array.bytes for array in value.results)
    for user in users.get(value.name, ()):
        is_first_operand = user.operands[0] == value.name
        if user.opcode in SLICE_OPCODES and is_first_operand:
            total += sum(array.bytes for array in user.results)
        elif user.opcode in UPDATE_OPCODES and is_first_operand and user.operands.count(value.name) == 1:
            continue  # updated in place: nothing is read
        elif user.opcode == "bitcast":
            total += _read(user, users)
        else:
            return all_bytes
    return min(total, all_bytes)


def _roots(program: HloModule, body: list[HloInstruction]) -> list[HloInstruction]:
    root = next(instruction for instruction in body if instruction.root)
    if root.opcode != "tuple":
        return [root]
    return [program.operand(root, index) for index in range(len(root.operands))]


def _written(program: HloModule, root: HloInstruction) -> int:
    value = root
    while value.opcode in ("bitcast", "copy") and value.operands:
        value = program.operand(value, 0)
    if value.opcode in UPDATE_OPCODES:
        return _operand_bytes(program, value, UPDATE_OPCODES[value.opcode])
    return sum(array.bytes for array in root.results)


def _operand_bytes(program: HloModule, instruction: HloInstruction, index: int) -> int:
    return sum(array.bytes for array in program.operand(instruction, index).results)


def op_category(program: HloModule, instruction: HloInstruction) -> str | None:
    """Returns one of OP_CATEGORIES; None for an instruction that only contains or awaits other instructions."""
    if instruction.opcode in CONTAINERS:
        return None
    if collective_kind(instruction) or is_collective_done(instruction):
        return "communication"
    instructions = [instruction, *program.nested_instructions(instruction)]
    if ATTENTION_SOURCE.search(instruction.origin) or any(is_attention(nested) for nested in instructions):
        return "attention"
    gemm_origins = [nested.origin for nested in instructions if _multiplies(nested)]
    if gemm_origins:  # other instructions of a GEMM fusion may come from any source line
        return "attention" if ATTENTION_SOURCE.search(" ".join(gemm_origins)) else "gemm"
    if PALLAS_KERNEL_TARGETS.search(instruction.custom_call_target):
        return "other" if NORM.search(instruction.origin) else "quantize"
    category = _first_match(ORIGINS, " ".join(nested.origin for nested in instructions))
    return "optimizer" if category == "mlp" and _first_match(ORIGINS, instruction.origin) == "optimizer" else category


def category_of_name(name: str) -> str:
    """Returns the category of a kernel by the name that a library or compiler gives it, when nothing else is known."""
    return _first_match(KERNEL_NAMES, name)


def _first_match(patterns: tuple[tuple[str, re.Pattern[str]], ...], text: str) -> str:
    return next((category for category, pattern in patterns if pattern.search(text)), "other")


def is_collective_done(instruction: HloInstruction) -> bool:
    """Returns True for an instruction that waits for a collective."""
    return instruction.opcode.endswith("-done") and bool(COMMUNICATION_NAME.search(instruction.opcode))


def _multiplies(instruction: HloInstruction) -> bool:
    return (
        instruction.opcode in DOT_OPCODES
        or is_mosaic_gemm(instruction)
        or bool(GEMM_NAME.search(instruction.custom_call_target))
    )
