"""Compressed files as a bounded stream of bytes, every byte of it covered by a checksum.

What a decompressor accepts need not be what was compressed: a flipped bit in the literals of a zstd frame gives other
text, and no error. The formats have checksums for it: gzip always, xz unless it was made with `--check=none`, zstd if
the frame has one (its command line writes it, most libraries do not). A file without one is refused, unless the caller
says `unchecked`: then other text in place of a damaged one is only found where it is not UTF-8 or not JSON.

A file that expands more than a thousandfold is no text. It is refused before it fills the memory: zstd gets 256 bytes
at a time, which hold at most 64 blocks of 128 KiB.
"""

import gzip
import lzma
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

SUFFIXES = (".xz", ".gz", ".zst")
READ_BLOCK_BYTES = 1 << 20
MAX_EXPANSION = 1000
FREE_EXPANSION = 64 << 20
"""Bytes that any file may expand to, however small it is."""
MAX_DECODER_BYTES = 256 << 20
"""Bytes that xz may take for its dictionary; the window of zstd has a limit of its own, 128 MiB."""

ZSTD_READ = 256
ZSTD_HEADER = 18
"""Bytes of the longest header of a zstd frame."""
ZSTD_SKIPPABLE_MAGIC = range(0x184D2A50, 0x184D2A60)


class MissingChecksumError(ValueError):
    """A compressed file without a checksum of its content."""


def decompress_blocks(path: Path, *, name: str, unchecked: bool = False) -> Iterator[tuple[bytes, int]]:
    """(bytes, position in the stored file) pairs. A damaged file, or one without a checksum, is a ValueError that
    names it."""
    expanded = 0
    try:
        for block, position in _opened(path, unchecked):
            expanded += len(block)
            if expanded > FREE_EXPANSION + MAX_EXPANSION * position:
                raise ValueError(
                    f"{name}: expands more than {MAX_EXPANSION} fold ({expanded >> 20} MiB from {position:,} bytes); "
                    "no text does: leave it out"
                )
            yield block, position
    except MissingChecksumError as problem:
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
            while block := stream.read(READ_BLOCK_BYTES):
                yield block, raw.tell()


def _xz(raw: BinaryIO, unchecked: bool) -> Iterator[tuple[bytes, int]]:
    """Stream by stream; each has its own kind of checksum."""
    rest = raw.read(READ_BLOCK_BYTES)
    while rest:
        stream = lzma.LZMADecompressor(format=lzma.FORMAT_XZ, memlimit=MAX_DECODER_BYTES)
        while not stream.eof:
            yield stream.decompress(rest, max_length=READ_BLOCK_BYTES), raw.tell()
            if stream.check == lzma.CHECK_NONE and not unchecked:
                raise MissingChecksumError("an xz stream without a checksum")
            rest = raw.read(READ_BLOCK_BYTES) if stream.needs_input else b""
            if stream.needs_input and not rest:
                raise EOFError("the last xz stream is incomplete")
        rest = (stream.unused_data or raw.read(READ_BLOCK_BYTES)).lstrip(b"\0")  # streams may be padded with zeros


def _zstd(raw: BinaryIO, unchecked: bool) -> Iterator[tuple[bytes, int]]:
    """Frame by frame. `decompressobj` knows the end of its frame; the library's stream reader takes a cut file for a
    complete one."""
    import zstandard

    rest, held = raw.read(ZSTD_READ), bytearray()
    try:
        while rest:
            skippable = int.from_bytes(rest[:4], "little") in ZSTD_SKIPPABLE_MAGIC
            if not (unchecked or skippable or zstandard.get_frame_parameters(rest[:ZSTD_HEADER]).has_checksum):
                raise MissingChecksumError("a zstd frame without a checksum")
            frame = zstandard.ZstdDecompressor().decompressobj()
            while not frame.eof:
                if not rest:
                    raise EOFError("the last zstd frame is incomplete")
                held += frame.decompress(rest)
                if frame.eof or len(held) >= READ_BLOCK_BYTES:
                    yield bytes(held), raw.tell()
                    held.clear()
                rest = frame.unused_data if frame.eof else raw.read(ZSTD_READ)
            rest += raw.read(ZSTD_READ - len(rest))
    except zstandard.ZstdError as error:
        raise EOFError(str(error)) from error
