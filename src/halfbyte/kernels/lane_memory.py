"""Lane ops of untiled kernels: a body computes its position and loads and stores memory itself.

A body runs once per *lane* of every program. On the GPU its PTX is one inline-assembly block; on the host the same body
runs once in NumPy, over arrays [programs, warps, blocks, lanes of a block], so that tests see the addresses, masks and
shuffles that the GPU will use. An address is an array and a byte offset. A load or store moves 1, 2 or 4 units of 1, 2
or 4 bytes; a lane whose `where` is false reads zero and writes nothing.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from halfbyte.kernels.lane_ops import Address
from halfbyte.kernels.numpy_lanes import NumpyLaneOps
from halfbyte.kernels.ptx_lanes import PtxLaneOps, PtxRegister, ptx_instruction

SHARED_ARRAY_ID = -1  # array number of a program's shared memory
GROUP_BARRIER = "bar.sync barrier, 128;"  # synchronizes the 128 lanes of one program


class PtxLaneMemoryOps(PtxLaneOps):
    """Emits the PTX of a whole kernel. Operand i of the assembly block is the address of array i.

    For a stack slice, `layers[i]` is (n, bytes per layer): operand i is the address of the stack, and operand n points
    to the layer index.
    """

    def __init__(self, columns: int, lanes: int | None = None, layers: Mapping[int, tuple[int, int]] | None = None):
        super().__init__(columns, lanes)
        self.count["d"] = 0
        self.shared_bytes = 0
        self.layers = layers or {}

    def kernel_source(self, programs: int, blocks: int, groups: int) -> str:
        """Returns the PTX of a kernel of `blocks` CTAs of `groups` warpgroups, each of which loops over programs."""
        declared = {"r": ".b32", "f": ".f32", "h": ".b16", "p": ".pred", "d": ".b64"}
        lines = [f".reg {declared[k]} {k}<{n}>;" for k, n in self.count.items() if n]
        if self.shared_bytes:
            lines.append(f".shared .align 16 .b8 shared_tile[{groups * self.shared_bytes}];")
        return "{\n" + "\n".join([*lines, *self._begin(programs, blocks, groups), *self._end(programs)]) + "\n}"

    def _begin(self, programs: int, blocks: int, groups: int) -> list[str]:
        """Returns the prologue: a warpgroup's first program, named barrier (0 is the CTA's) and shared memory."""
        lines = [
            ".reg .b32 program, following, thread, group, barrier, shared_start;",
            ".reg .pred more;",
            "mov.u32 thread, %tid.x;",
            "mov.u32 program, %ctaid.x;",
            f"mov.u32 shared_start, {'shared_tile' if self.shared_bytes else 0};",
            "mov.u32 barrier, 0;",
        ]
        for array, (index_operand, layer_bytes) in self.layers.items():
            lines += [
                f".reg .b64 layer{array};",
                f"ld.global.nc.b32 group, [${index_operand}];",
                f"cvt.u64.u32 layer{array}, group;",
                # 64-bit: a layer may have 4 GiB or more
                f"mad.lo.u64 layer{array}, layer{array}, {layer_bytes}, ${array};",
            ]
        if groups > 1:
            lines += [
                "shr.u32 group, thread, 7;",
                "and.b32 thread, thread, 127;",
                f"mad.lo.u32 program, program, {groups}, group;",
                f"mad.lo.u32 shared_start, group, {self.shared_bytes}, shared_start;",
                "add.u32 barrier, group, 1;",
            ]
        bounds_check = [f"setp.ge.u32 more, program, {programs};", "@more bra.uni done;"]
        return [*lines, *bounds_check, "again:", f"add.u32 following, program, {blocks * groups};", *self.lines]

    def _end(self, programs: int) -> list[str]:
        """Returns the epilogue: advance to the next program once all lanes have read shared memory."""
        lines = [GROUP_BARRIER] if self.shared_bytes else []
        lines += ["mov.u32 program, following;", f"setp.lt.u32 more, program, {programs};"]
        return [*lines, "@more bra.uni again;", "done:"]

    def program_id(self) -> PtxRegister:
        return PtxRegister("program", "r")

    def next_program_id(self) -> PtxRegister:
        """Returns the id of the program that these lanes run next; it may be past the last."""
        return PtxRegister("following", "r")

    def prefetch(self, at, where):
        """Prefetches the address into L2."""
        self.lines.append(f"@{where.name} prefetch.global.L2 [{at.offset.name}];")

    def thread_id(self) -> PtxRegister:
        """Returns the index of this lane in its program."""
        return PtxRegister("thread", "r")

    def u32_div_const(self, a, k):
        """Returns a // k for a < 2**31, by a multiplication (Granlund and Montgomery, 1994), as ptxas would divide."""
        bits = (k - 1).bit_length()
        if k == 1 << bits:
            return self.shr(a, bits) if bits else a
        return self.shr(self.multiply_high(a, (1 << (31 + bits)) // k + 1), bits - 1)

    def u32_mod_const(self, a, k):
        return self.imad(self.u32_div_const(a, k), -k, a)

    multiply_high = ptx_instruction("mul.hi.u32", "rrr")
    u32_max = ptx_instruction("max.u32", "rrr")  # unsigned

    def logical_and(self, p, q):
        out = self.reg("p")
        self.lines.append(f"and.pred {out.name}, {p.name}, {q.name};")
        return out

    def predicate_to_u32(self, p):
        """Returns 1 where p is true, else 0."""
        out = self.reg("r")
        self.lines.append(f"selp.b32 {out.name}, 1, 0, {p.name};")
        return out

    def address(self, array, index, size):
        """Returns the address of element `index` of an array whose elements have `size` bytes."""
        text = self._text(index, "r")
        if array == SHARED_ARRAY_ID:
            out = self.reg("r")
            self.lines.append(f"mad.lo.u32 {out.name}, {text}, {size}, shared_start;")
            return Address(array, out)
        out = self.reg("d")
        base = f"layer{array}" if array in self.layers else f"${array}"
        self.lines.append(f"mad.wide.u32 {out.name}, {text}, {size}, {base};")
        return Address(array, out)

    def load(self, at, count=1, *, offset=0, size=4, where=None):
        """Loads `count` units of `size` bytes, each into a word of its own."""
        words = [self.reg("r") for _ in range(count)]
        if where is not None:
            self.lines += [f"mov.b32 {w.name}, 0;" for w in words]
        space = "shared" if at.array == SHARED_ARRAY_ID else "global.nc"
        vector = "" if count == 1 else f".v{count}"
        target = words[0].name if count == 1 else "{" + ", ".join(w.name for w in words) + "}"
        kind = {4: "b32", 2: "u16", 1: "u8"}[size]
        if size == 2:  # a 16-bit load needs a 16-bit register
            halves = [self.reg("h") for _ in range(count)]
            if where is not None:
                self.lines += [f"mov.b16 {h.name}, 0;" for h in halves]
            target = halves[0].name if count == 1 else "{" + ", ".join(h.name for h in halves) + "}"
        self.lines.append(f"{_predicate_prefix(where)}ld.{space}{vector}.{kind} {target}, [{at.offset.name}+{offset}];")
        if size == 2:
            self.lines += [f"cvt.u32.u16 {w.name}, {h.name};" for w, h in zip(words, halves, strict=True)]
        return words

    def store(self, at, words, *, offset=0, size=4, where=None):
        """Stores the low `size` bytes of each word, contiguously."""
        names = [self._text(w, "r") for w in words]
        if size == 2:
            halves = [self.reg("h") for _ in names]
            self.lines += [f"cvt.u16.u32 {h.name}, {n};" for h, n in zip(halves, names, strict=True)]
            names = [h.name for h in halves]
        space = "shared" if at.array == SHARED_ARRAY_ID else "global"
        vector = "" if len(names) == 1 else f".v{len(names)}"
        source = names[0] if len(names) == 1 else "{" + ", ".join(names) + "}"
        kind = {4: "b32", 2: "u16", 1: "u8"}[size]
        self.lines.append(f"{_predicate_prefix(where)}st.{space}{vector}.{kind} [{at.offset.name}+{offset}], {source};")

    def shuffle_down_1(self, x):
        """Returns the value of the next lane of the warp; the last lane gets its own."""
        return self._op("shfl.sync.down.b32", "rrrrr", x, 1, 31, 0xFFFFFFFF)

    def shuffle_from_block(self, x, tile):
        """Returns the value of the lane with the same index in block `tile` of the warp."""
        return self._op("shfl.sync.idx.b32", "rrrrr", x, tile * self.lanes, ((self.lanes - 1) << 8) | 31, 0xFFFFFFFF)

    def alloc_shared(self, count: int) -> int:
        """Allocates `count` bytes of shared memory; returns their offset, a multiple of 16."""
        start = self.shared_bytes
        self.shared_bytes += -(-count // 16) * 16
        return start

    def barrier(self) -> None:
        self.lines.append(GROUP_BARRIER)

    def fori_loop(self, count, body, init):
        """Returns the float32 carry after `carry = body(i, carry)` for i in range(count); not unrolled."""
        index, more, label = self.word(0), self.reg("p"), f"turn_{len(self.lines)}"
        carry = [self.reg("f") for _ in init]
        self._set(carry, init)
        self.lines.append(f"{label}:")
        self._set(carry, body(index, carry))
        self.lines += [
            f"add.u32 {index.name}, {index.name}, 1;",
            f"setp.lt.u32 {more.name}, {index.name}, {count};",
            f"@{more.name} bra.uni {label};",
        ]
        return carry

    def _set(self, registers, values):
        texts = [self._text(value, "f") for value in values]
        self.lines += [f"mov.f32 {r.name}, {text};" for r, text in zip(registers, texts, strict=True)]


def _predicate_prefix(where):
    return "" if where is None else f"@{where.name} "


class NumpyLaneMemoryOps(NumpyLaneOps):
    """Evaluates all lanes of all programs at once; `arrays` are flat uint8 arrays, inputs and outputs."""

    def __init__(self, columns: int, arrays: Sequence[np.ndarray], programs: int, warps: int, lanes: int | None = None):
        super().__init__(columns)
        self.lanes = lanes = lanes or 16 // columns
        self.shape = (programs, warps, 32 // lanes, lanes)
        self.arrays, self.shared_bytes = arrays, 0
        self.shared = np.zeros((programs, 64 * 1024), np.uint8)

    def _along(self, axes: tuple[int, ...]) -> np.ndarray:
        indices = np.arange(np.prod([self.shape[a] for a in axes]), dtype=np.uint32)
        shape = [n if a in axes else 1 for a, n in enumerate(self.shape)]
        return np.broadcast_to(indices.reshape(shape), self.shape)

    def program_id(self) -> np.ndarray:
        return self._along((0,))

    def next_program_id(self) -> np.ndarray:
        return self.program_id() + np.uint32(1)

    def prefetch(self, at, where):
        """Does nothing: the host has no L2 to prefetch into."""

    def thread_id(self) -> np.ndarray:
        return self._along((1, 2, 3))

    u32_div_const, u32_mod_const = PtxLaneMemoryOps.u32_div_const, PtxLaneMemoryOps.u32_mod_const

    def multiply_high(self, a, b):
        return ((self.as_u32(a).astype(np.uint64) * self.as_u32(b).astype(np.uint64)) >> np.uint64(32)).astype(
            np.uint32
        )

    def u32_max(self, a, b):
        return np.maximum(self.as_u32(a), self.as_u32(b))

    def logical_and(self, p, q):
        return p & q

    def predicate_to_u32(self, p):
        return p.astype(np.uint32)

    def address(self, array, index, size):
        return Address(array, np.broadcast_to(self.as_u32(index).astype(np.int64) * size, self.shape))

    def _bytes(self, at: Address) -> np.ndarray:
        return self.shared if at.array == SHARED_ARRAY_ID else self.arrays[at.array]

    def _byte_indices(self, at, start, where):
        active = np.broadcast_to(True if where is None else where, self.shape)
        offsets = at.offset[active] + start
        return (self.program_id()[active], offsets) if at.array == SHARED_ARRAY_ID else (offsets,)

    def load(self, at, count=1, *, offset=0, size=4, where=None):
        active, words = np.broadcast_to(True if where is None else where, self.shape), []
        _check_aligned(at.offset[active] + offset, count * size)
        for unit in range(count):
            word = np.zeros(self.shape, np.uint32)
            for byte in range(size):
                indices = self._byte_indices(at, offset + unit * size + byte, where)
                word[active] |= self._bytes(at)[indices].astype(np.uint32) << np.uint32(8 * byte)
            words.append(word)
        return words

    def store(self, at, words, *, offset=0, size=4, where=None):
        active = np.broadcast_to(True if where is None else where, self.shape)
        _check_aligned(at.offset[active] + offset, len(words) * size)
        for unit, word in enumerate(words):
            bits = np.broadcast_to(self.as_u32(word), self.shape)[active]
            for byte in range(size):
                indices = self._byte_indices(at, offset + unit * size + byte, where)
                self._bytes(at)[indices] = (bits >> np.uint32(8 * byte)).astype(np.uint8)

    def shuffle_xor(self, x, bit):
        lanes = self.as_u32(x).reshape(*self.shape[:2], 32)
        return lanes[..., np.arange(32) ^ bit].reshape(self.shape)

    def shuffle_down_1(self, x):
        lanes = self.as_u32(x).reshape(*self.shape[:2], 32)
        return lanes[..., np.minimum(np.arange(32) + 1, 31)].reshape(self.shape)

    def shuffle_from_block(self, x, tile):
        return np.broadcast_to(self.as_u32(x)[:, :, tile : tile + 1], self.shape)

    alloc_shared = PtxLaneMemoryOps.alloc_shared

    def barrier(self) -> None:
        """Does nothing: all lanes are always at the same instruction."""

    def fori_loop(self, count, body, carry):
        for index in range(count):
            carry = body(np.uint32(index), carry)
        return list(carry)


def _check_aligned(offsets: np.ndarray, unit: int) -> None:
    if (offsets % unit).any():
        raise ValueError(f"a kernel moves {unit} bytes at once at a place that is no multiple of them")
