"""`halfbyte COMMAND ...`: finds the command, reads its flags, runs it, and turns errors into one paragraph.

How a command is written
------------------------
A command is a module of this folder that defines `run`. Nothing is registered: adding `cli/eval.py` adds
`halfbyte eval`. (`import` is a word of Python: `cli/import_.py` is `halfbyte import`.)

    \"\"\"Score a run on local tasks.                     <- the first line is what `halfbyte --help` shows

    The rest of the docstring is shown by `halfbyte eval --help`.\"\"\"

    @dataclass(frozen=True)
    class Args:                                           # anything tyro can parse; a union makes sub-commands
        run: Annotated[str, tyro.conf.Positional]
        \"\"\"Run directory.\"\"\"                         <- help of the flag
        tasks: tuple[str, ...] = ()
        \"\"\"Task files (jsonl).\"\"\"

    def run(args: Args) -> Result:                        # Result(data, code)
        from halfbyte.evaluation import score             # heavy imports inside, so that --help stays instant
        table = score(...)
        print(table)                                      # people read stdout
        return Result({"tasks": ...})                     # programs read --json

A command prints for people on stdout, as usual, and returns what it found. `--json` belongs to every command and is
taken off before the command sees its flags: then all that is printed goes to stderr, and stdout gets the returned data
as one JSON object. A module that reads its flags in its own way defines `parse(argv: list[str]) -> args` instead of
`Args`.

Exit codes: 0 done, 1 failed, 2 bad usage or bad input, 3 a check or verdict that did not pass, 75 stopped by preemption
and resumable. A ValueError (or a path that cannot be used) raised by Halfbyte's own code is bad input: one paragraph,
exit 2. What the machine refuses (a full disk, no more file handles) is one paragraph, exit 1. Any other error is a
failure of ours: traceback, exit 1. HALFBYTE_TRACEBACK=1 shows every traceback. A reader that goes away (`| head`) is no
error: the command ends as the shell's own tools do.
"""

import ast
import atexit
import codecs
import contextlib
import difflib
import errno
import gc
import importlib
import io
import json
import math
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from halfbyte.cli.console import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_OK, CommandResult, say_error
from halfbyte.cli.terminal_signals import exit_as_preempted, keep_user_informed, reraise_lost_interrupts
from halfbyte.io import refuse_url
from halfbyte.io.trusted_programs import trust_only_named_programs
from halfbyte.renamed import shorten_warnings

CLI_DIR = Path(__file__).parent
DEFINES_RUN = re.compile(r"^def run\(", re.MULTILINE)
PACKAGE_DIR = CLI_DIR.parent
LEFT_THREADS_S = 5.0
BAD_PATH = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError)
BAD_PATH_CODES = (errno.ENAMETOOLONG, errno.ELOOP, errno.EROFS, errno.ENODEV, errno.ENXIO)
# The machine's fault, not the program's: a traceback would tell nobody anything.
MACHINE_CODES = (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.EIO, errno.EFBIG, errno.ENOMEM)
# Importing and tracing make a million small objects that stay: with Python's own thresholds looking for garbage among
# them takes most of a second of a start.
GC_THRESHOLDS = (50_000, 20, 100)
BROKEN_PIPE = 128 + signal.SIGPIPE
# Shown first and in this order by `halfbyte --help`; commands not named here follow by name.
COMMAND_ORDER = tuple(
    "train launch fetch verify generate eval compare parity league playbook inspect plan data recipes bench import "
    "export doctor".split()
)


def entry() -> None:
    """The console script. Output that nobody reads any more ends the program quietly, with the code of SIGPIPE. A
    thread that a library has left waiting (Orbax, after a write that failed) does not keep the process."""
    open_standard_streams()
    shorten_warnings()
    gc.set_threshold(*GC_THRESHOLDS)
    reraise_lost_interrupts()
    try:
        code = main()
        sys.stdout.flush()
        signal.signal(signal.SIGTERM, lambda *_: os._exit(code))  # all is done, and the code says how it ended
    except BrokenPipeError:
        code = BROKEN_PIPE
    except KeyboardInterrupt:  # before a command has begun, or while it is being left
        say_error("interrupted")
        code = EXIT_FAILED
    if code == BROKEN_PIPE:  # what is still buffered must not be tried again when Python shuts down
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    if any(not thread.daemon and thread is not threading.main_thread() for thread in threading.enumerate()):
        timer = threading.Timer(LEFT_THREADS_S, lambda: os._exit(code))
        timer.daemon = True
        timer.start()
    if "halfbyte.distributed.jax_runtime" in sys.modules:  # where it was needed; it loads JAX
        _exit_group(code)
    if "jaxlib" in sys.modules:
        _leave_with_jax(code)
    sys.exit(code)


