"""No file is read by something that runs what it reads. Oracle: the source itself; the checker is also run on a small
tree that breaks its rule."""

import ast
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "src" / "halfbyte"
MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
CALLS = {"eval", "exec", "torch.load", "yaml.load", "yaml.unsafe_load", "pandas.read_pickle", "np.fromfile"}


def breaches(source):
    """`file:line: what` for every import or call that can execute what a file holds."""
    found = []
    for file in sorted(source.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            for name in dangers(node):
                found.append(f"{file.relative_to(source)}:{node.lineno}: {name}")
    return found


def dangers(node):
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names if alias.name.split(".")[0] in MODULES]
    if isinstance(node, ast.ImportFrom):
        return [node.module] if (node.module or "").split(".")[0] in MODULES else []
    if isinstance(node, ast.Call):
        name = ast.unparse(node.func)
        pickles = any(k.arg == "allow_pickle" and getattr(k.value, "value", True) for k in node.keywords)
        return [name] if name in CALLS or pickles else []
    return []


def test_nothing_that_reads_a_file_runs_it():
    assert breaches(SOURCE) == []


BAD = ["import pickle", "from cloudpickle import loads", "eval('1')", "np.load(x, allow_pickle=True)", "torch.load(f)"]


def test_checker_finds_each_way_to_run_a_file(tmp_path):
    for text in BAD:
        (tmp_path / "a.py").write_text(text)
        assert len(breaches(tmp_path)) == 1, text
