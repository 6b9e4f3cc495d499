"""Every `halfbyte ...` in the README and the documents is one that the command line takes: lines of code, and what
stands in backticks. Oracle: the commands' own parsers. Those of the README and of docs/install.md are run where this
machine can; `PARSED_ONLY` has the others, each with its reason."""

import functools
import importlib
import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from halfbyte.cli import main as cli
from halfbyte.cli.launch import parse as parse_launch
from halfbyte.cli.train import parse as parse_train
from halfbyte.train.run_presets import run_names

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "docs").glob("*.ipynb")])
COMMANDS = cli.find_commands()


def text_of(page):
    text = page.read_text(encoding="utf-8")
    if page.suffix != ".ipynb":
        return text
    cells = json.loads(text)["cells"]
    return "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


def lines_of(page):
    """Commands as typed: lines of code blocks without their comments, continued lines joined, parts of && and |."""
    text = text_of(page).replace("\\\n", " ")
    blocks = re.findall(r"^```(?:sh|bash|console)?\n(.*?)^```", text, re.S | re.M)
    typed = [line for block in blocks for line in block.splitlines()]
    typed += re.findall(r"^ {4}(halfbyte .*)$", text, re.M) + re.findall(r"`(halfbyte [^`\n]+)`", text)
    parts = [part.strip() for line in typed for part in re.split(r"\s#\s|&&|\s\||\s>\s|<\(|\)$", line)]
    return [part for part in parts if part.startswith("halfbyte ") and "..." not in part.replace('"..."', "")]


ALL = sorted({(page.relative_to(ROOT).as_posix(), line) for page in PAGES for line in lines_of(page)})


def meant(words):
    """Placeholders in capitals as something that fits: a run of ours, a number, one of several."""
    values = {"MODEL": "demo", "RUN": "demo", "K": "1", "N": "1", "RECIPE": "nvfp4"}
    return [values.get(word, word.partition("|")[0] if re.fullmatch(r"[a-z-]+(\|[a-z-]+)+", word) else word)
            for word in words]  # fmt: skip


@pytest.fixture
def a_folder_of_the_reader(tmp_path, monkeypatch):
    """Where the files are that the pages name."""
    page = (ROOT / "docs" / "your-model.md").read_text(encoding="utf-8")
    (tmp_path / "mine.py").write_text(re.search(r"```python\n(# mine.py\n.*?)```", page, re.S)[1])
    (tmp_path / "small.toml").write_text('run = "llama-60m"\n')
    monkeypatch.chdir(tmp_path)


@functools.cache  # several pages print the same command
def parse_error(line):
    """Returns why the command line refuses a printed command; None if it takes it."""
    _, name, *words = meant(shlex.split(line))
    if name.startswith("-") or name in ("COMMAND", "help"):
        return None
    if name not in COMMANDS:
        return f"there is no command {name}"
    try:
        return None if "--help" in words or not words else parse_command(name, words)
    except (Exception, SystemExit) as error:
        return repr(error)


def test_printed_commands_parse(a_folder_of_the_reader):
    assert {f"{page}: {line}": why for page, line in ALL if (why := parse_error(line))} == {}
    assert parse_error("halfbyte train demo --stepz 3") and parse_error("halfbyte trian demo")


def parse_command(name, words):
    if name == "launch":
        name, words = "train", list(parse_launch(words).command[1:])
    if name != "train":
        cli.parse_flags(name, importlib.import_module(f"halfbyte.cli.{COMMANDS[name].stem}"), words)
        return None
    if "--init-from" in words:  # reads the folder that is named; its flags are those of train
        at = words.index("--init-from")
        words = [*words[:at], *words[at + 2 :]]
    run = parse_train(words).run.name
    return None if run in run_names() else f"there is no run {run}"


def test_pages_print_every_command():
    assert len(ALL) > 80
    assert {line.split()[1] for _, line in ALL} >= set(COMMANDS) - {"plan"}


FIRST = ["halfbyte --help", "halfbyte train --help", "halfbyte --version"]

TOOLS = "halfbyte|make|pip|python3?|docker|source|nvidia-smi"
SMALL = "--steps 2 --model.layers 1 --batch 2 --seq 64 --validation.batches 1 --no-sample"
STUDY = "--steps 2 --batch 2 --seq 64 --no-controls --radar -1"
# Commands of README.md and docs/install.md that a test runs as they are printed.
AS_PRINTED = ("halfbyte recipes nvfp4 mxfp4", "halfbyte completion bash", "halfbyte completion zsh")
# Those that a test runs in this order in one folder, with the flags that make them small and the exit code. A study
# without control arms passes nothing: 3.
MADE_SMALL = {
    "halfbyte doctor": ("", 0),
    "halfbyte data prepare FILES --tokenizer bpe:8192 --out DIR": ("--seq-len 64", 0),
    "halfbyte train": (f"demo {SMALL} --run-dir RUN", 0),
    "halfbyte train demo --radar 400": (f"{SMALL} --run-dir radar", 0),
    "halfbyte inspect RUN": ("--batches 1", 0),
    "halfbyte parity RUN/config.json --baseline bf16 --candidates nvfp4 --seeds 3": (STUDY, 3),
    "halfbyte league --model demo --recipes nvfp4,mxfp4,fp8": (f"{STUDY} --seeds 1 --model RUN/config.json", 0),
    "halfbyte export RUN --format hf --out DIR": ("", 0),
    "halfbyte import HF_DIR --out RUN": ("", 0),
}
# Targets that `make -n` reads: make itself is the parser.
MAKE = ("make setup", "make setup GPU=1", "make setup GPU=cuda13", "make setup GPU=tpu", "make train", "make test",
        "make test-all", "make wheels")  # fmt: skip
