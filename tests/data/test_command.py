"""`halfbyte data ...` as a person types it: exit codes, --json, one paragraph for bad input."""

import json
import os
import signal
import subprocess
import sys

import pytest

from halfbyte.cli.main import main


@pytest.fixture(scope="module")
def made(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("command") / "set"
    assert main(["data", "prepare", str(corpus), "--tokenizer", "bytes", "--out", str(out), "--seq-len", "64"]) == 0
    return out


def answer(capfd, *argv: str) -> tuple[int, dict]:
    capfd.readouterr()
    code = main([*argv, "--json"])
    return code, json.loads(capfd.readouterr().out)


def test_prepare_again_says_up_to_date(corpus, made, capfd):
    argv = ["data", "prepare", str(corpus), "--tokenizer", "bytes", "--out", str(made), "--seq-len", "64"]
    assert main(argv) == 0
    assert "is up to date" in capfd.readouterr().out
    code, said = answer(capfd, *argv)
    assert code == 0 and said["fresh"] is False and said["vocab_size"] == 257


def test_show_and_verify_count_the_same(made, capfd):
    code, shown = answer(capfd, "data", "show", str(made))
    assert code == 0 and set(shown["splits"]["train"]) == {"default", "laws", "news"}
    code, verified = answer(capfd, "data", "verify", str(made))
    assert code == 0 and verified.pop("intact") and verified == shown


def test_sample_shows_text(made, capfd):
    code, said = answer(capfd, "data", "sample", str(made), "--rows", "2", "--split", "validation")
    assert code == 0 and len(said["rows"]) == 2 and all("".join(row["documents"]) for row in said["rows"])


def test_bad_input_is_one_paragraph_and_exit_2(corpus, made, tmp_path, capfd):
    argv = ["data", "prepare", str(corpus), "--tokenizer", "bytes", "--out", str(made), "--seq-len", "65"]
    for command in (
        argv,
        ["data", "show", str(tmp_path)],
        ["data", "prepare", "absent", "--tokenizer", "x", "--out", "y"],
    ):
        assert main(command) == 2
        error = capfd.readouterr().err
        assert error.startswith("halfbyte: ") and "Traceback" not in error


def test_bad_line_in_a_worker_is_bad_input_too(tmp_path, capfd):
    (tmp_path / "a.jsonl").write_text("nonsense\n")
    argv = ["data", "prepare", str(tmp_path), "--tokenizer", "bytes", "--out", str(tmp_path / "set"), "--workers", "2"]
    assert main(argv) == 2
    assert "line 1: not JSON" in capfd.readouterr().err


def test_damaged_set_fails_verification(made, capfd):
    shard = next(iter(sorted(made.glob("*.array_record"))))
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1])
    assert main(["data", "verify", str(made)]) == 2
    assert f"{shard.name}: shard truncated" in capfd.readouterr().err.replace("\n  ", " ")
    shard.write_bytes(whole)


# Half way, with a shard written and no manifest yet; the first line for a test run that was itself started in the
# background and ignores SIGINT, as its children would too.
STANDS_STILL = """if True:
    import os, signal, sys
    signal.signal(signal.SIGINT, signal.default_int_handler)
    from halfbyte.cli.main import main

    def hook(event, arguments):
        if event == "open" and "manifest.json" in str(arguments[0]) and ".partial-" in str(arguments[0]):
            os.kill(os.getpid(), signal.SIGSTOP)

    sys.addaudithook(hook)
    sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_preparation_leaves_nothing(tmp_path, number):
    (tmp_path / "a.txt").write_bytes(b"words and words, line after line\n" * 1000)
    files = [str(tmp_path / "a.txt"), "--out", str(tmp_path / "set")]
    argv = ["data", "prepare", *files, "--tokenizer", "bytes", "--workers", "1"]
    work = subprocess.Popen([sys.executable, "-c", STANDS_STILL, *argv], stderr=subprocess.PIPE, text=True)
    os.waitid(os.P_PID, work.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    assert list(tmp_path.glob(".set.partial-*/*.array_record")), "it does not stand still where it should"
    work.send_signal(number)
    work.send_signal(signal.SIGCONT)
    assert "was interrupted" in work.communicate(timeout=1800)[1]
    assert work.returncode == 1
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]
