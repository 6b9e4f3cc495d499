"""The command line itself: exit codes, one-paragraph errors, nearest names, and a clean stdout under --json."""

import ast
import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import halfbyte.cli
from halfbyte.cli import main as cli
from halfbyte.cli.flag_parsing import help_text

COMMAND = '''"""Say hello to someone.

More about it."""
import os
from dataclasses import dataclass
from halfbyte.cli.console import CommandResult as Result

@dataclass(frozen=True)
class Args:
    steps: int = 1
    """How often."""
    name: str = "you"
    """To whom."""

def run(args):
    print("hello", args.name)
    os.system("echo from a child process")
    if args.name == "bad":
        raise ValueError("name 'bad' is bad; take another")
    if args.name == "bug":
        import json
        json.loads("{")
    if args.name == "gone":
        open("no/such/file")
    if args.name == "crash":
        raise KeyError("x")
    return Result({"name": args.name, "steps": args.steps}, code=3 if args.name == "fails" else 0)
'''


@pytest.fixture
def hello(tmp_path, monkeypatch):
    """A command module named `hello`, living where Halfbyte's own commands live as far as main can tell."""
    (tmp_path / "hello.py").write_text(COMMAND)
    (tmp_path / "not_a_command.py").write_text('"""Something else."""\nx = 1\n')
    monkeypatch.setattr("halfbyte.cli.__path__", [str(tmp_path), *halfbyte.cli.__path__])
    monkeypatch.setattr(cli, "PACKAGE_DIR", tmp_path)
    monkeypatch.setattr(cli, "CLI_DIR", tmp_path)
    yield
    sys.modules.pop("halfbyte.cli.hello", None)


def test_overview_lists_commands_by_their_first_line(hello, capsys):
    assert cli.main([]) == 0
    out = capsys.readouterr().out
    assert "hello  Say hello to someone" in out
    assert "Something else" not in out


def test_a_command_runs(hello, capfd):
    assert cli.main(["hello", "--name", "world"]) == 0
    assert "hello world" in capfd.readouterr().out


def test_json_leaves_stdout_to_the_object_alone(hello, capfd):
    assert cli.main(["hello", "--json", "--steps", "3"]) == 0
    out, err = capfd.readouterr()
    assert json.loads(out) == {"name": "you", "steps": 3}
    assert "hello you" in err and "from a child process" in err


def test_json_is_printed_for_a_verdict_that_did_not_pass(hello, capfd):
    assert cli.main(["hello", "--name", "fails", "--json"]) == 3
    assert json.loads(capfd.readouterr().out)["name"] == "fails"


def test_bad_input_is_one_paragraph_and_exit_2(hello, capfd):
    assert cli.main(["hello", "--name", "bad"]) == 2
    err = capfd.readouterr().err
    assert "halfbyte: name 'bad' is bad; take another" in err
    assert "Traceback" not in err


def test_a_missing_file_is_bad_input(hello, capfd):
    assert cli.main(["hello", "--name", "gone"]) == 2
    assert "no/such/file" in capfd.readouterr().err


@pytest.mark.parametrize("name", ["bug", "crash"])
def test_an_error_that_is_ours_shows_its_traceback_and_exit_1(hello, capfd, name):
    assert cli.main(["hello", "--name", name, "--json"]) == 1
    out, err = capfd.readouterr()
    assert "Traceback" in err and "halfbyte: failed:" in err
    assert out == ""


def test_unknown_flag_names_the_nearest_and_exits_2(hello, capfd):
    assert cli.main(["hello", "--stps", "3"]) == 2
    assert "--steps" in capfd.readouterr().err
    assert cli.main(["hello", "--jsn"]) == 2
    assert "did you mean --json?" in capfd.readouterr().err


def test_unknown_command_names_the_nearest_and_exits_2(hello, capfd):
    assert cli.main(["helo"]) == 2
    assert "did you mean `halfbyte hello`?" in capfd.readouterr().err
    assert cli.main(["--wat"]) == 2
    assert "unknown flag '--wat'" in capfd.readouterr().err


def test_help_of_a_command(hello, capfd):
    assert cli.main(["hello", "--help"]) == 0
    out = capfd.readouterr().out
    assert "More about it." in out and "How often." in out and "--json" in out


def test_a_value_of_the_wrong_type_exits_2(hello, capfd):
    assert cli.main(["hello", "--steps", "many"]) == 2
    assert "--steps" in capfd.readouterr().err


def test_examples_in_a_docstring_keep_their_lines():
    shown = help_text("Do it.\n\nhalfbyte do A\nhalfbyte do B   again\n\nSome text\nthat is filled.\n")
    assert shown == "Do it.\n\nhalfbyte do A\n\nhalfbyte do B   again\n\nSome text\nthat is filled."