NEEDS_INDEX = "needs a package index and a new environment; tests/test_docs.py checks the extras, the lock and the pins"
PARSED_ONLY = {
    "halfbyte": "a word",
    "halfbyte plan llama3.1-405b --device gb300 --count 128": "compiles for minutes; tests/plan runs `plan` on `demo`",
    "python3 -m halfbyte.integrations.maxtext src/maxtext/configs/base.yml quantization=te_nvfp4": (
        "needs MaxText: tests/integrations"
    ),
    "pip install .": NEEDS_INDEX,
    "pip install -c constraints.txt -e .": NEEDS_INDEX,
    "pip install -c constraints.txt -e '.[cuda12]'": NEEDS_INDEX,
    "pip install -c constraints.txt -e '.[cuda13]'": NEEDS_INDEX,
    "pip install -c constraints.txt -e '.[tpu]'": NEEDS_INDEX,
    "pip list": "pip's own, and its output is only read",
    "python tests/smoke.py --python PYTHON": "three minutes in an installed environment; CI runs it (newest-jax)",
    "nvidia-smi": "needs an NVIDIA driver",
    "docker run --gpus all": "a part of a command; needs docker and a GPU",
}


def printed_commands(page):
    """Commands of a page: lines of its shell blocks without comments and redirections, and what is in backticks."""
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", text, re.S | re.M)
    lines = [line for language, block in blocks if language in ("", "sh", "bash") for line in block.splitlines()]
    prose = re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)
    quoted = re.findall(rf"`((?:{TOOLS})(?: [^`\n]+)?)`", prose)
    stripped = (re.split(r"\s+#\s|\s+>\s", line)[0].strip() for line in [*lines, *quoted])
    return {re.sub(r"^source <\((.*)\)$", r"\1", line) for line in stripped if line}


def test_commands_of_first_pages_run_or_have_a_reason():
    listed = {*AS_PRINTED, *MADE_SMALL, *MAKE, *PARSED_ONLY}
    printed = printed_commands(ROOT / "README.md") | printed_commands(ROOT / "docs" / "install.md")
    assert sorted(printed - listed) == [], "neither run nor excused"
    assert sorted(listed - printed) == [], "no longer on a page"
    assert all(reason for reason in PARSED_ONLY.values())


def test_commands_without_a_run_print_and_exit_0(capfd):
    for line in (*FIRST, *AS_PRINTED):
        assert cli.main(shlex.split(line)[1:]) == 0, line
        assert len(capfd.readouterr().out) > 10, line


def test_make_targets_of_pages_exist():
    for line in MAKE:
        done = subprocess.run([*shlex.split(line), "-n"], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, (line, done.stderr)


def test_pip_commands_name_existing_files():
    for line in (line for line in PARSED_ONLY if line.startswith("pip install")):
        words = shlex.split(line)[2:]
        assert words[-1].split("[")[0] == "." and (ROOT / "pyproject.toml").exists()
        assert all((ROOT / words[at + 1]).exists() for at, word in enumerate(words) if word == "-c")


@pytest.mark.slow
def test_commands_of_first_pages_run_at_small_sizes(tmp_path, monkeypatch, capfd, quick_compiles, one_device):
    """One after the other in one folder, as a reader would; each with its exit code."""
    monkeypatch.chdir(tmp_path)
    pages = [str(page) for page in sorted((ROOT / "docs").glob("*.md"))]
    for line, (small, code) in MADE_SMALL.items():
        folders = {"RUN": "run", "DIR": line.split()[1], "HF_DIR": "export"}
        if "import" in line:
            folders["RUN"] = "imported"
        words = shlex.split(f"{line} {small}")[1:]
        words = [re.sub(r"^(RUN|DIR|HF_DIR)(?=/|$)", lambda found, to=folders: to[found[1]], word) for word in words]
        words = [part for word in words for part in (pages if word == "FILES" else [word])]
        assert cli.main(words) == code, f"{line}: {capfd.readouterr().err[-2000:]}"
    capfd.readouterr()
    assert list(tmp_path.glob("run/inspect.html")) and list(tmp_path.glob("imported/config.json"))
