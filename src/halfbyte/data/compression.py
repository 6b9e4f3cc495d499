"""Compressed files as a bounded stream of bytes, every byte of it covered by a checksum.

What a decompressor accepts need not be what was compressed: a flipped bit in the literals of a zstd frame gives other
text, and no error. The formats have checksums for it: gzip always, xz unless it was made with `--check=none`, zstd if
the frame has one (its command line writes it, most libraries do not). A file without one is refused, unless the caller
says `unchecked`: then other text in place of a damaged one is only found where it is not UTF-8 or not JSON.

A zstd block expands to at most 128 KiB, so blocks are walked one by one, and a small file that would fill the memory
arrives in pieces. A file that expands more than a thousandfold is no text.
"""

import gzip
import lzma
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

SUFFIXES = (".xz", ".gz", ".zst")
BLOCK = 1 << 20
MOST_EXPANSION = 1000
FREE_EXPANSION = 64 << 20
"""Bytes that any file may expand to, however small it is."""
MOST_MEMORY = 256 << 20
"""Bytes that a decompressor may take for itself: the window of zstd and the dictionary of xz."""

MAGIC = 0xFD2FB528
SKIPPABLE = range(0x184D2A50, 0x184D2A60)
BLOCKS_AT_ONCE = 64  # of at most 128 KiB each


class Unchecked(ValueError):
    """A compressed file without a checksum of its content."""


def decompressed(path: Path, *, name: str, unchecked: bool = False) -> Iterator[tuple[bytes, int]]:
    """(bytes, position in the stored file) pairs. A damaged file, or one without a checksum, is a ValueError that
    names it."""
    expanded = 0
    try:
        for block, position in _opened(path, unchecked):
            expanded += len(block)
            if expanded > FREE_EXPANSION + MOST_EXPANSION * position:
                raise ValueError(
                    f"{name}: expands more than {MOST_EXPANSION} fold ({expanded >> 20} MiB from {position:,} bytes); "
                    "no text does: leave it out"
                )
            yield block, position
    except Unchecked as problem:
        raise ValueError(
            f"{name}: {problem}, so a flipped bit in it would pass as other text; compress it again (`zstd` and `xz` "
            "write a checksum by themselves), or accept it as it is with --unchecked"
        ) from None
    except (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{name}: damaged or cut short, it does not decompress ({error}); fetch it again") from error


def _opened(path: Path, unchecked: bool) -> Iterator[tuple[bytes, int]]:
    with path.open("rb") as raw:
        suffix = path.suffix.lower()
        if suffix == ".zst":
            yield from _zstd(raw, unchecked)
        elif suffix == ".xz":
            yield from _xz(raw, unchecked)
        else:
            stream = cast(BinaryIO, gzip.GzipFile(fileobj=raw)) if suffix == ".gz" else raw
            while block := stream.read(BLOCK):
                yield block, raw.tell()


def _xz(raw: BinaryIO, unchecked: bool) -> Iterator[tuple[bytes, int]]:
    """Stream by stream; each has its own kind of checksum."""
    rest = raw.read(BLOCK)
    while rest:
        stream = lzma.LZMADecompressor(format=lzma.FORMAT_XZ, memlimit=MOST_MEMORY)
        while not stream.eof:
            yield stream.decompress(rest, max_length=BLOCK), raw.tell()
            if stream.check == lzma.CHECK_NONE and not unchecked:
                raise Unchecked("an xz stream without a checksum")
            rest = raw.read(BLOCK) if stream.needs_input else b""
            if stream.needs_input and not rest:
                raise EOFError("the last xz stream is incomplete")
        rest = (stream.unused_data or raw.read(BLOCK)).lstrip(b"\0")  # streams may be padded with zeros


def _zstd(raw: BinaryIO, unchecked: bool) -> Iterator[tuple[bytes, int]]:
    while start := raw.read(4):
        magic = int.from_bytes(start, "little")
        if magic in SKIPPABLE:
            _exactly(raw, int.from_bytes(_exactly(raw, 4), "little"))
        elif magic == MAGIC:
            yield from _zstd_frame(raw, start, unchecked)
        else:
            raise EOFError("not a zstd frame")


def _zstd_frame(raw: BinaryIO, start: bytes, unchecked: bool) -> Iterator[tuple[bytes, int]]:
    """One frame: header, blocks, checksum. Their sizes are read here, so that little is decompressed at a time and
    the end of the frame is known; a stream reader of the library takes a cut file for a complete one."""
    import zstandard

    head = start + _exactly(raw, 1)
    try:
        head += _exactly(raw, zstandard.frame_header_size(head + bytes(16)) - len(head))
        found = zstandard.get_frame_parameters(head)
        if not found.has_checksum and not unchecked:
            raise Unchecked("a zstd frame without a checksum")
        frame = zstandard.ZstdDecompressor(max_window_size=MOST_MEMORY).decompressobj()
        yield frame.decompress(head), raw.tell()
        for blocks in _zstd_blocks(raw):
            yield frame.decompress(blocks), raw.tell()
        if found.has_checksum:
            yield frame.decompress(_exactly(raw, 4)), raw.tell()
    except zstandard.ZstdError as error:
        raise EOFError(str(error)) from error
    if not frame.eof:
        raise EOFError("the last zstd frame is incomplete")


def _zstd_blocks(raw: BinaryIO) -> Iterator[bytes]:
    """Up to 64 blocks at a time, as stored, to the one that says it is the last."""
    gathered, last = [], False
    while not last:
        header = _exactly(raw, 3)
        number = int.from_bytes(header, "little")
        last, kind, size = bool(number & 1), number >> 1 & 3, number >> 3
        gathered.append(header + _exactly(raw, 1 if kind == 1 else size))  # kind 1: one byte, repeated `size` times
        if last or len(gathered) == BLOCKS_AT_ONCE:
            yield b"".join(gathered)
            gathered = []


def _exactly(raw: BinaryIO, size: int) -> bytes:
    found = raw.read(size)
    if len(found) < size:
        raise EOFError("the last zstd frame is incomplete")
    return found
