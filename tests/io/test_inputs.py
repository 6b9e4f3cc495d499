"""Readers and writers of what comes from outside. Oracle: Python's own json for what is accepted, the file system
itself for what is followed."""

import contextlib
import json
import os
import resource
import signal
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte import io
from halfbyte.io.files import nesting_depth

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)


def depth_of(value):
    """The definition: by recursion over what was parsed."""
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inside is None else 1 + max(map(depth_of, inside), default=0)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(values)
def test_json_round_trip(value):
    text = json.dumps(value)
    assert io.parse_json(text, what="x") == value
    assert nesting_depth(text.encode()) == depth_of(value)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200) | st.text(alphabet='[]{}",:\\ 01eNa', max_size=200).map(str.encode))
def test_bytes_are_read_as_json_reads_them_or_refused(content):
    with contextlib.suppress(io.UnreadableFile):  # no other error passes
        assert io.parse_json(content, what="the file") == json.loads(content.decode())


@pytest.mark.slow
@pytest.mark.parametrize("opening", ["[", '{"a":', '[{"b":['])
def test_depth_is_refused_before_it_is_parsed(opening):
    with pytest.raises(io.UnreadableFile, match="levels deep"):
        io.parse_json(opening * 300_000, what="x")


def test_depth_counts_no_brackets_in_strings():
    assert io.parse_json(json.dumps(["[" * 5000]), what="x") == ["[" * 5000]
    assert depth_of(io.parse_json("[" * 5 + "]" * 5, what="x", depth=5)) == 5
    with pytest.raises(io.UnreadableFile, match="5 levels deep, more than the 4"):
        io.parse_json("[" * 5 + "]" * 5, what="x", depth=4)
    with pytest.raises(io.UnreadableFile):
        io.parse_json('"' + '\\"' * 2_000_000, what="x")  # quadratic in a naive scanner: minutes


def test_json_that_python_accepts_is_refused():
    for text, words in (
        ('{"a": 1, "a": 2}', "twice"), ("[NaN]", "NaN"), ("[-Infinity]", "Infinity"), (b"\xff", "not UTF-8"),
        ("[" + "1" * 5000 + "]", "not JSON"), ('"\ud800"', "not UTF-8"),
    ):  # fmt: skip
        with pytest.raises(io.UnreadableFile, match=words):
            io.parse_json(text, what="x")


def test_size_is_looked_at_first(tmp_path):
    (tmp_path / "whole").write_bytes(b"[" + b" " * 98 + b"]")
    assert io.read_json(tmp_path / "whole", most=100) == []
    (tmp_path / "big").write_bytes(b" " * 101)
    with pytest.raises(io.UnreadableFile, match="more than 100 bytes"):
        io.read_json(tmp_path / "big", most=100)
    with pytest.raises(io.UnreadableFile, match="more than the 100"):
        io.parse_json(b" " * 101, what="x", most=100)


def test_pipes_and_devices_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/zero"):
        with pytest.raises(io.UnreadableFile, match="not a regular file"):
            io.read_bytes(path)
    for opener, mode in ((io.open_regular_file, "rb"), (io.open_no_follow, "ab"), (io.open_no_follow, "a+b")):
        with pytest.raises(io.UnreadableFile, match="not a regular file"):
            open(tmp_path / "pipe", mode, opener=opener).close()
    with open(tmp_path / "fresh", "ab", opener=io.open_regular_file) as file:
        file.write(b"made where there was nothing")
    assert io.read_text(tmp_path / "fresh").startswith("made")


def test_whole_numbers_and_finite_ones():
    io.check_int("steps", 5, least=1)
    for value in (0, -1, 2**31, 1.0, True, 10**4000):
        with pytest.raises(ValueError, match="steps must be"):
            io.check_int("steps", value, least=1)
    io.check_float("rate", 1e-3, holds=True, wanted="above 0")
    for value in (float("nan"), float("inf"), -float("inf"), "1", None):
        with pytest.raises(ValueError, match="rate must be above 0"):
            io.check_float("rate", value, holds=True, wanted="above 0")


def test_unsafe_names_and_paths_are_refused():
    for name in ("", "..", "a/b", "../x", "a..b", ".hidden", "a\0b", "x" * 101, "-rf", "a b", "é"):
        with pytest.raises(ValueError, match="name must be"):
            io.check_run_name(name)
    for path in ("", "a\0b", "x" * 300, "a/" * 3000, "run\x1b[31m", "\ud800"):
        with pytest.raises(ValueError, match="--out"):
            io.validated_output_path(path, flag="--out")


def test_text_that_would_move_the_cursor():
    assert io.escape_control_chars("plain, naïve 数\n\t") == "plain, naïve 数\n\t"
    assert io.escape_control_chars("\x1b[2J\r\x9b\u202e\x7f") == "\\x1b[2J\\x0d\\x9b\\u202e\\x7f"


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.text())
def test_printable_text_has_no_control_characters(text):
    shown = io.escape_control_chars(text)
    assert not any((ord(c) < 32 and c not in "\n\t") or 0x7F <= ord(c) < 0xA0 for c in shown)
    shown.encode()  # no lone surrogate


def test_atomic_write_replaces_a_link(tmp_path):
    victim, path = tmp_path / "victim", tmp_path / "config.json"
    victim.write_text("precious")
    path.symlink_to(victim)
    io.atomic_write(path, "new")
    assert victim.read_text() == "precious"
    assert path.read_text() == "new" and not path.is_symlink()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "victim"]


def test_written_file_is_synced_before_its_rename(tmp_path, monkeypatch):
    """Or a power cut could leave an empty file under the new name."""
    calls, sync, replace = [], os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda descriptor: (calls.append("fsync"), sync(descriptor)))
    monkeypatch.setattr(Path, "replace", lambda self, target: (calls.append("rename"), replace(self, target))[1])
    io.atomic_write(tmp_path / "config.json", "new")
    assert calls == ["fsync", "rename"]


def test_lock_that_is_a_link_is_refused(tmp_path):
    (tmp_path / ".lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="symbolic link"):
        open(tmp_path / ".lock", "a+", opener=io.open_no_follow).close()
    assert not (tmp_path / "elsewhere").exists()


def test_failed_write_leaves_the_old_file_only(tmp_path):
    path = tmp_path / "config.json"
    io.atomic_write(path, "old")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            io.atomic_write(path, "x" * 5000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["config.json"]


def test_times_have_a_unit():
    times = {"12m": 720, "2h": 7200, "90s": 90, "0.5h": 1800, "14d": 1209600}
    assert {text: io.seconds_of(text, "budget") for text in times} == times
    for text in ("12", "m", "-3m", "0m", "1e9h", "12 parsecs", "99999999d"):
        with pytest.raises(ValueError, match="budget must be a time"):
            io.seconds_of(text, "budget")
