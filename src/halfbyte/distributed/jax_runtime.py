"""Connects to JAX's multi-process runtime and handles signals, without aborts.

JAX's client aborts with a page of C++ stack when its coordinator goes away. It accepts a callback for that event, whose
argument cannot be converted to Python (jaxlib 0.10), which ends in std::terminate. So a callback is passed, and
std::terminate is set to a function that prints the cause and exits.

SIGTERM, SIGINT and SIGHUP become a request to stop at any moment, also while the main thread is inside a compiler or a
collective and Python's own handlers cannot run. A second SIGINT interrupts at once.
"""

import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import jax
from jax._src import distributed

_TERMINATE = ctypes.CFUNCTYPE(None)
_keep_alive: list[Any] = []  # C++ holds no reference to a Python function
_connecting = threading.Lock()
WATCHED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
JOIN_S = 5.0


class _WithCallback:
    """jaxlib's module with a client that does not abort."""

    def __init__(self, module: Any):
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def get_distributed_runtime_client(self, *args: Any, **options: Any) -> Any:
        return self._module.get_distributed_runtime_client(*args, **options, missed_heartbeat_callback=lambda *_: None)


def on_terminate(act: Callable[[], None]) -> None:
    """Makes std::terminate call `act`, which must not return.

    Does nothing if the C++ library is not libstdc++: the process then aborts.
    """
    try:
        library = ctypes.CDLL("libstdc++.so.6")
        handler = _TERMINATE(act)
        library._ZSt13set_terminatePFvvE(handler)
    except (OSError, AttributeError):
        return
    _keep_alive.append(handler)


def connect_distributed(
    coordinator: str,
    processes: int,
    process: int,
    *,
    bind: str,
    local_devices: Sequence[int] | None,
    initialization_timeout_s: int,
    heartbeat_timeout_s: int,
) -> Any:
    """Initializes jax.distributed. Returns the client of its key-value store; ValueError if peers are missing."""
    jax.config.update("jax_enable_preemption_service", False)  # `SignalHandler` and `ProcessGroup` handle signals
    original = distributed._jax
    with _connecting:
        distributed._jax = _WithCallback(original)
        try:
            jax.distributed.initialize(
                coordinator,
                processes,
                process,
                local_device_ids=list(local_devices) if local_devices else None,
                cluster_detection_method="deactivate",
                coordinator_bind_address=bind,
                initialization_timeout=initialization_timeout_s,
                heartbeat_timeout_seconds=heartbeat_timeout_s,
            )
        except RuntimeError as error:  # std::bad_cast if the callback above was called, else an error of jaxlib
            distributed.global_state.client = None  # or its shutdown at exit prints a traceback
            why = "" if "bad_cast" in str(error) else f" ({' '.join(str(error).split())[:200]})"
            raise ValueError(
                f"rank {process} did not find its {processes - 1} peers at {coordinator} within "
                f"{initialization_timeout_s} s{why}; start all ranks with the same --distributed.coordinator and "
                "--distributed.processes"
            ) from None
        finally:
            distributed._jax = original
    return distributed.global_state.client


def is_connected() -> bool:
    """Returns True if this process is one of several."""
    return distributed.global_state.client is not None


def shutdown_and_exit(code: int) -> None:
    """Leaves the group and ends this process with os._exit.

    During Python's shutdown C++ destroys objects that threads of collectives still use: a segmentation fault, with its
    exit code instead of 75, after all output was written.
    """
    try:
        jax.distributed.shutdown()
    except RuntimeError as error:  # a peer has left the group before
        print(f"halfbyte: the group had ended before this rank left it ({str(error).splitlines()[0]})", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class SignalHandler:
    """Context manager of the main thread that calls `on_signal(name)` on a separate thread for every signal.

    `afterwards` is the handler that is installed on exit; None: the handler that was installed before.
    """

    def __init__(self, on_signal: Callable[[str], None], *, afterwards: Any = None):
        self.on_signal, self._afterwards = on_signal, afterwards
        self._old: dict[int, Any] = {}
        self._old_fd = -1
        self._interrupts = 0
        self._write = -1

    def __enter__(self) -> "SignalHandler":
        reading, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._old = {number: signal.signal(number, self._receive) for number in WATCHED}
        self._old_fd = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._listen, args=(reading,), name="halfbyte-signals", daemon=True)
        self._thread.start()
        return self

    def _receive(self, number: int, frame: FrameType | None) -> None:
        """Handles a signal in Python, after the wake-up pipe has notified the thread: a second SIGINT interrupts."""
        self._interrupts += number == signal.SIGINT
        if self._interrupts > 1:
            raise KeyboardInterrupt

    def _listen(self, reading: int) -> None:
        while content := os.read(reading, 64):
            with contextlib.suppress(OSError):  # forwards to the listener that was installed before, if there is one
                os.write(self._old_fd, content)
            for number in content:
                if number in WATCHED:
                    self.on_signal(signal.Signals(number).name)
        os.close(reading)

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._old_fd)
        for number, handler in self._old.items():
            signal.signal(number, handler if self._afterwards is None else self._afterwards)
        os.close(self._write)  # the thread reads the end of its pipe
        self._thread.join(JOIN_S)  # bounded: `on_signal` may be talking to peers that do not answer
