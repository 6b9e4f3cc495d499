"""JAX's multi-process runtime, started so that it does not end this process by itself.

When its coordinator goes away JAX's client aborts with a page of C++ stack. It takes a callback for that moment; the
callback's argument cannot be converted to Python (jaxlib 0.10), which ends in std::terminate. So the callback is given,
and std::terminate is pointed to a function that says what happened and exits.
"""

import ctypes
import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src import distributed

_TERMINATE = ctypes.CFUNCTYPE(None)
_kept: list[Any] = []  # C++ holds no reference to a Python function
_connecting = threading.Lock()


class _WithCallback:
    """jaxlib's module with a client that does not abort."""

    def __init__(self, module: Any):
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def get_distributed_runtime_client(self, *args: Any, **options: Any) -> Any:
        return self._module.get_distributed_runtime_client(*args, **options, missed_heartbeat_callback=lambda *_: None)


def on_terminate(act: Callable[[], None]) -> None:
    """Call `act`, which must not return, instead of aborting when C++ gives up. Does nothing where the C++ library is
    not the usual one: then the process aborts as before."""
    try:
        library = ctypes.CDLL("libstdc++.so.6")
        handler = _TERMINATE(act)
        library._ZSt13set_terminatePFvvE(handler)
    except (OSError, AttributeError):
        return
    _kept.append(handler)


def connect(
    coordinator: str,
    processes: int,
    process: int,
    *,
    bind: str,
    local_devices: Sequence[int] | None,
    initialization_timeout_s: int,
    heartbeat_timeout_s: int,
) -> Any:
    """Join the group; the client of its key-value store. Raises ValueError when the peers do not come."""
    jax.config.update("jax_enable_preemption_service", False)  # signals are ours: see Group
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
        except RuntimeError as error:  # std::bad_cast where the callback above was asked, else jaxlib's own
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
    """Whether this process is one of several."""
    return distributed.global_state.client is not None


def leave_and_exit(code: int) -> None:
    """Leave the group and end this process. Not by Python's own way out, on which C++ takes apart what collectives'
    threads still use: seen as a segmentation fault after everything was written and said, with its code for 75.
    """
    try:
        jax.distributed.shutdown()
    except RuntimeError as error:  # a peer went first
        print(f"halfbyte: the group had ended before this rank left it ({str(error).splitlines()[0]})", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
