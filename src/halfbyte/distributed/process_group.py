"""Process group of a run: equal inputs on every rank, one last step, one error message and exit code.

Ranks communicate through the key-value store of JAX's coordination service, on a separate thread: it works before
anything is compiled, and while the main thread hangs in a collective. Every rank writes its heartbeat and reads the
exit of the group; rank 0 reads all heartbeats and finds the stalled rank. A single process has only the watchdog.
"""

import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

from halfbyte.distributed.heartbeat import (
    FAILED,
    PREEMPTED,
    GroupExit,
    Heartbeat,
    WatchdogLimits,
    exit_process,
    find_stalled_rank,
)

KV_STORE_PREFIX = "halfbyte"
FAILURE_DIAGNOSIS_S = 6.0
EXIT_GRACE_S = 10.0
JOIN_S = 5.0
MAX_HEARTBEAT_READERS = 64
COORDINATOR_GONE = "rank 0, the coordinator, has gone; every rank ends, the last checkpoint is intact"


class RankMismatchError(ValueError):
    """Ranks have different inputs."""


class ProcessGroup:
    """This process, one of `count`. `client` is that of the coordination service; None for a single process."""

    def __init__(
        self,
        rank: int = 0,
        count: int = 1,
        client: Any = None,
        *,
        limits: WatchdogLimits | None = None,
        leave: Callable[[GroupExit], None] = exit_process,
    ):
        self.rank, self.count, self._client = rank, count, client
        self.limits = limits or WatchdogLimits()
        self._leave = leave
        self._lock = threading.Condition()
        self._step, self._doing, self._since = 0, "start", time.monotonic()
        self._stage: Literal["before", "loop", "after"] = "before"
        self._stop_reason: str | None = None
        self._frozen: int | None = None
        self._target: int | None = None
        self._end: GroupExit | None = None
        self._code = 0
        self._count, self._heard = 0, time.monotonic()
        self._seen: dict[int, tuple[int, float]] = {}
        self._closed = threading.Event()
        self._urgent = threading.Event()
        self._threads: list[threading.Thread] = []

    def open(self) -> "ProcessGroup":
        """Starts the heartbeat and watchdog threads."""
        self._threads = [threading.Thread(target=self._watchdog_loop, name="halfbyte-watch", daemon=True)]
        if self._client is not None:
            self._threads.append(threading.Thread(target=self._heartbeat_loop, name="halfbyte-talk", daemon=True))
        for thread in self._threads:
            thread.start()
        return self

    def close(self, code: int = 0) -> None:
        """Stops the threads, joining them for at most `JOIN_S`. This rank is done and will exit with `code`."""
        self._code = code
        self.report_activity("done")
        self._stage = "after"
        if self._client is not None and not self._closed.is_set():
            self._put(f"beat/{self.rank}", self._beat().to_json())
        self._closed.set()
        self._urgent.set()
        deadline = time.monotonic() + JOIN_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def report_activity(self, doing: str, step: int | None = None) -> None:
        """Publishes what this rank is doing now and restarts the clock of the watchdog."""
        self._doing, self._since = doing, time.monotonic()
        self._step = self._step if step is None else step

    @property
    def stage(self) -> Literal["before", "loop", "after"]:
        """Returns whether the step loop has begun, and whether it has ended."""
        return self._stage

    @property
    def activity(self) -> str:
        """Returns the activity that was reported last."""
        return self._doing

    def _beat(self) -> Heartbeat:
        self._count += 1
        return Heartbeat(self._count, self._step, self._doing, time.monotonic() - self._since)

    def assert_equal_across_ranks(self, topic: str, facts: Mapping[str, Any]) -> None:
        """Raises RankMismatchError with rank, field and both values, unless every rank passes the same facts."""
        if self._client is None:
            return
        facts_by_rank = self.all_gather_json(topic, dict(facts))
        lines = []
        for rank, rank_facts in facts_by_rank.items():
            for name in sorted(facts_by_rank[0].keys() | rank_facts.keys()):
                expected, other = facts_by_rank[0].get(name), rank_facts.get(name)
                if expected != other:
                    lines.append(f"rank {rank} has {name} {_show(other)}, rank 0 has {_show(expected)}")
        if lines:
            raise RankMismatchError(
                f"the ranks of this run disagree ({topic}):\n  " + "\n  ".join(lines[:12]) + "\n"
                "start every rank with the same flags, code and files"
            )

    def all_gather_json(self, topic: str, value: Any) -> dict[int, Any]:
        """Returns the value of every rank, by rank. Blocks until all have called it."""
        if self._client is None:
            return {self.rank: value}
        self._put(f"{topic}/{self.rank}", json.dumps(value))
        while True:
            texts = {int(key.rsplit("/", 1)[1]): text for key, text in self._list(topic)}
            if len(texts) == self.count:
                return {rank: json.loads(texts[rank]) for rank in sorted(texts)}
            time.sleep(0.05)  # the watchdog ends the group if a rank has ended or hangs meanwhile

    def request_stop(self, reason: str) -> None:
        """Handles a signal to this rank; a second request changes nothing.

        Before the first step the group ends at once, after it all ranks stop at the same step.
        """
        if self._stop_reason is not None or self._stage == "after":
            return
        self._stop_reason = reason
        if self._stage == "before":
            who = f"rank {self.rank} was" if self.count > 1 else "the run was"
            self.end(f"{who} stopped by {reason} before its first step; nothing is lost, start it again", PREEMPTED)
        if self._client is not None:
            self._urgent.set()

    def enter_step_loop(self) -> None:
        """Marks the begin of the step loop: from now on a stop waits for the step in progress and its checkpoint."""
        self._stage = "loop"

    def leave_step_loop(self) -> None:
        """Marks the end of the last step: signals are ignored from now on."""
        self._stage = "after"

    def stop_reason_before(self, step: int) -> str | None:
        """Returns the reason to stop before `step`, the same on every rank; None to continue."""
        with self._lock:
            if self._client is None:
                return self._stop_reason
            if self._frozen is None:
                self._step = step
                return None
            while self._target is None:
                self._lock.wait(1.0)
            return (self._stop_reason or "SIGTERM") if step > self._target else None

    def _agree_on_stop_step(self) -> None:
        """Publishes the step that this rank cannot stop before; the maximum over ranks is the last step of all."""
        if self._stop_reason is not None and self._frozen is None:
            self._put(f"stop/{self.rank}", self._stop_reason)
        requests = self._list("stop")
        if not requests:
            return
        with self._lock:
            if self._frozen is None:
                self._frozen = self._step
                self._stop_reason = self._stop_reason or requests[0][1]
                self._put(f"bound/{self.rank}", str(self._frozen))
        bound = self._list("bound")
        if len(bound) == self.count:
            with self._lock:
                self._target = max(int(text) for _, text in bound)
                self._lock.notify_all()

    def fail(self, sentence: str, code: int) -> GroupExit:
        """Publishes that this rank has failed. Returns the exit of the group: that of the first failure."""
        named = f"rank {self.rank}: {sentence}" if self.count > 1 else sentence
        return self._write_end(GroupExit(self.rank, named, code))

    def fail_with_message(self, sentence: str, code: int) -> GroupExit:
        """As `fail`, for a sentence that names its ranks."""
        return self._write_end(GroupExit(self.rank, sentence, code))

    def end(self, sentence: str, code: int) -> None:
        """Ends every rank now, including this one."""
        end = self._write_end(GroupExit(self.rank, sentence, code))
        self._closed.wait(1.5 if self.count > 1 else 0.0)  # time for the others to read it: the store ends with rank 0
        self._leave(end)

    def explain_collective_failure(self, error: BaseException) -> GroupExit:
        """Returns the cause of a failed collective: the exit that another rank wrote, a lost rank, or this error."""
        deadline = time.monotonic() + FAILURE_DIAGNOSIS_S
        while time.monotonic() < deadline and self._end is None:
            time.sleep(0.2)
        if self._end is not None:
            return self._end
        lost_rank = self._lost_rank()
        if not self._reachable():
            return GroupExit(0, COORDINATOR_GONE, FAILED)
        if lost_rank is not None:
            beat = self._beats().get(lost_rank)
            where = f" after step {beat.step}, at: {beat.doing}" if beat else ""
            return self._write_end(
                GroupExit(
                    lost_rank,
                    f"rank {lost_rank} has gone{where}; every rank ends, the last checkpoint is intact",
                    FAILED,
                )
            )
        return self.fail(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}", FAILED)

    def _lost_rank(self) -> int | None:
        """Returns a rank without heartbeats; None once all others have sent a new one.

        A rank whose heartbeat was just read may be lost too, if this process was suspended: so this waits for the next.
        """
        first, limit = self._beats(), max(FAILURE_DIAGNOSIS_S / 2, 3 * self._interval)
        while True:
            silence, beats = self._seconds_since_heartbeat(), self._beats()
            silent = [rank for rank, seconds in silence.items() if rank != self.rank and seconds > limit]
            if silent:
                return silent[0]
            if all(beats[rank].count > first[rank].count for rank in first.keys() & beats.keys() - {self.rank}):
                return None
            time.sleep(self._interval)

    def on_runtime_terminated(self) -> None:
        """Exits with the reason after JAX's runtime has terminated. Called on a thread of C++."""
        if self._closed.is_set():  # a peer has left first: the work of this rank is done
            os._exit(self._code)
        time.sleep(2.0)  # the main thread, or the store, may know more
        self._leave(self._end or GroupExit(0, COORDINATOR_GONE, FAILED))

    def _write_end(self, end: GroupExit) -> GroupExit:
        if self._end is not None:
            return self._end
        self._end = end
        if self._client is not None:
            try:
                self._client.key_value_set(f"{KV_STORE_PREFIX}/end", end.to_json(), False)
            except Exception:  # another rank was first, or the store is gone
                self._end = self._read_end() or end
        return self._end

    def _read_end(self) -> GroupExit | None:
        try:
            return GroupExit.from_json(self._client.key_value_try_get(f"{KV_STORE_PREFIX}/end"))
        except Exception:  # jaxlib raises for a missing key and for a lost store
            return None

    def _put(self, key: str, value: str) -> None:
        try:
            self._client.key_value_set(f"{KV_STORE_PREFIX}/{key}", value, True)
            self._heard = time.monotonic()
        except Exception:  # the store is gone: `_watchdog_loop` notices that
            return

    def _list(self, key: str) -> list[tuple[str, str]]:
        try:
            entries = self._client.key_value_dir_get(f"{KV_STORE_PREFIX}/{key}/")
            self._heard = time.monotonic()
            return entries
        except Exception:  # as above
            return []

    def _reachable(self) -> bool:
        before = self._heard
        self._put(f"beat/{self.rank}", self._beat().to_json())
        return self._heard > before

    def _beats(self) -> dict[int, Heartbeat]:
        return {int(key.rsplit("/", 1)[1]): Heartbeat.from_json(text) for key, text in self._list("beat")}

    def _seconds_since_heartbeat(self) -> dict[int, float]:
        """Returns the seconds since the heartbeat of each rank last changed, by the clock of this process."""
        now, beats = time.monotonic(), self._beats()
        for rank, beat in beats.items():
            if self._seen.get(rank, (-1, 0.0))[0] != beat.count:
                self._seen[rank] = (beat.count, now)
        return {rank: now - self._seen[rank][1] for rank in beats}

    @property
    def _interval(self) -> float:
        return max(0.5, self.count / 1000)

    def _heartbeat_loop(self) -> None:
        while not self._closed.is_set():
            self._urgent.wait(self._interval)
            self._urgent.clear()
            if self._closed.is_set():
                return
            self._put(f"beat/{self.rank}", self._beat().to_json())
            end = self._end or self._read_end()
            if end is not None:
                self._exit_with_group(end)
                return
            self._agree_on_stop_step()
            if self.rank and self.count > MAX_HEARTBEAT_READERS:
                continue
            silence = self._seconds_since_heartbeat()  # on every rank of a small group: `_lost_rank` needs it
            verdict = find_stalled_rank(self._beats(), silence, self.limits) if self.rank == 0 else None
            if verdict is not None:
                self._blame(*verdict)

    def _blame(self, rank: int, sentence: str) -> None:
        if rank == self.rank:
            faulthandler.dump_traceback(file=sys.stderr)
        self.end(sentence, FAILED)

    def _exit_with_group(self, end: GroupExit) -> None:
        """Exits after another rank has ended the group. A rank that is blamed has `EXIT_GRACE_S` to exit by itself."""
        self._end = end
        if end.rank == self.rank:
            self._closed.wait(EXIT_GRACE_S)
        if not self._closed.is_set():
            self._leave(end)

    def _watchdog_loop(self) -> None:
        """Ends a single process that makes no progress, and a rank whose coordinator does not answer."""
        tick, last = 0.5, time.monotonic()
        while not self._closed.wait(tick):
            now = time.monotonic()
            if now - last > 20 * tick:  # this process was suspended: the last heartbeats are old, read new ones first
                self._heard, self._seen = now, {}
            last = now
            if self._client is None:
                beat = Heartbeat(0, self._step, self._doing, now - self._since)
                verdict = find_stalled_rank({0: beat}, {}, self.limits)
                if verdict is not None:
                    faulthandler.dump_traceback(file=sys.stderr)
                    self._leave(GroupExit(0, verdict[1].replace("rank 0 is the furthest behind: ", ""), FAILED))
                    return
            elif self.rank and now - self._heard > self.limits.heartbeat_timeout_s + 2 * self._interval:
                self._leave(
                    GroupExit(0, f"rank 0, the coordinator, has not answered for {now - self._heard:.0f} s", FAILED)
                )
                return


def _show(value: Any) -> str:
    return "nothing" if value is None else str(value)
