"""Copies in buckets: uploads that are killed, servers that are gone, slow or refuse, and what else is in the bucket.

Servers of both kinds run in this process, behind proxies that write down every request (servers.py). Whatever happens,
nothing foreign may be overwritten, deleted or even listed.
"""

import contextlib
import json
import re
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

from outside import Started, last_step, stop, wait_until
from reference import Bench, at_random_step, is_sentence, kind, refused
from servers import Proxy, served
from states import checkpoint_steps, contents

PREFIX = "team's runs/ü"
OTHERS = ("thesis.pdf", "README.md", "run/notes", "run 2/halfbyte-copy.json", "run/0123456789abcdef/a@b")


@contextlib.contextmanager
def bucket(scheme: str) -> Iterator[Proxy]:
    """A bucket that others use, too; afterwards, what is theirs is as it was and nobody has asked for more."""
    with served(scheme) as proxy:
        others = {f"{PREFIX}/{name}": f"precious {name}".encode() for name in OTHERS}
        for key, data in others.items():
            proxy.put(key, data)
        proxy.url = f"{scheme}://{proxy.bucket}/{PREFIX}/run"
        yield proxy
        there = proxy.objects()
        assert {key: there.get(key) for key in others} == others, "something foreign has changed"
        assert not proxy.lists(), f"listed: {proxy.lists()[:3]}"
        own = f"{proxy.bucket}/{PREFIX}/run/"
        for request in proxy.writes():
            key = request.key.removeprefix(f"{proxy.bucket}/")
            assert request.key.startswith(own) and key not in others, f"foreign: {request}"
            assert request.method in ("PUT", "POST") and request.conditions, f"no condition, or a deletion: {request}"


def train(bench: Bench, folder: Path, proxy: Proxy, *flags: str, url: str = "") -> Started:
    """A run that is copied."""
    return bench.trainer.start(folder, "--copy-to", url or proxy.url, *flags, environ=proxy.environment)


def fetch(bench: Bench, proxy: Proxy, folder: Path, *flags: str) -> tuple[int, Started]:
    code, one = bench.trainer.run(
        f"{folder.name}-fetch", "fetch", proxy.url, str(folder), *flags, environ=proxy.environment
    )
    is_sentence(one.output)
    return code, one


def fetched_is_whole(bench: Bench, proxy: Proxy, folder: Path) -> None:
    """What is fetched is the run, byte for byte, and the undisturbed run, array for array."""
    copy = folder.with_name(f"{folder.name}-fetched")
    code, one = fetch(bench, proxy, copy)
    assert code == 0, one.output[-600:]
    last = checkpoint_steps(folder)[-1]
    assert checkpoint_steps(copy) == [last]
    kept = (f"checkpoints/{last}/", "config", "run.json", "metrics", "manifest", "report", "tokenizer", "data.json")
    here, there = contents(folder), contents(copy)
    lost = {name for name in here if name.startswith(kept) and there.get(name) != here[name]}
    assert not lost, f"not as it was: {sorted(lost)[:5]}"
    bench.same_end(copy)
    shutil.rmtree(copy)


class HeldWrite:
    """Holds a process that uploads, before its write of this number is done."""

    def __init__(self, number: int):
        self.number, self.count, self.lock = number, 0, threading.Lock()
        self.coming, self.ended = threading.Event(), threading.Event()

    def __call__(self, method: str, key: str) -> None:
        if method in ("PUT", "POST"):
            with self.lock:
                self.count += 1
                is_it = self.count == self.number
            if is_it:
                self.coming.set()
                self.ended.wait(60)


def killed_uploading(scheme: str, bench: Bench, folder: Path, random: Random) -> str:
    """Two kills, each before some write of the upload is done; the last start runs to the end."""
    with bucket(scheme) as proxy:
        left = []
        for _ in range(2):
            proxy.before = held = HeldWrite(random.randint(1, 40))
            one = train(bench, folder, proxy)
            came = wait_until(held.coming.is_set, [one])
            one.process.kill()
            code = one.wait()
            held.ended.set()
            proxy.before = lambda method, key: None
            is_sentence(one.output)
            left.append(f"{held.number}" if came else f"none: all was there ({code})")
            assert came or code == 0, f"ended with {code}: {one.output[-600:]}"
        one = train(bench, folder, proxy)
        assert one.wait() == 0, one.output[-600:]
        bench.same_end(folder)
        fetched_is_whole(bench, proxy, folder)
    return f"killed before writes {', '.join(left)}; resumed, fetched bit-identical; {proxy.summary()}"


@kind(times=5, run="short")
def kill_while_copying_to_s3(bench: Bench, folder: Path, random: Random) -> str:
    return killed_uploading("s3", bench, folder, random)


@kind(times=5, run="short")
def kill_while_copying_to_gs(bench: Bench, folder: Path, random: Random) -> str:
    return killed_uploading("gs", bench, folder, random)


