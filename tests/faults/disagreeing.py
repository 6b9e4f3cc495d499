"""Ranks that hang, that are not there, or that were started with something else."""

import signal
import socket
import time
from pathlib import Path
from random import Random

from outside import Started, free_port, stop
from reference import Bench, at_random_step, is_sentence, kind


@kind(times=1, cores=2, run="hard")
def two_ranks_undisturbed(bench: Bench, folder: Path, random: Random) -> str:
    """No fault: what resuming ranks are held against is the run of one process."""
    code, output = bench.trainer.finish(folder, ranks=2)
    assert code == 0, f"ended with {code}: {output[-800:]}"
    bench.same_end(folder)
    return "bit-identical to one process of two devices"


WATCHED = ("--watchdog-s", "30")


def stop_and_hear(ranks: list[Started], victim: int) -> None:
    """Stop one of two ranks that are watched: the other names it and ends, and so does the one that was stopped once it
    wakes up and finds the others gone."""
    stop(ranks[victim].process)
    code = ranks[1 - victim].wait()
    ranks[victim].process.send_signal(signal.SIGCONT)
    codes = code, ranks[victim].wait()
    output = ranks[1 - victim].output
    assert codes == (1, 1), f"ended with {codes}: {output[-600:]}"
    assert f"rank {victim}" in output.splitlines()[-1], output[-400:]
    for one in ranks:
        is_sentence(one.output)
        assert one.output.splitlines()[-1].startswith("halfbyte: rank"), one.output[-400:]


@kind(times=1, cores=2)
def stop_one_rank(bench: Bench, folder: Path, random: Random) -> str:
    ranks = bench.trainer.start_all(folder, *WATCHED, ranks=2)
    at_random_step(bench, folder, ranks, random)
    victim = random.randrange(2)
    began = time.monotonic()
    with bench.places.idle():
        stop_and_hear(ranks, victim)
        seconds = time.monotonic() - began
    bench.goes_on(folder)
    return f"rank {victim} stopped: named by the other after {seconds:.0f} s; resumed as one process, bit-identical"


@kind(times=1)
def port_taken(bench: Bench, folder: Path, random: Random) -> str:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        one = bench.trainer.start(folder, rank=0, ranks=2, port=holder.getsockname()[1])
        code = one.wait()
    assert code == 2 and "another port" in one.output, f"ended with {code}: {one.output[-600:]}"
    is_sentence(one.output)
    return "exit 2 with the port named, before anybody connects"


@kind(times=1, cores=0)
def too_few_ranks(bench: Bench, folder: Path, random: Random) -> str:
    rank = random.randrange(2)
    flags = ("--distributed.initialization-timeout-s", "8")
    one = bench.trainer.start(folder, *flags, rank=rank, ranks=2, port=free_port())
    code = one.wait()
    assert code == 2, f"ended with {code}: {one.output[-600:]}"
    assert f"rank {rank} did not find its 1 peers" in one.output.replace("\n ", ""), one.output[-600:]
    is_sentence(one.output)
    return f"rank {rank} alone: exit 2 with a sentence"


def both_refuse(bench: Bench, folder: Path, field: str, *flags: str, others: tuple[str, ...] = (), **options) -> str:
    """Two ranks that differ in one field: both end before anything is written, and name it and the rank."""
    ranks = bench.trainer.start_all(folder, *flags, ranks=2, others=others, **options)
    codes = [one.wait() for one in ranks]
    assert codes == [2, 2], f"ended with {codes}: {ranks[0].output[-600:]}"
    for one in ranks:
        is_sentence(one.output)
        assert f"rank 1 has {field}" in one.output, one.output[-400:]
    assert not folder.exists(), "something was written"
    return f"another {field}: both exit 2, rank and field named, nothing written"


@kind(times=1)
def ranks_with_another_seed(bench: Bench, folder: Path, random: Random) -> str:
    return both_refuse(bench, folder, "seed", others=("--seed", str(random.randint(1, 9))))


@kind(times=1)
def ranks_with_another_rate(bench: Bench, folder: Path, random: Random) -> str:
    others = ("--optimizer.learning-rate", random.choice(["0.003", "0.010001"]))
    return both_refuse(bench, folder, "optimizer.learning_rate", others=others)


@kind(times=1)
def ranks_with_another_data_set(bench: Bench, folder: Path, random: Random) -> str:
    return both_refuse(bench, folder, "data", others=("--data", "synthetic"))


OWN = """import dataclasses
from halfbyte.recipes import recipe
mine = dataclasses.replace(recipe("nvfp4"), description={text!r})
"""


@kind(times=1)
def ranks_with_another_recipe_file(bench: Bench, folder: Path, random: Random) -> str:
    """The same name on both, and another file under it, as on two hosts of which one was not updated."""
    homes = tuple(folder.parent / f"{folder.name}-rank-{rank}" for rank in range(2))
    for rank, home in enumerate(homes):
        home.mkdir()
        (home / "own.py").write_text(OWN.format(text=f"of rank {rank}, {random.random()}"))
    return both_refuse(bench, folder, "recipe", "--recipe", "own.py:mine", homes=homes)


@kind(times=2)
def ranks_that_differ(bench: Bench, folder: Path, random: Random) -> str:
    fields = {
        "steps": ("--steps", "77"),
        "recipe": ("--recipe", "bf16"),
        "run_dir": ("--run-dir", f"{folder}-other"),
    }
    field = random.choice(sorted(fields))
    return both_refuse(bench, folder, field, others=fields[field])
