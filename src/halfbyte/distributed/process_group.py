"""A group of ranks that is told one truth, stops at one step and ends in one sentence.

Ranks talk through the key-value store of JAX's coordination service, in a thread of their own: it works before anything
is compiled, and while the main thread is stuck in a collective. Every rank writes its beat and reads how the group
ends; rank 0 reads all beats and judges. A group of one has no store and keeps only the clock.
"""

import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from .beats import Beat, Limits, judge
from .ending import FAILED, PREEMPTED, End, leave

ROOT = "halfbyte"
EXPLAIN_S = 6.0
GRACE_S = 10.0
JOIN_S = 5.0
MOST_WATCHERS = 64
COORDINATOR_GONE = "rank 0, the coordinator, has gone; every rank ends, the last checkpoint is intact"


class Disagreement(ValueError):
    """Ranks that would compute different things."""


class Group:
    """This process among `count`. `client` is the coordination service's, None when alone."""

    def __init__(
        self,
        rank: int = 0,
        count: int = 1,
        client: Any = None,
        *,
        limits: Limits | None = None,
        leave: Callable[[End], None] = leave,
    ):
        self.rank, self.count, self._client = rank, count, client
        self.limits = limits or Limits()
        self._leave = leave
        self._lock = threading.Condition()
        self._step, self._doing, self._since = 0, "start", time.monotonic()
        self._stage = "before"
        self._stop_reason: str | None = None
        self._frozen: int | None = None
        self._target: int | None = None
        self._end: End | None = None
        self._code = 0
        self._count, self._heard = 0, time.monotonic()
        self._seen: dict[int, tuple[int, float]] = {}
        self._closed = threading.Event()
        self._urgent = threading.Event()
        self._threads: list[threading.Thread] = []

    # Life

    def open(self) -> "Group":
        """Begin to talk and to watch."""
        self._threads = [threading.Thread(target=self._watch, name="halfbyte-watch", daemon=True)]
        if self._client is not None:
            self._threads.append(threading.Thread(target=self._talk_on, name="halfbyte-talk", daemon=True))
        for thread in self._threads:
            thread.start()
        return self

    def close(self, code: int = 0) -> None:
        """Stop watching: this rank has done its part and will exit with `code`. Joins its threads, `JOIN_S` at most."""
        self._code = code
        self.at("done")
        self._stage = "after"
        if self._client is not None and not self._closed.is_set():
            self._put(f"beat/{self.rank}", self._beat().to_json())
        self._closed.set()
        self._urgent.set()
        deadline = time.monotonic() + JOIN_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    # What this rank is at

    def at(self, doing: str, step: int | None = None) -> None:
        """Say what this rank is doing now; the clock of the watchdog starts anew."""
        self._doing, self._since = doing, time.monotonic()
        self._step = self._step if step is None else step

    @property
    def doing(self) -> str:
        """What `at` said last."""
        return self._doing

    def _beat(self) -> Beat:
        self._count += 1
        return Beat(self._count, self._step, self._doing, time.monotonic() - self._since)

    # One truth

    def agree(self, topic: str, facts: Mapping[str, Any]) -> None:
        """Raise Disagreement, naming rank, field and both values, unless every rank gives the same facts."""
        if self._client is None:
            return
        everyone = self.share(topic, dict(facts))
        lines = []
        for rank, theirs in everyone.items():
            for name in sorted(everyone[0].keys() | theirs.keys()):
                mine, other = everyone[0].get(name), theirs.get(name)
                if mine != other:
                    lines.append(f"rank {rank} has {name} {_show(other)}, rank 0 has {_show(mine)}")
        if lines:
            raise Disagreement(
                f"the ranks of this run disagree ({topic}):\n  " + "\n  ".join(lines[:12]) + "\n"
                "start every rank with the same flags, code and files"
            )

    def share(self, topic: str, value: Any) -> dict[int, Any]:
        """Every rank's value, by rank. Each waits for all."""
        if self._client is None:
            return {self.rank: value}
        self._put(f"{topic}/{self.rank}", json.dumps(value))
        while True:
            found = {int(key.rsplit("/", 1)[1]): text for key, text in self._list(topic)}
            if len(found) == self.count:
                return {rank: json.loads(found[rank]) for rank in sorted(found)}
            time.sleep(0.05)  # one that has gone or stopped meanwhile ends the group by its silence

    # Stopping

    def request_stop(self, reason: str) -> None:
        """A signal came, here. Before the first step the group ends at once, after it all stop at one step; a second
        request changes nothing."""
        if self._stop_reason is not None or self._stage == "after":
            return
        self._stop_reason = reason
        if self._stage == "before":
            who = f"rank {self.rank} was" if self.count > 1 else "the run was"
            self.end(f"{who} stopped by {reason} before its first step; nothing is lost, start it again", PREEMPTED)
        if self._client is not None:
            self._urgent.set()

    def begin_steps(self) -> None:
        """The loop begins: from here on a stop waits for the step in progress and its checkpoint."""
        self._stage = "loop"

    def end_steps(self) -> None:
        """The last step is done: a signal no longer changes anything."""
        self._stage = "after"

    def stop_before(self, step: int) -> str | None:
        """The reason to stop instead of beginning `step`, the same on every rank; None to go on."""
        with self._lock:
            if self._client is None:
                return self._stop_reason
            if self._frozen is None:
                self._step = step
                return None
            while self._target is None:
                self._lock.wait(1.0)
            return (self._stop_reason or "SIGTERM") if step > self._target else None

    def _settle_stop(self) -> None:
        """All ranks say how far they are bound to go; all go as far as the furthest."""
        if self._stop_reason is not None and self._frozen is None:
            self._put(f"stop/{self.rank}", self._stop_reason)
        asked = self._list("stop")
        if not asked:
            return
        with self._lock:
            if self._frozen is None:
                self._frozen = self._step
                self._stop_reason = self._stop_reason or asked[0][1]
                self._put(f"bound/{self.rank}", str(self._frozen))
        bound = self._list("bound")
        if len(bound) == self.count:
            with self._lock:
                self._target = max(int(text) for _, text in bound)
                self._lock.notify_all()

    # Ending

    def fail(self, sentence: str, code: int) -> End:
        """This rank has failed: write it down for the others; how the group ends."""
        named = f"rank {self.rank}: {sentence}" if self.count > 1 else sentence
        return self._write_end(End(self.rank, named, code))

    def fail_as(self, sentence: str, code: int) -> End:
        """As `fail`, for a sentence that names its ranks itself."""
        return self._write_end(End(self.rank, sentence, code))

    def end(self, sentence: str, code: int) -> None:
        """End every rank now, this one included."""
        end = self._write_end(End(self.rank, sentence, code))
        self._closed.wait(1.5 if self.count > 1 else 0.0)  # let the others read it before the store goes
        self._leave(end)

    def explain(self, error: BaseException) -> End:
        """Why a collective failed here: the end that another rank wrote, the rank that has gone, or this error."""
        deadline = time.monotonic() + EXPLAIN_S
        while time.monotonic() < deadline and self._end is None:
            time.sleep(0.2)
        if self._end is not None:
            return self._end
        gone = self._gone()
        if not self._reachable():
            return End(0, COORDINATOR_GONE, FAILED)
        if gone is not None:
            beat = self._beats().get(gone)
            where = f" after step {beat.step}, at: {beat.doing}" if beat else ""
            return self._write_end(
                End(gone, f"rank {gone} has gone{where}; every rank ends, the last checkpoint is intact", FAILED)
            )
        return self.fail(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}", FAILED)

    def _gone(self) -> int | None:
        """A rank that gives no more signs of life; None once all others have given one. One whose last was seen a
        moment ago may be gone all the same, where this process stood still until then: its next is waited for."""
        first, longest = self._beats(), max(EXPLAIN_S / 2, 3 * self._interval)
        while True:
            silence, beats = self._silence(), self._beats()
            silent = [rank for rank, seconds in silence.items() if rank != self.rank and seconds > longest]
            if silent:
                return silent[0]
            if all(beats[rank].count > first[rank].count for rank in first.keys() & beats.keys() - {self.rank}):
                return None
            time.sleep(self._interval)

    def runtime_died(self) -> None:
        """JAX's runtime gave up on this process: say why and leave. Called on a thread of C++."""
        if self._closed.is_set():  # a peer was faster to leave: this rank's own work is done
            os._exit(self._code)
        time.sleep(2.0)  # the main thread, or the store, may know more
        self._leave(self._end or End(0, COORDINATOR_GONE, FAILED))

    def _write_end(self, end: End) -> End:
        if self._end is not None:
            return self._end
        self._end = end
        if self._client is not None:
            try:
                self._client.key_value_set(f"{ROOT}/end", end.to_json(), False)
            except Exception:  # somebody was first, or the store is gone
                self._end = self._read_end() or end
        return self._end

    def _read_end(self) -> End | None:
        try:
            return End.from_json(self._client.key_value_try_get(f"{ROOT}/end"))
        except Exception:  # jaxlib raises for a key that is not there, and for a store that is not there
            return None

    # The store

    def _put(self, key: str, value: str) -> None:
        try:
            self._client.key_value_set(f"{ROOT}/{key}", value, True)
            self._heard = time.monotonic()
        except Exception:  # the store is gone: `_watch` notices that nothing is heard
            return

    def _list(self, key: str) -> list[tuple[str, str]]:
        try:
            found = self._client.key_value_dir_get(f"{ROOT}/{key}/")
            self._heard = time.monotonic()
            return found
        except Exception:  # as above
            return []

    def _reachable(self) -> bool:
        before = self._heard
        self._put(f"beat/{self.rank}", self._beat().to_json())
        return self._heard > before

    def _beats(self) -> dict[int, Beat]:
        return {int(key.rsplit("/", 1)[1]): Beat.from_json(text) for key, text in self._list("beat")}

    def _silence(self) -> dict[int, float]:
        """Seconds since each rank's beat last changed, as seen from here."""
        now, beats = time.monotonic(), self._beats()
        for rank, beat in beats.items():
            if self._seen.get(rank, (-1, 0.0))[0] != beat.count:
                self._seen[rank] = (beat.count, now)
        return {rank: now - self._seen[rank][1] for rank in beats}

    # Threads

    @property
    def _interval(self) -> float:
        return max(0.5, self.count / 1000)

    def _talk_on(self) -> None:
        while not self._closed.is_set():
            self._urgent.wait(self._interval)
            self._urgent.clear()
            if self._closed.is_set():
                return
            self._put(f"beat/{self.rank}", self._beat().to_json())
            found = self._end or self._read_end()
            if found is not None:
                self._follow(found)
                return
            self._settle_stop()
            if self.rank and self.count > MOST_WATCHERS:
                continue
            silence = self._silence()  # every rank of a small group keeps count, so that any can say who has gone
            verdict = judge(self._beats(), silence, self.limits) if self.rank == 0 else None
            if verdict is not None:
                self._blame(*verdict)

    def _blame(self, rank: int, sentence: str) -> None:
        if rank == self.rank:
            faulthandler.dump_traceback(file=sys.stderr)
        self.end(sentence, FAILED)

    def _follow(self, end: End) -> None:
        """Another rank has ended the group. The main thread has a moment to leave by itself."""
        self._end = end
        if end.rank == self.rank:
            self._closed.wait(GRACE_S)
        if not self._closed.is_set():
            self._leave(end)

    def _watch(self) -> None:
        """The clock alone: a group of one that makes no progress, and a coordinator that answers nobody."""
        tick, last = 0.5, time.monotonic()
        while not self._closed.wait(tick):
            now = time.monotonic()
            if now - last > 20 * tick:  # this process was stopped: what was heard is old, ask again first
                self._heard, self._seen = now, {}
            last = now
            if self._client is None:
                beat = Beat(0, self._step, self._doing, now - self._since)
                verdict = judge({0: beat}, {}, self.limits)
                if verdict is not None:
                    faulthandler.dump_traceback(file=sys.stderr)
                    self._leave(End(0, verdict[1].replace("rank 0 is the furthest behind: ", ""), FAILED))
                    return
            elif self.rank and now - self._heard > self.limits.silence + 2 * self._interval:
                self._leave(End(0, f"rank 0, the coordinator, has not answered for {now - self._heard:.0f} s", FAILED))
                return


def _show(value: Any) -> str:
    return "nothing" if value is None else str(value)
