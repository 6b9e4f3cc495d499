"""Processes that are killed, and processes that are told to stop."""

import os
import signal
import time
from pathlib import Path
from random import Random

from outside import last_step, saved_state, wait_until
from reference import Bench, at_random_step, is_sentence, kind

# Killed


@kind(times=6)
def kill_during_a_step(bench: Bench, folder: Path, random: Random) -> str:
    one = bench.trainer.start(folder)
    step = at_random_step(bench, folder, [one], random)
    one.process.kill()
    one.wait()
    bench.goes_on(folder)
    return f"killed after step {step}; resumed, bit-identical"


@kind(times=5)
def kill_during_a_save(bench: Bench, folder: Path, random: Random) -> str:
    one = bench.trainer.start(folder)
    at_random_step(bench, folder, [one], random)
    wait_until(lambda: any((folder / "checkpoints").glob("*tmp*")), [one], 20)
    time.sleep(random.random() * 0.02)
    one.process.kill()
    one.wait()
    bench.goes_on(folder)
    assert not list((folder / "checkpoints").glob("*tmp*")), "an unfinished save was left behind"
    return "killed in a save; resumed, bit-identical, nothing left behind"


@kind(times=3)
def kill_during_a_restore(bench: Bench, folder: Path, random: Random) -> str:
    one = bench.trainer.start(folder)
    at_random_step(bench, folder, [one], random)
    one.process.kill()
    one.wait()
    again = bench.trainer.start(folder)
    wait_until(lambda: "TFLOP/s counted" in again.output, [again])
    time.sleep(random.random() * 0.5)
    again.process.kill()
    again.wait()
    bench.goes_on(folder)
    return "killed again while it restored; resumed, bit-identical"


@kind(times=3, cores=2)
def kill_one_rank(bench: Bench, folder: Path, random: Random) -> str:
    ranks = bench.trainer.start_all(folder, ranks=2)
    step = at_random_step(bench, folder, ranks, random)
    victim = random.randrange(2)
    ranks[victim].process.kill()
    code = ranks[1 - victim].wait(60)
    output = ranks[1 - victim].output
    assert code == 1, f"the other rank ended with {code}: {output[-800:]}"
    is_sentence(output)
    assert f"rank {victim}" in output.splitlines()[-1] and "has gone" in output, output[-400:]
    bench.goes_on(folder, ranks=2)
    return f"rank {victim} killed after step {step}; the other named it and ended; resumed, bit-identical"


# Told to stop


def told(bench: Bench, folder: Path, random: Random, numbers: list[signal.Signals]) -> str:
    one = bench.trainer.start(folder)
    at_random_step(bench, folder, [one], random)
    for number in numbers:
        one.process.send_signal(number)
        time.sleep(0.02)
    code = one.wait()
    assert code == 75, f"ended with {code}: {one.output[-800:]}"
    step = last_step(folder)
    assert saved_state(folder)[0] == step, "steps were lost"
    output = bench.goes_on(folder)
    assert f"after step {step}" in output, "it did not go on where it stopped"
    return f"exit 75 after step {step}, none lost; bit-identical"


@kind(times=4)
def sigterm(bench: Bench, folder: Path, random: Random) -> str:
    return told(bench, folder, random, [signal.SIGTERM])


@kind(times=2)
def sigterm_twice(bench: Bench, folder: Path, random: Random) -> str:
    return told(bench, folder, random, [signal.SIGTERM, signal.SIGTERM])


@kind(times=2)
def sighup(bench: Bench, folder: Path, random: Random) -> str:
    return told(bench, folder, random, [signal.SIGHUP])


@kind(times=2)
def sigterm_during_a_save(bench: Bench, folder: Path, random: Random) -> str:
    one = bench.trainer.start(folder)
    at_random_step(bench, folder, [one], random)
    wait_until(lambda: any((folder / "checkpoints").glob("*tmp*")), [one], 20)
    one.process.send_signal(signal.SIGTERM)
    code = one.wait()
    assert code in (75, 0), f"ended with {code}: {one.output[-800:]}"
    assert saved_state(folder)[0] == last_step(folder), "steps were lost"
    bench.goes_on(folder)
    return "exit 75 out of a save, none lost; bit-identical"


@kind(times=3)
def sigterm_before_the_loop(bench: Bench, folder: Path, random: Random) -> str:
    one = bench.trainer.start(folder)
    time.sleep(1.0 + 3.0 * random.random())
    one.process.send_signal(signal.SIGTERM)
    code = one.wait()
    assert code == 75, f"ended with {code}: {one.output[-800:]}"
    bench.goes_on(folder)
    return "exit 75 before the first step or after it; bit-identical"


@kind(times=2)
def closed_pipe(bench: Bench, folder: Path, random: Random) -> str:
    reading, writing = os.pipe()
    one = bench.trainer.start(folder, stdout=writing)
    os.close(writing)
    at_random_step(bench, folder, [one], random)
    os.close(reading)
    code = one.wait()
    assert code == 75, f"ended with {code}"
    assert saved_state(folder)[0] == last_step(folder), "steps were lost"
    bench.goes_on(folder)
    return "exit 75 when nobody read any more, none lost; bit-identical"


@kind(times=2, cores=2)
def sigterm_one_rank(bench: Bench, folder: Path, random: Random) -> str:
    ranks = bench.trainer.start_all(folder, ranks=2)
    at_random_step(bench, folder, ranks, random)
    ranks[random.randrange(2)].process.send_signal(signal.SIGTERM)
    codes = [one.wait() for one in ranks]
    assert codes == [75, 75], f"ended with {codes}: {ranks[0].output[-600:]}"
    step = last_step(folder)
    assert saved_state(folder)[0] == step, "steps were lost"
    bench.goes_on(folder, ranks=2)
    return f"both exit 75 after step {step}, none lost; bit-identical"
