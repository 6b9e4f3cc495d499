"""What the documents say is there, is there: linked files, extras, and the flags of the deployment files. (Commands:
docs/test_commands.py.)
"""

import ast
import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest

from halfbyte.cli.flag_parsing import REMOVED
from halfbyte.cli.train import parse

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
EVIDENCE = sorted((ROOT / "docs" / "evidence").rglob("*.md"))
# What the product had in earlier versions and no page mentions any more; the changelog and the log tell history.
# The flags that were removed are in halfbyte.cli.flag_parsing.REMOVED.
REMOVED_NAMES = (
    "branch test",
    "screening round",
    "OUT.parts",
    "OsciReset",
    "reset_at",
    "averis",
    "hidden_time",
    "hidden_share",
)
HISTORY = ("CHANGELOG.md", "LOG.md")


def without_comments(text):
    return "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))


def training_flags(text):
    """Arguments of the `halfbyte train` in a deployment file, shell variables replaced by something harmless."""
    command = re.search(r"halfbyte train (.+?)(?:\n\S|\n +ports:|\Z)", without_comments(text), re.S)[1]
    command = re.sub(r'"\$(\w+):', '"127.0.0.1:', command)
    command = command.replace('"$JOB_COMPLETION_INDEX"', "0").replace('"$@"', "").replace("\\\n", " ")
    return shlex.split(re.sub(r'"\$\w+"', "/somewhere", command))


def test_linked_files_exist():
    linked = [(page, link) for page in DOCUMENTS for link in re.findall(r"\]\(([^)#\s]+)", page.read_text("utf-8"))]
    missing = [(page.name, link) for page, link in linked if "://" not in link and not (page.parent / link).exists()]
    assert len(linked) > 100 and missing == []


def test_lines_of_prose_have_at_most_120_columns():
    long = []
    for page in (*DOCUMENTS, *EVIDENCE):
        prose = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
        long += [(page.name, x) for x in prose.splitlines() if len(x) > 120 and not x.lstrip().startswith("|")]
    assert long == []


PAGES = [document for document in DOCUMENTS if document.name not in HISTORY]
COMMANDS = sorted((ROOT / "src" / "halfbyte" / "cli").glob("*.py"))  # their docstrings are what --help prints


def test_pages_and_help_name_nothing_removed():
    named = []
    for file in (*PAGES, *COMMANDS):
        text = file.read_text(encoding="utf-8")
        text = " ".join((text if file.suffix == ".md" else ast.get_docstring(ast.parse(text)) or "").split())
        named += [(file.name, flag) for flag in REMOVED if re.search(rf"(?<![\w-]){flag}(?![\w-])", text)]
        named += [(file.name, name) for name in REMOVED_NAMES if name.lower() in text.lower()]
    assert named == []


def test_readme_lists_six_files_to_read():
    section = (ROOT / "README.md").read_text(encoding="utf-8").split("## Six files to read first")[1].split("##")[0]
    assert len(re.findall(r"^\d\. \[", section, re.M)) == 6


def test_deployment_files_use_existing_flags():
    for name in ("train.sbatch", "jobset.yaml"):
        run = parse(training_flags((ROOT / "deploy" / name).read_text(encoding="utf-8"))).run
        assert (run.name, run.mesh, run.watchdog_s) == ("llama3-8b", "dcn.fsdp=4,fsdp=8", 900), name