def _exit_group(code: int) -> None:
    from halfbyte.distributed import is_connected, shutdown_and_exit

    if is_connected():
        shutdown_and_exit(code)


def _leave_with_jax(code: int) -> None:
    """Join threads, run the `atexit` functions, flush, and end the process without finalizing the interpreter.

    XLA's worker threads cannot be joined by any public call, and since jaxlib 0.11 such a thread takes the GIL when it
    has copied an array to the host, to drop its reference. Up to Python 3.13 a thread that asks for the GIL during
    finalization is ended by `pthread_exit` (https://github.com/python/cpython/issues/87135). That unwinds C++ frames
    which are `noexcept`, so the process aborts after all its work is done: "terminate called without an active
    exception", exit code 134. Seen with jaxlib 0.11.2 on Python 3.13; jaxlib 0.10.2 does not take the GIL there.
    """
    with contextlib.suppress(KeyboardInterrupt):
        threading._shutdown()  # type: ignore[attr-defined]  # what finalization begins with, as does `multiprocessing`
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # a full disk, or a stream that is closed
            code = code or EXIT_FAILED
    os._exit(code)


def open_standard_streams() -> None:
    """Gives a program that was started without stdin, stdout or stderr (`>&-`) the null device there, before the next
    file that is opened takes the number and gets what is printed."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115 (open for the life of the program)
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):  # an encoding without a character (PYTHONIOENCODING=ascii) ends no command
        if isinstance(stream, io.TextIOWrapper) and codecs.lookup(stream.encoding).name != "utf-8":
            stream.reconfigure(errors="replace" if stream.isatty() else "backslashreplace")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    commands = find_commands()
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(overview(commands))
        return EXIT_OK
    if argv[0] in ("-V", "--version"):
        import halfbyte

        print(f"halfbyte {halfbyte.__version__}")
        return EXIT_OK
    name, flags = argv[0], argv[1:]
    if name not in commands:
        return unknown_command(name, commands)
    as_json = "--json" in flags
    return run_command(name, commands[name], [flag for flag in flags if flag != "--json"], as_json=as_json)


def find_commands() -> dict[str, Path]:
    """Command name -> its file, for every module of this folder that defines `run` at top level."""
    files = [file for file in CLI_DIR.glob("*.py") if DEFINES_RUN.search(file.read_text(encoding="utf-8"))]
    found = {file.stem.rstrip("_").replace("_", "-"): file for file in files}
    rank = {name: place for place, name in enumerate(COMMAND_ORDER)}
    return dict(sorted(found.items(), key=lambda item: (rank.get(item[0], len(COMMAND_ORDER)), item[0])))


def command_summary(file: Path) -> str:
    """First line of the module's docstring, without importing it."""
    doc = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return doc.partition("\n")[0].rstrip(".")


def overview(commands: Mapping[str, Path]) -> str:
    """What `halfbyte --help` prints."""
    width = max(map(len, commands), default=0)
    lines = [f"  {name:<{width}}  {command_summary(file)}" for name, file in commands.items()]
    return "\n".join(
        [
            "halfbyte: language-model pretraining in 4-bit NVFP4, on the hardware you have",
            "",
            "usage: halfbyte COMMAND [FLAGS]      halfbyte COMMAND --help      (--json: one JSON object on stdout)",
            "",
            *lines,
            "",
            "Start with `halfbyte train`: a small Llama, an embedded corpus, this machine.",
        ]
    )


def unknown_command(name: str, commands: Mapping[str, Path]) -> int:
    near = difflib.get_close_matches(name, commands, n=1, cutoff=0.5)
    hint = f"did you mean `halfbyte {near[0]}`?" if near else f"commands: {', '.join(commands)}."
    what = "flag" if name.startswith("-") else "command"
    say_error(f"unknown {what} {name!r}; {hint}")
    return EXIT_BAD_INPUT


