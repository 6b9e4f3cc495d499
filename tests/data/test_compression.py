"""Compressed input under attack: flipped bits, files cut anywhere, bombs. Oracle: the text that was compressed."""

import functools
import gzip
import lzma
import random

import pytest
import zstandard

from halfbyte.data import compression
from halfbyte.data.compression import decompress_blocks

TEXT = " ".join(f"{number} sheep and {number * number % 977} goats" for number in range(3000)).encode()


def zst(data=TEXT, *, checksum=True, **settings):
    return zstandard.ZstdCompressor(write_checksum=checksum, **settings).compress(data)


STORED = {
    "a.txt.zst": zst(),
    "many.txt.zst": b"".join(zst(TEXT[at : at + 9000]) for at in range(0, len(TEXT), 9000)),
    "skippable.txt.zst": b"\x50\x2a\x4d\x18\x05\x00\x00\x00hello" + zst(),
    "stored.txt.zst": zst(random.Random(0).randbytes(300_000)),
    "a.txt.gz": gzip.compress(TEXT),
    "a.txt.xz": lzma.compress(TEXT),
    "two.txt.xz": lzma.compress(TEXT[:5000]) + lzma.compress(TEXT[5000:]) + bytes(8),
}


def read(folder, name, content, **settings):
    (folder / name).write_bytes(content)
    return b"".join(block for block, _ in decompress_blocks(folder / name, name=name, **settings))


def test_compressed_text_comes_back(tmp_path):
    for name, stored in STORED.items():
        expected = random.Random(0).randbytes(300_000) if name == "stored.txt.zst" else TEXT
        assert read(tmp_path, name, stored) == expected, name


@pytest.mark.parametrize("name", ["a.txt.zst", "a.txt.gz", "two.txt.xz"])
def test_flipped_bit_never_passes_as_other_text(tmp_path, name):
    """150 seeded flips a file: refused, or in a place that holds nothing of the text."""
    dice, stored = random.Random(name), STORED[name]
    expected = read(tmp_path, name, stored)
    refused = 0
    for _ in range(150):
        at = dice.randrange(8 * len(stored))
        flipped = bytearray(stored)
        flipped[at // 8] ^= 1 << at % 8
        try:
            assert read(tmp_path, name, bytes(flipped)) == expected
        except ValueError:
            refused += 1
    assert refused > 100


@pytest.mark.parametrize("name", ["a.txt.zst", "many.txt.zst", "a.txt.gz", "two.txt.xz"])
def test_cut_file_is_refused(tmp_path, name):
    """At 60 places; only between two frames can a cut not be seen."""
    dice, stored = random.Random(name), STORED[name]
    frames = "many" in name or "two" in name
    for _ in range(60):
        at = dice.randrange(1, len(stored))
        if frames and read_or_none(tmp_path, name, stored[:at]) is not None:
            assert read(tmp_path, name, stored[:at]) == TEXT[: len(read(tmp_path, name, stored[:at]))]
        elif not frames:
            with pytest.raises(ValueError, match="damaged or cut short"):
                read(tmp_path, name, stored[:at])


def read_or_none(folder, name, content):
    try:
        return read(folder, name, content)
    except ValueError:
        return None


def test_stream_without_checksum_needs_unchecked(tmp_path):
    for name, stored in {
        "a.txt.zst": zst(checksum=False),
        "b.txt.zst": zst() + zst(checksum=False),
        "a.txt.xz": lzma.compress(TEXT, check=lzma.CHECK_NONE),
    }.items():
        with pytest.raises(ValueError, match=f"{name}: .* without a checksum.*--unchecked"):
            read(tmp_path, name, stored)
        assert read(tmp_path, name, stored, unchecked=True).startswith(TEXT)


@pytest.mark.parametrize("name, open_stream, blocks", [
    ("a.txt.zst", lambda raw: zstandard.ZstdCompressor(write_checksum=True).stream_writer(raw), 128),
    ("a.txt.xz", functools.partial(lzma.open, mode="wb", preset=0), 20),
])  # fmt: skip
def test_bomb_is_refused_after_a_few_blocks(tmp_path, name, open_stream, blocks):
    """Zeros: 512 MiB as zstd, 80 MiB as xz. Deflate cannot expand much further than a thousandfold."""
    path, sizes = tmp_path / name, []
    with path.open("wb") as raw, open_stream(raw) as out:
        for _ in range(blocks):
            out.write(bytes(1 << 22))

    def read_all():
        sizes.extend(len(block) for block, _ in decompress_blocks(path, name=name))

    with pytest.raises(ValueError, match="expands more than 1000 fold"):
        read_all()
    assert max(sizes) <= 1 << 24
    assert sum(sizes) <= compression.FREE_EXPANSION + compression.MAX_EXPANSION * path.stat().st_size


def test_too_large_window_is_refused(tmp_path):
    settings = zstandard.ZstdCompressionParameters.from_level(3, window_log=30, enable_ldm=True, write_checksum=1)
    stored = zstandard.ZstdCompressor(compression_params=settings).compressobj()
    data = stored.compress(TEXT) + stored.flush()
    with pytest.raises(ValueError, match="does not decompress"):
        read(tmp_path, "a.txt.zst", data)
