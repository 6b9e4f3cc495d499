"""Processes that are killed, and processes that are told to stop."""

import os
import shutil
import signal
import time
from pathlib import Path
from random import Random

from outside import Gate, Started, last_step, stop, wait_until
from reference import Bench, at_random_step, is_sentence, kind, refused
from states import checkpoint_steps

# Killed


@kind(times=2, run="hard")
def kill_during_a_step(bench: Bench, folder: Path, random: Random) -> str:
    one = bench.trainer.start(folder)
    step = at_random_step(bench, folder, [one], random)
    one.process.kill()
    assert one.wait() == -signal.SIGKILL, "it had ended before"
    bench.goes_on(folder)
    return f"killed after step {step}; resumed, bit-identical"


EACH_STEP = ("--checkpoint.every", "1")


def unfinished(folder: Path) -> list[Path]:
    """What a save that is not committed has made so far."""
    saves = (folder / "checkpoints").glob("*tmp*")
    return [Path(at, name) for save in saves for at, _, names in os.walk(save) for name in names]  # as they come and go


def saving_each_step(bench: Bench, folder: Path) -> tuple[Started, Gate]:
    """A run that saves after each step, and the gate that keeps it from its end until it was caught in a save."""
    gate = Gate(folder, 3 * bench.steps // 4, folder.with_name(f"{folder.name}-gate"))
    return bench.trainer.start(folder, *EACH_STEP, **gate.request), gate


def stop_in_a_save(bench: Bench, folder: Path, one: Started, random: Random) -> int:
    """Stop the process in the middle of a save; how many files it had written. It stands still by then, so what lies in
    the unfinished directory is what the save had done when the next signal comes."""
    at_random_step(bench, folder, [one], random)
    depth = random.randint(1, 20)

    def caught() -> bool:
        if len(unfinished(folder)) < depth:
            return False
        stop(one.process)
        if unfinished(folder):
            return True
        one.process.send_signal(signal.SIGCONT)  # it was committed meanwhile
        return False

    assert wait_until(caught, [one]), f"no save was ever seen under way: {one.output[-400:]}"
    return len(unfinished(folder))


@kind(times=4)
def kill_during_a_save(bench: Bench, folder: Path, random: Random) -> str:
    one, _ = saving_each_step(bench, folder)
    files, before = stop_in_a_save(bench, folder, one, random), checkpoint_steps(folder)
    one.process.kill()
    one.wait()
    assert unfinished(folder) and checkpoint_steps(folder) == before, "no save was under way"
    bench.goes_on(folder, *EACH_STEP)
    assert not unfinished(folder), "an unfinished save was left behind"
    return f"killed with {files} files of an uncommitted save on the disk; resumed, bit-identical, nothing left behind"


@kind(times=5)
def kill_before_a_file_operation(bench: Bench, folder: Path, random: Random) -> str:
    """Before any one of the operations with which a run makes its directory, its files and its checkpoints."""
    log = folder.with_suffix(".log")
    count = random.randint(1, bench.operations)
    one = bench.trainer.start(folder, under=folder, log=log, die_at=count)
    assert one.wait() == -signal.SIGKILL, f"it was not killed: {one.output[-400:]}"
    last = log.read_text().splitlines()[-1]
    bench.goes_on(folder)
    return f"killed before operation {count}, {last.replace('change ', '')}; bit-identical"


@kind(times=2)
def kill_during_a_restore(bench: Bench, folder: Path, random: Random) -> str:
    one = bench.trainer.start(folder)
    at_random_step(bench, folder, [one], random)
    one.process.kill()
    one.wait()
    before = last_step(folder)
    again = bench.trainer.start(folder)
    assert wait_until(lambda: "TFLOP/s counted" in again.output, [again]), again.output[-400:]
    time.sleep(random.random() * 0.5)
    again.process.kill()
    assert again.wait() == -signal.SIGKILL, "it had ended before"
    assert last_step(folder) <= before, "it had restored before"
    bench.goes_on(folder)
    return "killed again before its first step; resumed, bit-identical"


GONE = ("has gone", "no sign of life for", "has not answered for")


def kill_and_hear(ranks: list[Started], victim: int) -> None:
    """Kill one of two ranks: the other names it in a sentence, and ends. Its collective fails at once as a rule; where
    XLA leaves it unresolved, the peer's silence is what tells."""
    ranks[victim].process.kill()
    code = ranks[1 - victim].wait()
    output = ranks[1 - victim].output
    assert code == 1, f"the other rank ended with {code}: {output[-800:]}"
    is_sentence(output)
    last = output.splitlines()[-1]
    assert f"rank {victim}" in last and any(words in last for words in GONE), output[-400:]


@kind(times=2, cores=2)
def kill_one_rank(bench: Bench, folder: Path, random: Random) -> str:
    ranks = bench.trainer.start_all(folder, ranks=2)
    step = at_random_step(bench, folder, ranks, random)
    victim = random.randrange(2)
    kill_and_hear(ranks, victim)
    bench.goes_on(folder, ranks=2)
    return f"rank {victim} killed after step {step}; the other named it and ended; resumed, bit-identical"


# Told to stop


def none_lost(folder: Path) -> int:
    """The last step that was written down, which must be the one that was saved."""
    step = last_step(folder)
    assert checkpoint_steps(folder)[-1] == step, "steps were lost"
    return step


def told(bench: Bench, folder: Path, random: Random, numbers: list[signal.Signals]) -> str:
    one = bench.trainer.start(folder)
    at_random_step(bench, folder, [one], random)
    for number in numbers:
        one.process.send_signal(number)
        time.sleep(0.02)
    code = one.wait()
    assert code == 75, f"ended with {code}: {one.output[-800:]}"
    step = none_lost(folder)
    output = bench.goes_on(folder)
    assert f"after step {step}" in output, "it did not go on where it stopped"
    return f"exit 75 after step {step}, none lost; bit-identical"


@kind(times=2, run="hard")
def sigterm(bench: Bench, folder: Path, random: Random) -> str:
    return told(bench, folder, random, [signal.SIGTERM])


@kind(times=1)
def sigterm_twice(bench: Bench, folder: Path, random: Random) -> str:
    return told(bench, folder, random, [signal.SIGTERM, signal.SIGTERM])


@kind(times=1)
def sighup(bench: Bench, folder: Path, random: Random) -> str:
    return told(bench, folder, random, [signal.SIGHUP])


@kind(times=2)
def sigterm_during_a_save(bench: Bench, folder: Path, random: Random) -> str:
    one, gate = saving_each_step(bench, folder)
    files = stop_in_a_save(bench, folder, one, random)
    one.process.send_signal(signal.SIGTERM)
    one.process.send_signal(signal.SIGCONT)
    gate.open()
    code = one.wait()
    assert code == 75, f"ended with {code}: {one.output[-800:]}"
    none_lost(folder)
    bench.goes_on(folder, *EACH_STEP)
    return f"told with {files} files of a save on the disk: exit 75, none lost; bit-identical"


@kind(times=4)
def signal_before_the_loop(bench: Bench, folder: Path, random: Random) -> str:
    """At any moment of a start as a shell makes it: loading, finding devices, compiling."""
    number = random.choice([signal.SIGTERM, signal.SIGINT])
    one = bench.trainer.start(folder, cold=True)
    time.sleep(0.3 + 4.0 * random.random() ** 2)
    one.process.send_signal(number)
    code = one.wait()
    reached = last_step(folder)
    if code == -number:
        assert not one.output and not folder.exists(), f"killed by {number.name}, not stopped: {one.output[-400:]}"
        return f"{number.name} before Python was there"
    assert code == 75, f"{number.name}: ended with {code} after step {reached}: {one.output[-800:]}"
    is_sentence(one.output)
    if folder.exists():
        bench.goes_on(folder)
    return f"{number.name} after step {reached}: exit 75; bit-identical"


@kind(times=1)
def closed_pipe(bench: Bench, folder: Path, random: Random) -> str:
    reading, writing = os.pipe()
    one = bench.trainer.start(folder, "--log.every", "1", stdout=writing)
    os.close(writing)
    at_random_step(bench, folder, [one], random)
    os.close(reading)
    code = one.wait()
    assert code == 75, f"ended with {code}"
    none_lost(folder)
    bench.goes_on(folder, "--log.every", "1")
    return "exit 75 when nobody read any more, none lost; bit-identical"


@kind(times=1, cores=2)
def sigterm_one_rank(bench: Bench, folder: Path, random: Random) -> str:
    ranks = bench.trainer.start_all(folder, ranks=2)
    at_random_step(bench, folder, ranks, random)
    ranks[random.randrange(2)].process.send_signal(signal.SIGTERM)
    codes = [one.wait() for one in ranks]
    assert codes == [75, 75], f"ended with {codes}: {ranks[0].output[-600:]}"
    step = none_lost(folder)
    bench.goes_on(folder)
    return f"both exit 75 after step {step}, none lost; resumed as one process, bit-identical"


# Told to stop, and whoever told it is gone


@kind(times=2)
def supervisor_killed(bench: Bench, folder: Path, random: Random) -> str:
    """`launch` itself, with -9: it can tell its ranks nothing."""
    ranks = random.choice([1, 2])
    words = bench.trainer.words(folder)
    devices = ("--distributed.cpu-devices", str(2 // ranks))
    one = bench.trainer.command(folder.name, "launch", "--ranks", str(ranks), "--", *words, *devices)
    with bench.places.idle():
        step = at_random_step(bench, folder, [one], random)
    one.process.kill()
    one.wait()
    began = time.monotonic()
    while using(folder) and time.monotonic() < began + 30:
        time.sleep(0.1)
    assert not using(folder), f"ranks live on without their supervisor: {using(folder)}"
    bench.goes_on(folder)
    return f"{ranks} ranks, killed after step {step}: they ended; started again, bit-identical"


def using(folder: Path) -> list[int]:
    """Processes that were started with this run directory."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:  # it ended meanwhile
            continue
        if str(folder).encode() in words and b"from halfbyte.cli.main import entry; entry()" in words:
            found.append(int(path.parent.name))
    return found


@kind(times=3)
def directory_taken_away(bench: Bench, folder: Path, random: Random) -> str:
    """Removed, moved away, or replaced by an empty one, while the run trains and saves: what a save makes anew at the
    place is removed again."""
    how = random.choice(["removed", "moved", "replaced"])
    one = bench.trainer.start(folder, "--steps", "5000", *EACH_STEP)
    step = at_random_step(bench, folder, [one], random)
    away = folder.with_name(f"{folder.name}-away")
    folder.rename(away)  # at once, so that nothing is written meanwhile
    if how == "removed":
        shutil.rmtree(away)
    elif how == "replaced":
        folder.mkdir()
    code = one.wait()
    refused(one, code, str(folder), expect=1)
    left = [path.name for path in folder.rglob("*")] if folder.exists() else []
    assert not left, f"it wrote into a directory that is not its own: {left[:5]}"
    return f"{how} after step {step}: exit 1, named, nothing written at its place"
