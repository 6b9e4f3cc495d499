"""A process that has loaded Halfbyte and nothing more, and forks one for each command: half of what a short command
costs is loading modules, and the harness starts some hundreds. A forked process is an ordinary one: it is signalled,
stopped, killed and looked into like any other; no thread of JAX has begun before the fork.

    python warm.py SOCKET        # one connection a command: JSON in; {"pid"}, then {"code", "seconds"} out

A command may be watched by Python's audit events: `log` is a file that gets a line for each operation that makes,
moves, writes or removes something under `under`, or runs or reads something from there, *before* it happens; with
`die_at` N the process is killed (SIGKILL) before the Nth operation that changes something: a kill at any place between
two operations, without waiting for chance. An operation whose line `hold` (a regular expression) finds is not done
before the file `gate` is there: its line in the log proves that the process has come so far, and will not go further
than it can without it. The program knows nothing of it.
"""

import gc
import importlib
import itertools
import json
import os
import re
import selectors
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

CHANGES = {
    "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "os.chmod",
    "shutil.rmtree",
}  # fmt: skip
LIBRARIES = (
    "orbax.checkpoint", "tensorstore", "grain", "optax", "tyro", "rich.console", "array_record", "tokenizers",
    "safetensors", "halfbyte.train.run", "halfbyte.checkpoint.store", "halfbyte.data", "halfbyte.hf",
    "halfbyte.study", "halfbyte.evaluation", "halfbyte.distributed", "halfbyte.distributed", "halfbyte.ops",
    "halfbyte.io", "halfbyte.evaluation.radar",
)  # fmt: skip


def load() -> None:
    """Every command and what it needs, as it is imported, not used."""
    from halfbyte.cli.main import find_commands
    from halfbyte.devices.compile_target import force_cpu_without_gpu, import_jax_silencing_stderr

    force_cpu_without_gpu(os.environ)
    import_jax_silencing_stderr()
    for file in find_commands().values():
        importlib.import_module(f"halfbyte.cli.{file.stem}")
    for name in LIBRARIES:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)  # as in tests/conftest.py: a start is mostly tracing


def serve(address: str) -> tuple[dict[str, Any], list[int]]:
    """Fork a process for each request, for ever; in the forked one, return the request and its output's handle."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    ended_reading, ended = os.pipe()
    os.set_blocking(ended, False)
    signal.set_wakeup_fd(ended, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    asked: dict[int, socket.socket] = {}
    with selectors.DefaultSelector() as waiting:
        for source in (listener, ended_reading, 0):  # the harness holds our stdin: its end is ours
            waiting.register(source, selectors.EVENT_READ)
        print("ready", flush=True)
        while True:
            for key, _ in waiting.select():
                if key.fileobj == 0:
                    end(asked)
                elif key.fileobj == ended_reading:
                    os.read(ended_reading, 4096)
                    tell(asked)
                else:
                    connection = listener.accept()[0]
                    words, handles, _, _ = socket.recv_fds(connection, 1 << 16, 1)
                    if not words:
                        continue
                    pid = os.fork()
                    if pid == 0:
                        signal.set_wakeup_fd(-1)
                        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                        for one in (listener, connection, *asked.values()):
                            one.close()
                        os.close(ended_reading), os.close(ended)
                        return json.loads(words), handles
                    os.close(handles[0])
                    asked[pid] = connection
                    connection.sendall(json.dumps({"pid": pid}).encode() + b"\n")


def tell(asked: dict[int, socket.socket]) -> None:
    """Whoever asked for a process that has ended learns how, and what it cost."""
    for pid in list(asked):
        found, status, usage = os.wait4(pid, os.WNOHANG)
        if found:
            said = {"code": os.waitstatus_to_exitcode(status), "seconds": usage.ru_utime + usage.ru_stime}
            with asked.pop(pid) as connection:
                try:
                    connection.sendall(json.dumps(said).encode() + b"\n")
                except OSError:  # nobody asks any more
                    continue


def end(asked: dict[int, socket.socket]) -> None:
    for pid in asked:
        os.kill(pid, signal.SIGKILL)
    os._exit(0)


def become(request: dict[str, Any], handles: list[int]) -> None:
    """Take the place of a command that was started at a prompt."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(handles[0], 1)
    os.dup2(handles[0], 2)
    os.close(handles[0])
    os.environ.update(request.get("environ", {}))
    if request.get("cwd"):
        os.chdir(request["cwd"])
    sys.argv = ["halfbyte", *request["words"]]
    if request.get("log"):
        hold, gate = re.compile(request.get("hold", "(?!)")), request.get("gate", "")
        watch(Path(request["under"]), Path(request["log"]), int(request.get("die_at", 0)), hold, gate)


def watch(under: Path, log: Path, die_at: int, hold: re.Pattern[str], gate: str) -> None:
    """Keep what touches `under`, one line an operation, in the order in which they are about to happen."""
    place, changes = str(under), itertools.count(1)  # threads count together, and each knows its own number
    lines = open(log, "a", buffering=1)  # noqa: SIM115 (for the life of the process)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        what = kind_of(event, arguments)
        if what and (paths := [path for path in map(path_of, arguments) if path.startswith(place)]):
            number = next(changes) if what == "change" else 0
            line = f"{what} {event} {' '.join(path[len(place) :] for path in paths)}\n"
            lines.write(line)
            if number and number == die_at:
                os.kill(os.getpid(), signal.SIGKILL)
            while hold.search(line) and not os.path.exists(gate):
                time.sleep(0.005)

    sys.addaudithook(hook)


def kind_of(event: str, arguments: tuple[Any, ...]) -> str:
    """change, read or run; "" for what is none of them."""
    if event in CHANGES:
        return "change"
    if event == "open":
        return "change" if isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR) else "read"
    return "run" if event == "exec" else ""


def path_of(argument: Any) -> str:
    """The file that an argument of an audit event names, or the code that it is comes from."""
    if isinstance(argument, str | bytes | os.PathLike):
        return os.path.abspath(os.fsdecode(argument))
    return getattr(argument, "co_filename", "")


if __name__ == "__main__":
    load()
    become(*serve(sys.argv[1]))
    from halfbyte.cli.main import entry

    entry()