def test_jobset_counts_agree():
    yaml = pytest.importorskip("yaml", reason="needs PyYAML to read deploy/jobset.yaml")
    spec = yaml.safe_load((ROOT / "deploy" / "jobset.yaml").read_text(encoding="utf-8"))
    job = spec["spec"]["replicatedJobs"][0]
    pods = job["template"]["spec"]
    (command,) = pods["template"]["spec"]["containers"][0]["args"]
    gpus = pods["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
    assert f"--distributed.processes {pods['completions']}" in command
    assert pods["completions"] == pods["parallelism"]
    assert f"--mesh dcn.fsdp={pods['completions']},fsdp={gpus}" in command
    assert f"{spec['metadata']['name']}-{job['name']}-0-0.{spec['metadata']['name']}:" in command


def test_shell_scripts_parse():
    for script in ("deploy/train.sbatch", ".ci/run"):
        subprocess.run(["bash", "-n", script], cwd=ROOT, check=True)


def test_maxtext_table_names_existing_flags(capsys):
    with pytest.raises(SystemExit):
        parse(["--help-all"])
    known = capsys.readouterr().out
    text = (ROOT / "docs" / "from-maxtext.md").read_text(encoding="utf-8").split("## Flags")[1].split("## What")[0]
    named = set(re.findall(r"(--[a-z][a-z0-9.-]+)", text)) - {"--tokenizer", "--out"}
    assert [flag for flag in sorted(named) if flag not in known] == []


def test_install_page_names_existing_extras():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    text = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    named = set(re.findall(r"\.\[([a-z0-9]+)\]", text))
    assert {"cuda12", "cuda13", "tpu"} == named <= set(extras)


EXTRAS = [("GPU=0", "'.'"), ("GPU=1", "'.[cuda12]'"), ("GPU=cuda13", "'.[cuda13]'"), ("GPU=tpu", "'.[tpu]'")]


def test_make_setup_installs_the_extra_of_gpu():
    for choice, extra in EXTRAS:
        done = subprocess.run(["make", "-nB", "setup", choice, "LOCKED=1"], cwd=ROOT, capture_output=True, text=True)
        assert f"--editable {extra}\n" in done.stdout, choice
        assert "--require-hashes --requirement requirements.lock" in done.stdout, choice


def test_locked_packages_have_hash_and_pinned_version():
    lock = (ROOT / "requirements.lock").read_text(encoding="utf-8").replace("\\\n", " ")
    pins = dict(re.findall(r"^([\w.-]+)==([^\s;]+)", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.M))
    pins = {name.lower().replace("_", "-"): version for name, version in pins.items()}
    lines = [line for line in lock.splitlines() if line.strip() and not line.startswith("#")]
    assert len(lines) > 50
    for line in lines:
        name, version = re.match(r"([\w.-]+)==(\S+)", line).groups()
        assert line.count("--hash=sha256:") > 0, name
        assert name in ("jax", "jaxlib") or pins.get(name, version) == version, name


def test_config_of_train_page_is_parsed(tmp_path):
    text = (ROOT / "docs" / "train.md").read_text(encoding="utf-8")
    (tmp_path / "small.toml").write_text(re.search(r"```toml\n(.*?)```", text, re.S)[1])
    made = parse(["--config", str(tmp_path / "small.toml"), "--steps", "500"]).run
    assert (made.name, made.data, made.steps, made.optimizer.learning_rate) == ("llama-60m", "data/corpus", 500, 1e-3)


def test_call_path_of_architecture_page_is_that_of_source():
    """Ten functions in five files, each called by one of the rows above it. `fprop` calls the `gemm` of its backend."""
    from halfbyte.ops.backends import fused

    assert fused.BACKEND.gemm is fused.fused_gemm
    called_as = {"fused_gemm": "multiply"}
    page = (ROOT / "docs/architecture.md").read_text()
    steps = re.findall(r"^\| `(\w+)` \| \[\S+\]\(\.\./(src/\S+\.py)\) \|", page, re.MULTILINE)
    assert len(steps) == 10 and len({file for _, file in steps}) == 5
    above: list[str] = []
    for name, file in steps:
        source = (ROOT / file).read_text()
        (function,) = (f for f in ast.walk(ast.parse(source)) if isinstance(f, ast.FunctionDef) and f.name == name)
        called = re.compile(rf"\b{called_as.get(name, name)}\(")
        assert not above or any(called.search(text) for text in above), f"nothing above calls {name}"
        above.append(ast.get_source_segment(source, function) or "")
    launches = [name for text in above for name in re.findall(r"kernels\.(\w+)\(", text)]
    assert {"quantize_weight_kernel", "matmul"} <= set(launches)