@kind(times=1, run="short")
def copy_goes_on_elsewhere(bench: Bench, folder: Path, random: Random) -> str:
    """Told to stop on one machine, fetched, and trained to the end on another, with the same bucket."""
    with bucket(random.choice(["s3", "gs"])) as proxy:
        one = train(bench, folder, proxy)
        at_random_step(bench, folder, [one], random)
        one.process.send_signal(signal.SIGTERM)
        assert one.wait() == 75 and "--copy-to" in one.said, one.output[-600:]
        other = folder.with_name(f"{folder.name}-other")
        code, two = fetch(bench, proxy, other)
        assert code == 0, two.output[-600:]
        assert train(bench, other, proxy).wait() == 0
        bench.same_end(other)
        fetched_is_whole(bench, proxy, other)
    return f"stopped, fetched and trained to the end elsewhere: bit-identical; {proxy.summary()}"


@kind(times=1, run="short")
def killed_copy_is_taken_over_only_when_told(bench: Bench, folder: Path, random: Random) -> str:
    with bucket("s3") as proxy:
        one = train(bench, folder, proxy)
        assert wait_until(lambda: "copied checkpoint" in one.said, [one]), one.output[-600:]
        one.process.kill()
        one.wait()
        other = folder.with_name(f"{folder.name}-other")
        assert fetch(bench, proxy, other)[0] == 0
        two = train(bench, other, proxy)
        refused(two, two.wait(), "is being written from", "--copy-take-over")
        assert train(bench, other, proxy, "--copy-take-over").wait() == 0
        bench.same_end(other)
        fetched_is_whole(bench, proxy, other)
    return f"refused without --copy-take-over; bit-identical with it; {proxy.summary()}"


@kind(times=1, run="short")
def two_writers_of_one_run(bench: Bench, folder: Path, random: Random) -> str:
    """A run directory that was copied by hand while its run trains."""
    with bucket(random.choice(["s3", "gs"])) as proxy:
        one = train(bench, folder, proxy)
        copied = re.compile(r"copied checkpoint (\d+)")
        while True:  # until the directory holds the newest checkpoint of the bucket: uploads may be slower than steps
            stop(one.process)
            steps = [int(step) for step in copied.findall(one.said)]
            if steps and max(steps) in checkpoint_steps(folder):
                break
            one.process.send_signal(signal.SIGCONT)
            seen = len(steps)
            assert wait_until(lambda seen=seen: len(copied.findall(one.said)) > seen, [one]), one.output[-600:]
        other = folder.with_name(f"{folder.name}-by-hand")
        shutil.copytree(folder, other)
        two = train(bench, other, proxy)
        refused(two, two.wait(), "is being written from", "--copy-take-over")
        three = train(bench, other, proxy, "--copy-take-over")
        assert wait_until(lambda: last_step(other) >= bench.steps or three.process.poll() is not None, [three])
        one.process.send_signal(signal.SIGCONT)
        assert three.wait() == 0, three.output[-600:]
        code = one.wait()
        assert code == 1 and "copies nothing more" in one.said and "not in" in one.said, (code, one.said[-600:])
        is_sentence(one.output)
        bench.same_end(folder)
        bench.same_end(other)
        fetched_is_whole(bench, proxy, other)
    return f"the second is refused; told to take over it copies, and the first says what it did not; {proxy.summary()}"


@kind(times=2, run="short", cores=2)
def two_runs_into_one_prefix(bench: Bench, folder: Path, random: Random) -> str:
    with bucket(random.choice(["s3", "gs"])) as proxy:
        folders = [folder, folder.with_name(f"{folder.name}-second")]
        runs = [train(bench, one, proxy) for one in folders]
        codes = [one.wait() for one in runs]
        assert sorted(codes) == [0, 2], (codes, [one.said[-400:] for one in runs])
        loser = codes.index(2)
        is_sentence(runs[loser].output)
        assert "another" in runs[loser].said and not checkpoint_steps(folders[loser])
        fetched_is_whole(bench, proxy, folders[1 - loser])
    return f"one has the prefix, the other exits 2; {proxy.summary()}"


@kind(times=1, run="short")
def server_gone_for_a_minute(bench: Bench, folder: Path, random: Random) -> str:
    with bucket(random.choice(["s3", "gs"])) as proxy:
        one = train(bench, folder, proxy)
        at_random_step(bench, folder, [one], random)
        proxy.stop()
        time.sleep(60)
        assert one.process.poll() is None, one.output[-600:]  # it waits, with its steps done
        ended = last_step(folder)
        proxy.start()
        assert one.wait() == 0, one.output[-600:]
        assert one.said.count("training goes on") == 1, one.said[-600:]
        is_sentence(one.output)
        bench.same_end(folder)
        fetched_is_whole(bench, proxy, folder)
    return f"reported once; trained to step {ended} meanwhile; all copied once it was back; {proxy.summary()}"


