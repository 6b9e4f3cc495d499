"""Bytes that a program reads from and writes to a device's memory, instruction by instruction.

An instruction reads its operands and writes its results. Three things are smaller than they look: of an array that is
only sliced, the slices are read; of one that is updated in place, the update is written; and what a fusion makes and
uses inside itself never leaves the chip. A custom call counts its operands and results; of ours, kernels that are given
a loop's stack of layers, the layer. Collectives are not memory traffic here (`collectives` has their bytes), and
neither is what a kernel reads twice because its caches are small.
"""

import re

from .gemms import MOSAIC
from .text import FUSIONS, Array, Instruction, Program

SLICES = ("dynamic-slice", "slice", "gather")
UPDATES = {"dynamic-update-slice": 1, "scatter": 2}
"""Opcodes that change part of their first operand, and which operand holds the new part."""
MOVES = {
    "transpose": ("transpose",),
    "update": ("dynamic-update-slice",),
    "slice": ("dynamic-slice", "slice"),
    "fill": ("broadcast",),
    "copy": ("copy", "concatenate"),
}
"""Kinds of instructions that compute nothing, by an opcode that they hold, the first that fits."""
REDUCES = ("reduce", "dot")  # to one number, if need be
KERNEL = "__gpu$xla.gpu.triton"
IN_PLACE = re.compile(r"\{[\d, ]*\}: \((\d+), \{")  # of output_to_operand_aliasing: the operand of a result
UNWRITTEN = "AllocateBuffer"  # the call that `lax.empty` becomes
WITHOUT_WORK = frozenset("parameter constant bitcast tuple get-tuple-element convert".split())


def move_of(program: Program, found: Instruction) -> str | None:
    """The kind of MOVES that an instruction is; None for one that computes."""
    opcodes = {found.opcode.removesuffix("-start")}
    if found.opcode in FUSIONS:  # a single number is where something lies, unless it was made of many
        parts = (part for part in program.inside(found) if part.opcode in REDUCES or _several(part))
        opcodes = {part.opcode for part in parts}
    if opcodes - WITHOUT_WORK - {opcode for kind in MOVES.values() for opcode in kind}:
        return None
    return next((kind for kind, named in MOVES.items() if opcodes & set(named)), None)


def _several(part: Instruction) -> bool:
    """Whether it makes more than one number."""
    return any(array.elements > 1 for array in part.results)


def bytes_of(program: Program, found: Instruction) -> tuple[int, int]:
    """(read, written) by one execution of one instruction."""
    results = sum(array.bytes for array in found.results)
    if found.opcode in FUSIONS:
        return _of_fusion(program, found)
    if found.target == UNWRITTEN:
        return 0, 0
    if found.target == KERNEL:
        return _of_kernel(program, found)
    if found.target.startswith(MOSAIC):
        return sum(_of_layer(found, array) for array in program.operand_arrays(found)), results
    if found.opcode in ("dynamic-slice", "slice"):
        return results, results
    if found.opcode == "gather":
        return results + _operand_bytes(program, found, 1), results
    if found.opcode in UPDATES:
        part = _operand_bytes(program, found, UPDATES[found.opcode])
        return part, part
    if found.opcode in ("iota", "broadcast", "rng-bit-generator"):
        return sum(array.bytes for array in program.operand_arrays(found)), results
    if found.opcode == "copy-start":  # results: destination, source, context
        return found.results[0].bytes, found.results[0].bytes
    return sum(array.bytes for array in program.operand_arrays(found)), results


def _of_fusion(program: Program, found: Instruction) -> tuple[int, int]:
    (name,) = found.calls[:1]
    body = program.computations[name]
    users: dict[str, list[Instruction]] = {}
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


def _of_kernel(program: Program, found: Instruction) -> tuple[int, int]:
    """Stacks are known by the other arrays of the call, which have a layer's dims. What is written in place is not
    read.
    """
    operands = program.operand_arrays(found)
    layers = {array.dims for array in (*operands, *found.results) if len(array.dims) > 1}

    def touched(array: Array) -> int:
        return array.bytes // array.dims[0] if array.dims[1:] in layers else array.bytes

    in_place = {int(at) for at in IN_PLACE.findall(found.attributes)}
    read = sum(touched(array) for at, array in enumerate(operands) if at not in in_place)
    return read, sum(map(touched, found.results))


def _of_layer(found: Instruction, array: Array) -> int:
    """Bytes that a kernel without tiles reads of an array. It is given arrays of one dim, but for stacks."""
    stacked = len(array.dims) > 1 and all(len(result.dims) == 1 for result in found.results)
    return array.bytes // array.dims[0] if stacked else array.bytes


def _read(value: Instruction, users: dict[str, list[Instruction]], whole: int) -> int:
    """Bytes read of a parameter, or of a view of it: slices where only slices and updates in place use it."""
    total = 0
    for user in users.get(value.name, ()):
        first = user.operands[0] == value.name
        if user.opcode in SLICES and first:
            total += sum(array.bytes for array in user.results)
        elif user.opcode in UPDATES and first and user.operands.count(value.name) == 1:
            continue  # written in part, in place
        elif user.opcode == "bitcast":
            total += _read(user, users, whole)
        else:
            return whole
    return min(total, whole)


def _roots(program: Program, body: list[Instruction]) -> list[Instruction]:
    root = next(part for part in body if part.root)
    if root.opcode != "tuple":
        return [root]
    return [program.operand(root, at) for at in range(len(root.operands))]


def _written(program: Program, root: Instruction) -> int:
    part = root
    while part.opcode in ("bitcast", "copy") and part.operands:
        part = program.operand(part, 0)
    if part.opcode in UPDATES:
        return _operand_bytes(program, part, UPDATES[part.opcode])
    return sum(array.bytes for array in root.results)


def _operand_bytes(program: Program, found: Instruction, at: int) -> int:
    return sum(array.bytes for array in program.operand(found, at).results)