def test_json_holds_what_training_returns():
    found = cli.to_jsonable(
        {"loss": float("nan"), 3: np.float32(0.5), "curve": np.arange(2), "at": (1, {"x": float("inf")})}
    )
    assert found == {"loss": None, "3": 0.5, "curve": [0, 1], "at": [1, {"x": None}]}
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_commands_are_the_modules_that_define_run():
    """Oracle: Python's parser, which no string and no odd spacing misleads."""
    bodies = {file: ast.parse(file.read_text(encoding="utf-8")).body for file in cli.CLI_DIR.glob("*.py")}
    defining = {
        f for f, body in bodies.items() if any(isinstance(n, ast.FunctionDef) and n.name == "run" for n in body)
    }
    assert set(cli.find_commands().values()) == defining


def test_every_command_has_a_short_summary():
    commands = cli.find_commands()
    assert {"doctor", "recipes"} <= set(commands)
    for name, file in commands.items():
        assert 0 < len(cli.command_summary(file)) < 100, name


def test_help_does_not_import_jax():
    code = "import sys; from halfbyte.cli.main import main; main(['--help']); sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2], capture_output=True)


@pytest.mark.slow(fast_cases=["--save-every---checkpoint.every"])
@pytest.mark.parametrize(
    "typed, meant",
    [
        ("--optimizer.lr", "--optimizer.learning-rate"),
        ("--lr", "--optimizer.learning-rate"),
        ("--batch_size", "--batch"),
        ("--save-every", "--checkpoint.every"),
        ("--eval-every", "--validation.every"),
        ("--model.n-layers", "--model.layers"),
        ("--clip", "--optimizer.clip"),
        ("--optimizer.learning-rte", "--optimizer.learning-rate"),
        ("--jsn", "--json"),
        ("--xyzzy", None),
    ],
)
def test_suggestions_fit(typed, meant, capfd):
    assert cli.main(["train", "demo", typed, "1"]) == 2
    error = " ".join(capfd.readouterr().err.split())
    assert f"unknown flag {typed}; " + (f"did you mean {meant}?" if meant else "nothing here") in error
    assert error.count("halfbyte:") == 1


@pytest.mark.slow
@pytest.mark.parametrize("group", ["data prepare", "data sample"])
def test_suggestions_for_sub_commands(group, capfd):
    name, sub = group.split()
    assert cli.main([name, sub, "x", "--overwrit" if sub == "prepare" else "--row", "1"]) == 2
    assert "did you mean" in " ".join(capfd.readouterr().err.split())


@pytest.mark.slow
def test_a_reader_that_goes_away_is_no_error():
    """`halfbyte recipes | head -1`: nothing on stderr, and the exit code of SIGPIPE."""
    code = "from halfbyte.cli.main import entry; entry()"
    script = f"{sys.executable} -c '{code}' --help | head -1 >/dev/null; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) in ((0, ""), (141, ""))
    closed = f"{sys.executable} -c '{code}' recipes >&-"
    done = subprocess.run(["bash", "-c", closed], capture_output=True, text=True)
    assert "Traceback" not in done.stderr
    reading, writing = os.pipe()
    os.close(reading)  # gone before it begins, however busy the machine is
    done = subprocess.run([sys.executable, "-c", code, "recipes"], stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert done.returncode == 141 and "Traceback" not in done.stderr and "halfbyte:" not in done.stderr


@pytest.mark.parametrize(
    "number, code", [(errno.ENAMETOOLONG, 2), (errno.EROFS, 2), (errno.ENOSPC, 1), (errno.EMFILE, 1), (errno.EIO, 1)]
)
def test_what_the_machine_refuses_is_one_paragraph(number, code, capfd):
    assert cli.report_error(OSError(number, "it says no", "a/file")) == code
    error = capfd.readouterr().err
    assert "it says no" in error and "Traceback" not in error


def test_errors_do_not_reach_the_terminal_as_commands(capfd):
    cli.say_error("no file \x1b[2J\x1b]0;title\x07 here")
    assert "\x1b" not in capfd.readouterr().err


def test_a_console_shows_markup_and_escapes_as_text(capsys):
    from halfbyte.cli.console import console, rich_table

    console().print(rich_table(["[/bold]"], [["[/bold]\x1b[31m[red]x[/]"]]))
    console().print("[/nothing] \x9b31m :smile:")
    out = capsys.readouterr().out
    assert "[/bold]\\x1b[31m[red]x[/]" in out and "[/nothing] \\x9b31m :smile:" in out and "\x1b" not in out


def test_a_platform_that_jax_does_not_have_is_bad_input(monkeypatch, capfd):
    """What JAX raises, at its first device, for JAX_PLATFORMS=nope."""
    monkeypatch.setenv("JAX_PLATFORMS", "nope")
    assert cli.report_error(RuntimeError("Unable to initialize backend 'nope': Backend 'nope' is not in the list")) == 2
    error = capfd.readouterr().err
    assert "JAX_PLATFORMS is 'nope'" in error and "Traceback" not in error
