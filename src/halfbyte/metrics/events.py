"""TensorBoard's event files, as far as scalars need them.

An event is a protocol buffer (TensorFlow's event.proto and summary.proto), a file a row of records: length, checksum,
event, checksum. Written by hand because it is this little: the packages that do it load PyTorch when it is there, which
takes seconds, and write from a thread behind a queue, on which a run waits for ever when the disk is full.

    Event    1 wall_time: double  2 step: varint  3 file_version: text  5 summary: Summary  7 session_log: SessionLog
    Summary  1 value, repeated: { 1 tag: text   2 simple_value: float }
    SessionLog  1 status: varint (1: START, which hides everything from this step on that was written before)
"""

import struct
from collections.abc import Mapping

VERSION = "brain.Event:2"
_VARINT, _DOUBLE, _BYTES, _FLOAT = 0, 1, 2, 5  # wire types
_MASK = 0xFFFFFFFF


def scalars(step: int, wall_time: float, values: Mapping[str, float]) -> bytes:
    """The event of one step's numbers."""
    summary = b"".join(
        _text(1, _text(1, tag.encode()) + _key(2, _FLOAT) + struct.pack("<f", _float32(value)))
        for tag, value in values.items()
    )
    return _head(wall_time) + _key(2, _VARINT) + _varint(step) + _text(5, summary)


def file_version(wall_time: float) -> bytes:
    """The event that a file begins with."""
    return _head(wall_time) + _text(3, VERSION.encode())


def restart(step: int, wall_time: float) -> bytes:
    """What was written for `step` and later by an earlier run does not count."""
    return _head(wall_time) + _key(2, _VARINT) + _varint(step) + _text(7, _key(1, _VARINT) + _varint(1))


def record(event: bytes) -> bytes:
    """The event as it stands in a file."""
    size = struct.pack("<Q", len(event))
    return size + _masked(size) + event + _masked(event)


def _head(wall_time: float) -> bytes:
    return _key(1, _DOUBLE) + struct.pack("<d", wall_time)


def _key(field: int, wire_type: int) -> bytes:
    return _varint(field << 3 | wire_type)


def _text(field: int, content: bytes) -> bytes:
    return _key(field, _BYTES) + _varint(len(content)) + content


def _varint(number: int) -> bytes:
    """Seven bits a byte, the lowest first; the top bit says that more follow."""
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _float32(value: float) -> float:
    """A number that float32 cannot hold is an infinity there."""
    return value if abs(value) <= 3.4e38 or value - value != 0 else float("inf") * (1 if value > 0 else -1)


def _crc_table() -> list[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)  # the polynomial of CRC-32C, reflected
        table.append(byte)
    return table


_CRC = _crc_table()


def crc32c(data: bytes) -> int:
    """CRC-32C, Castagnoli's polynomial."""
    found = _MASK
    for byte in data:
        found = _CRC[(found ^ byte) & 0xFF] ^ found >> 8
    return found ^ _MASK


def _masked(data: bytes) -> bytes:
    """The checksum of TensorFlow's records: CRC-32C, rotated by 15 bits, plus a constant."""
    found = crc32c(data)
    return struct.pack("<I", ((found >> 15 | found << 17) + 0xA282EAD8) & _MASK)