@kind(times=2, run="short")
def slow_and_faulty_server(bench: Bench, folder: Path, random: Random) -> str:
    with bucket(random.choice(["s3", "gs"])) as proxy:
        proxy.faults += [random.choice([0.5, 0.2, 0.0, 0.0, "refuse", "cut", "lose"]) for _ in range(150)]
        one = train(bench, folder, proxy)
        code = one.wait()
        is_sentence(one.output)
        left = len(proxy.faults)
        proxy.faults.clear()
        if code == 2:  # at the start
            assert "does not do what is asked" in one.said, one.said[-600:]
            assert train(bench, folder, proxy).wait() == 0
        else:
            assert code == 0, (code, one.said[-600:])
        fetched_is_whole(bench, proxy, folder)
    return f"exit {code}, {150 - left} faults met; fetched bit-identical; {proxy.summary()}"


@kind(times=1, run="short")
def no_such_bucket(bench: Bench, folder: Path, random: Random) -> str:
    with bucket(random.choice(["s3", "gs"])) as proxy:
        missing = proxy.url.replace(proxy.bucket, "no-such-bucket-here")
        before = proxy.log.copy()
        one = train(bench, folder, proxy, url=missing)
        refused(one, one.wait(), "no-such-bucket-here")
        assert not checkpoint_steps(folder), "it has trained"
        proxy.log[:] = before  # what it asked of that bucket is no business of this one
    return f"exit 2 with a sentence, nothing trained; {proxy.summary()}"


@kind(times=2, run="short")
def no_permission(bench: Bench, folder: Path, random: Random) -> str:
    """From the beginning: refused. From the middle of a run on: it trains to its end and says what is not there."""
    with bucket(random.choice(["s3", "gs"])) as proxy:
        proxy.before = lambda method, key: 403
        one = train(bench, folder, proxy)
        refused(one, one.wait(), "403")
        proxy.before = lambda method, key: None
        one = train(bench, folder, proxy)
        assert wait_until(lambda: "copied checkpoint" in one.said, [one]), one.output[-600:]
        proxy.before = lambda method, key: 403
        time.sleep(1 + random.random())
        assert wait_until(lambda: last_step(folder) >= bench.steps, [one]), one.output[-600:]
        assert wait_until(lambda: "403" in one.said, [one]), one.output[-600:]
        one.process.kill()  # nobody waits five minutes
        one.wait()
        is_sentence(one.output)
        proxy.before = lambda method, key: None
        assert train(bench, folder, proxy).wait() == 0
        bench.same_end(folder)
        fetched_is_whole(bench, proxy, folder)
    return f"at the start: exit 2; later: said, trained to the end; copied by the next start; {proxy.summary()}"


@kind(times=2, run="short")
def changed_objects(bench: Bench, folder: Path, random: Random) -> str:
    """Every object of a copy is damaged, cut or deleted: `fetch` says so in a sentence and leaves no run."""
    with bucket(random.choice(["s3", "gs"])) as proxy:
        assert train(bench, folder, proxy).wait() == 0
        own = f"{PREFIX}/run/"
        newest = f"/checkpoints/{checkpoint_steps(folder)[-1]}/"
        keys = [key for key in proxy.objects() if key.startswith(own) and "precious" not in str(proxy.get(key))]
        keys = [key for key in keys if newest in key or "/checkpoints/" not in key]
        copy, tried = folder.with_name(f"{folder.name}-changed"), 0
        head = json.loads(json.loads(proxy.get(f"{own}halfbyte-copy.json"))["content"])
        listed = {f"{own}{head['run']}/{path}@{part[0]}" for path, parts in head["files"].items() for part in parts}
        for key in random.sample(keys, min(8, len(keys))):
            data, change = proxy.get(key), random.choice(["flip", "cut", "delete"])
            proxy.remove(key) if change == "delete" else proxy.put(key, changed(data, change, random))
            code, one = fetch(bench, proxy, copy)
            is_used = newest in key or key in listed or key.endswith("halfbyte-copy.json")
            assert code == (2 if is_used else 0), f"{change} {key}: {code}: {one.said[-400:]}"
            assert is_used != copy.exists(), f"{change} {key}: a run was made"
            shutil.rmtree(copy, ignore_errors=True)
            shutil.rmtree(copy.with_name(f".{copy.name}.fetching"), ignore_errors=True)
            proxy.remove(key)
            proxy.put(key, data)
            tried += 1
        fetched_is_whole(bench, proxy, folder)
    return f"{tried} objects changed: each exit 2 with a sentence, no run directory; {proxy.summary()}"


def changed(data: bytes, change: str, random: Random) -> bytes:
    at = random.randrange(len(data))
    return data[:at] if change == "cut" and at else bytes([*data[:at], data[at] ^ 1, *data[at + 1 :]])
