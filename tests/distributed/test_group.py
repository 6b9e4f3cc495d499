"""Groups of threads over a dictionary that behaves like the coordination service's store. Oracle: the rules themselves.

Real processes are in tests/train/test_processes.py and in the fault harness.
"""

import threading
import time
from types import SimpleNamespace

import pytest

from halfbyte.distributed import (
    Heartbeat,
    ProcessGroup,
    RankMismatchError,
    WatchdogLimits,
    find_stalled_rank,
    process_group,
)


class Store:
    """The calls of jaxlib's client that a group makes; `dead` makes each of them fail."""

    def __init__(self):
        self.values, self.dead, self.lock = {}, False, threading.Lock()

    def _check(self):
        if self.dead:
            raise RuntimeError("UNAVAILABLE: Socket closed")

    def key_value_set(self, key, value, allow_overwrite=False):
        self._check()
        with self.lock:
            if key in self.values and not allow_overwrite:
                raise RuntimeError("ALREADY_EXISTS")
            self.values[key] = value

    def key_value_try_get(self, key):
        self._check()
        return self.values[key]

    def key_value_dir_get(self, key):
        self._check()
        with self.lock:
            return [(name, value) for name, value in self.values.items() if name.startswith(key)]


def make_groups(count, store, *, limits=None):
    ends = {rank: [] for rank in range(count)}
    groups = [ProcessGroup(rank, count, store, limits=limits, leave=ends[rank].append) for rank in range(count)]
    return groups, ends


def on_all(groups, act):
    """`act(group)` on every rank at once; what each returned or raised."""
    results = {}

    def one(group):
        try:
            results[group.rank] = act(group)
        except Exception as error:
            results[group.rank] = error

    threads = [threading.Thread(target=one, args=(group,)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    return results


def test_agreement_names_rank_and_field():
    groups, _ = make_groups(3, Store())
    facts = {"seed": 0, "optimizer.learning_rate": 1e-3}
    assert set(on_all(groups, lambda group: group.assert_equal_across_ranks("a", facts)).values()) == {None}
    found = on_all(
        groups, lambda group: group.assert_equal_across_ranks("b", {**facts, "seed": 7} if group.rank == 2 else facts)
    )
    assert all(isinstance(error, RankMismatchError) for error in found.values())
    assert len({str(error) for error in found.values()}) == 1
    assert "rank 2 has seed 7, rank 0 has 0" in str(found[1])
    assert "learning_rate" not in str(found[1])


def test_all_ranks_stop_at_one_step():
    """Three ranks that run freely, each at another speed, until the signal comes: all end at the same step."""
    groups, _ = make_groups(3, Store())
    for group in groups:
        group.enter_step_loop()
        group.open()
    groups[1].request_stop("SIGTERM")

    def go_on(group):
        step = 5
        while group.stop_reason_before(step + 1) is None:
            step += 1
            time.sleep(0.001 * (1 + group.rank))  # none holds the interpreter all the time
        return step, group.stop_reason_before(step + 1)

    found = on_all(groups, go_on)
    assert len(set(found.values())) == 1
    assert found[0][1] == "SIGTERM"
    for group in groups:
        group.close()


@pytest.mark.slow
def test_stop_before_the_first_step_ends_all_with_75(until):
    groups, ends = make_groups(2, Store())
    for group in groups:
        group.open()
    groups[1].request_stop("SIGTERM")
    until(lambda: ends[0] and ends[1])
    assert ends[0][0] == ends[1][0]
    assert ends[0][0].code == 75
    assert "rank 1 was stopped by SIGTERM before its first step" in ends[0][0].sentence
    for group in groups:
        group.close()


def test_one_failure_is_everyones_sentence(until):
    groups, ends = make_groups(2, Store())
    for group in groups:
        group.open()
    end = groups[1].fail("the disk is full", 1)
    until(lambda: ends[0])
    assert ends[0][0] == end
    assert end.sentence == "rank 1: the disk is full"
    assert groups[0].fail("another word", 2) == end  # the first holds
    for group in groups:
        group.close()


@pytest.mark.slow
def test_silent_rank_is_named_and_a_dead_coordinator_too(until):
    store = Store()
    groups, ends = make_groups(2, store, limits=WatchdogLimits(heartbeat_timeout_s=1.0))
    groups[0].open()
    groups[1].report_activity("step", 12)
    groups[1]._put("beat/1", groups[1]._beat().to_json())  # one beat, then nothing
    until(lambda: ends[0])
    assert "rank 1 has stopped" in ends[0][0].sentence
    assert "after step 12" in ends[0][0].sentence
    groups[0].close()
    fresh = Store()
    pair, ends = make_groups(2, fresh, limits=WatchdogLimits(heartbeat_timeout_s=0.5))
    pair[1].open()
    fresh.dead = True
    until(lambda: ends[1])
    assert "rank 0, the coordinator" in ends[1][0].sentence
    pair[1].close()


@pytest.mark.parametrize("lives", [False, True])
def test_dead_rank_is_blamed_after_a_late_heartbeat(monkeypatch, lives):
    """A process that stood still sees it when it asks who is to blame. One that lives beats on, and is not blamed."""
    now, beat = [0.0], lambda: groups[1]._put("beat/1", groups[1]._beat().to_json())

    def monotonic():
        now[0] += 1e-6
        return now[0]

    def sleep(seconds):
        now[0] += seconds
        if lives:
            beat()

    monkeypatch.setattr(process_group, "time", SimpleNamespace(monotonic=monotonic, sleep=sleep))
    groups, _ = make_groups(2, Store())
    groups[1].report_activity("step", 12)
    beat()
    end = groups[0].explain_collective_failure(RuntimeError("connection reset by peer"))
    gone = "rank 1 has gone after step 12, at: step; every rank ends, the last checkpoint is intact"
    assert end.sentence == ("rank 0: RuntimeError: connection reset by peer" if lives else gone)


def test_rank_furthest_behind_is_blamed():
    limits = WatchdogLimits(heartbeat_timeout_s=60, step_timeout_s=10)
    stuck = {0: Heartbeat(9, 13, "step", 11.0), 1: Heartbeat(9, 12, "data", 12.0)}
    rank, sentence = find_stalled_rank(stuck, {0: 0.1, 1: 0.1}, limits)
    assert rank == 1
    assert "after step 12, at: data" in sentence
    assert find_stalled_rank({0: Heartbeat(9, 13, "finish", 500.0)}, {0: 0.1}, limits) is None
    still_compiling = {0: Heartbeat(9, 1, "step", 500.0), 1: Heartbeat(9, 0, "compile", 510.0)}
    assert find_stalled_rank(still_compiling, {0: 0.1, 1: 0.1}, limits) is None
    assert find_stalled_rank({0: Heartbeat(9, 13, "step", 9.0)}, {0: 0.1}, limits) is None
    just_compiled = {0: Heartbeat(9, 2, "step", 500.0), 1: Heartbeat(9, 1, "step", 0.5)}
    assert find_stalled_rank(just_compiled, {0: 0.1, 1: 0.1}, limits) is None
    assert find_stalled_rank({0: Heartbeat(9, 13, "done", 9.0)}, {0: 900.0}, limits) is None


def test_alone_a_hang_ends_with_stacks(capfd, until):
    ends = []
    group = ProcessGroup(limits=WatchdogLimits(step_timeout_s=0.3), leave=ends.append).open()
    group.report_activity("step", 7)
    until(lambda: ends)
    assert "no step has ended" in ends[0].sentence
    assert "after step 7" in ends[0].sentence
    assert "test_group.py" in capfd.readouterr().err
    group.close()
