"""Disks that fill up or cannot be written. A fault counts when the disk was seen to refuse: every kind writes a byte
itself, and waits for the run to say that a save failed."""

import errno
import re
import resource
import shutil
import subprocess
from pathlib import Path
from random import Random

from outside import Started, fill, last_step, small_disk, take_inodes, wait_until
from reference import Bench, at_random_step, is_sentence, kind
from states import checkpoint_steps

GIVEN_UP = "WAS NOT WRITTEN"


def refuses(disk: Path) -> None:
    """The disk takes no more: not one byte, or not one file."""
    code = 0
    try:
        with open(disk / "one-more", "wb", buffering=0) as file:
            file.write(b"x" * 65536)
    except OSError as error:
        code = error.errno or 0
    assert code == errno.ENOSPC, f"the disk is not full: {code}"


def a_save_was_given_up(one: Started) -> None:
    """Wait until the run says so."""
    assert wait_until(lambda: GIVEN_UP in one.output, [one]), f"no save failed: {one.output[-800:]}"


def ends_the_same(bench: Bench, folder: Path, *, again: bool) -> None:
    """The end state is that of the undisturbed run, after starting `again` where it had to stop. Rows of metrics that a
    full disk refused are gone, and `verify` says so: losses are not compared."""
    if again:
        code, output = bench.trainer.finish(folder)
        assert code == 0, f"resumed, ended with {code}: {output[-800:]}"
    bench.same_arrays(folder, rows=False)
    assert not list((folder / "checkpoints").glob("*tmp*")), "temporary directories are left"


@kind(times=2, mounts=True)
def disk_full_for_a_while(bench: Bench, folder: Path, random: Random) -> str:
    with small_disk(folder, megabytes=64) as disk:
        one = bench.trainer.start(disk / "run")
        step = at_random_step(bench, disk / "run", [one], random)
        filler = fill(disk)
        refuses(disk)
        a_save_was_given_up(one)
        filler.unlink()
        (disk / "one-more").unlink(missing_ok=True)
        code = one.wait()
        assert code in (0, 1), f"ended with {code}: {one.output[-800:]}"
        is_sentence(one.output)
        ends_the_same(bench, disk / "run", again=bool(code) or last_step(disk / "run") != bench.steps)
    return f"full after step {step}: a save given up and said, exit {code}; end state bit-identical"


@kind(times=1, mounts=True)
def disk_full_to_the_end(bench: Bench, folder: Path, random: Random) -> str:
    with small_disk(folder, megabytes=64) as disk:
        one = bench.trainer.start(disk / "run")
        assert wait_until(lambda: bool(checkpoint_steps(disk / "run")), [one]), one.output[-400:]
        good = checkpoint_steps(disk / "run")
        filler = fill(disk)
        refuses(disk)
        code = one.wait()
        assert code == 1 and GIVEN_UP in one.said, f"ended with {code}: {one.output[-800:]}"
        is_sentence(one.output)
        assert checkpoint_steps(disk / "run")[-1] >= good[-1], "the last good checkpoint is gone"
        filler.unlink()
        (disk / "one-more").unlink(missing_ok=True)
        ends_the_same(bench, disk / "run", again=True)
    return "exit 1 with a sentence, the last good checkpoint stayed; resumed, end state bit-identical"


@kind(times=1, mounts=True)
def out_of_inodes(bench: Bench, folder: Path, random: Random) -> str:
    with small_disk(folder, megabytes=64, inodes=400) as disk:
        one = bench.trainer.start(disk / "run")
        at_random_step(bench, disk / "run", [one], random)
        taken = take_inodes(disk)
        refuses(disk)
        a_save_was_given_up(one)
        for path in taken:
            path.unlink()
        code = one.wait()
        assert code in (0, 1), f"ended with {code}: {one.output[-800:]}"
        is_sentence(one.output)
        ends_the_same(bench, disk / "run", again=bool(code))
    return f"a save given up and said, exit {code}; end state bit-identical"


@kind(times=1, mounts=True)
def read_only_directory(bench: Bench, folder: Path, random: Random) -> str:
    with small_disk(folder, megabytes=64) as disk:
        shutil.copytree(bench.whole, disk / "run")
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
        one = bench.trainer.start(disk / "run", "--steps", str(bench.steps + 10))
        code = one.wait()
        assert code in (1, 2) and "read-only" in one.said.lower(), f"ended with {code}: {one.output[-800:]}"
        is_sentence(one.output)
    return f"exit {code} with a sentence"


@kind(times=2, cores=2)
def one_ranks_disk_full(bench: Bench, folder: Path, random: Random) -> str:
    """One rank of two may write no file beyond a few bytes, as on a disk of its own that is full."""
    ranks = bench.trainer.start_all(folder, "--checkpoint.every", "2", ranks=2)
    at_random_step(bench, folder, ranks, random)
    victim = random.choice([1, 1, 0])  # rank 0 does more of a save itself
    room = ranks[victim].log.stat().st_size + 4096  # its own output goes on
    pid = ranks[victim].process.pid
    before = resource.prlimit(pid, resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
    try:
        a_save_was_given_up(ranks[0])
    finally:
        for one in ranks:
            if one.process.poll() is None:
                resource.prlimit(one.process.pid, resource.RLIMIT_FSIZE, before)
    codes = [one.wait() for one in ranks]
    assert set(codes) <= {0, 1} and len(set(codes)) == 1, f"ended with {codes}: {ranks[0].output[-800:]}"
    for one in ranks:
        is_sentence(one.output)
    line = ranks[0].said.partition(GIVEN_UP)[2]
    assert re.match(rf": (rank|process) {victim}:", line), f"does not say whose disk: {line[:400]}"
    if codes[0]:
        bench.goes_on(folder, "--checkpoint.every", "2", ranks=2)
    bench.same_arrays(folder, rows=False)
    assert not list((folder / "checkpoints").glob("*tmp*")), "temporary directories are left"
    return f"rank {victim}: a save given up and said by rank 0, exit {codes[0]}; end state bit-identical"