def run_command(name: str, file: Path, flags: list[str], *, as_json: bool) -> int:
    """Parses the flags, runs the command with stdout kept clean if `as_json`, and reports any error."""
    from halfbyte.devices.compile_target import (
        force_cpu_without_gpu,
        has_compiler_without_gpu,
        import_jax_silencing_stderr,
    )

    with contextlib.ExitStack() as stack:
        stack.enter_context(trust_only_named_programs(flags))
        stack.enter_context(keep_user_informed(name))
        if name == "train":
            stack.enter_context(exit_as_preempted())
        if name == "plan":  # XLA lists the instructions that a profile of a step has not: 172 lines for one step
            os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
        if has_compiler_without_gpu():
            force_cpu_without_gpu(os.environ)
            import_jax_silencing_stderr()
        stdout = stack.enter_context(_stdout_to_stderr()) if as_json else sys.stdout
        try:
            refuse_urls(name, flags)
            module = importlib.import_module(f"halfbyte.cli.{file.stem}")
            result: CommandResult = module.run(parse_flags(name, module, flags))
        except SystemExit as stop:  # the parser has said what is wrong, or printed its help
            return stop.code if isinstance(stop.code, int) else (EXIT_OK if stop.code is None else EXIT_FAILED)
        except KeyboardInterrupt:
            say_error(f"`halfbyte {name}` was interrupted")
            return EXIT_FAILED
        except BrokenPipeError:
            return BROKEN_PIPE
        except Exception as error:
            return report_error(error)
    if as_json:
        print(json.dumps(to_jsonable(result.data), default=str, allow_nan=False), file=stdout, flush=True)
    return result.code


def refuse_urls(name: str, flags: Sequence[str]) -> None:
    """ValueError if a flag other than --copy-to names a bucket: runs are read and written in local directories."""
    for before, word in zip(["", *flags], flags):
        flag, _, value = word.rpartition("=") if word.startswith("--") else (before, "", word)
        if name != "fetch" and flag.replace("_", "-") not in ("--copy-to", "--prompt"):
            refuse_url(value)


def parse_flags(name: str, module: ModuleType, flags: list[str]) -> Any:
    """The command's arguments. An unknown flag ends the program with the nearest one named, exit code 2."""
    if hasattr(module, "parse"):
        return module.parse(flags)
    from halfbyte.cli.flag_parsing import read_flags

    return read_flags(module.Args, flags, prog=f"halfbyte {name}", doc=module.__doc__)


def to_jsonable(value: Any) -> Any:
    """`value` as JSON can hold it: arrays become lists, array scalars numbers, and what is not finite null."""
    if isinstance(value, Mapping):
        return {str(key): to_jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [to_jsonable(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return to_jsonable(value.tolist()) if hasattr(value, "tolist") else value


def report_error(error: Exception) -> int:
    """Says what went wrong; 2 if the input was at fault, 1 if we were."""
    ours = is_bad_input(error)
    machine = isinstance(error, OSError) and error.errno in MACHINE_CODES
    if not (ours or machine) or os.environ.get("HALFBYTE_TRACEBACK"):
        traceback.print_exception(error)
    kind = "" if ours else "failed: " if machine else f"failed: {type(error).__name__}: "
    say_error(kind + _paragraph(error))
    return EXIT_BAD_INPUT if ours else EXIT_FAILED


def is_bad_input(error: BaseException) -> bool:
    """True for a ValueError raised by Halfbyte's own code, and for a path that is missing or cannot be used."""
    if isinstance(error, BAD_PATH) or (isinstance(error, OSError) and error.errno in BAD_PATH_CODES):
        return True
    if _no_platform(error):
        return True
    if not isinstance(error, ValueError) or error.__traceback__ is None:
        return False
    innermost = traceback.extract_tb(error.__traceback__)[-1].filename
    return Path(innermost).is_relative_to(PACKAGE_DIR)


def _no_platform(error: BaseException) -> bool:
    """Whether JAX was asked, by the environment, for a device that is not here."""
    asked = "JAX_PLATFORMS" in os.environ and isinstance(error, RuntimeError)
    return asked and str(error).startswith("Unable to initialize backend")


def _paragraph(error: BaseException) -> str:
    """What the error says; of the system's own errors, the words without their number."""
    if _no_platform(error):
        named = os.environ["JAX_PLATFORMS"]
        return f"JAX_PLATFORMS is {named!r}, and JAX has no such device here ({error}); unset it, or name another"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror + (f": {error.filename}" if error.filename else "")
    return str(error) or type(error).__name__


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[Any]:
    """Sends everything written to stdout to stderr, also by C libraries; yields the real stdout."""
    real = sys.stdout
    real.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    try:
        yield real
    finally:
        sys.stdout = real
        os.dup2(saved, 1)
        os.close(saved)
