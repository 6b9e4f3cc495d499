"""The house rules, checked on the source itself: imports point down the layers, no cycles, no long files, no `utils`.

Oracle: the layer table below, which is the one of docs/architecture.md. Each check is also run on a small tree that
breaks its rule, so that a checker that has gone blind fails here.
"""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "halfbyte"

LAYERS = (
    ("io", "formats", "devices", "hlo"),
    ("recipes", "distributed", "kernels"),
    ("ops",),
    ("models", "data", "checkpoint"),
    ("train",),
    ("evaluation",),
    ("hf", "study"),
    ("plan",),
    ("cli", "api", "integrations"),
)
LAYER_OF = {package: level for level, packages in enumerate(LAYERS) for package in packages}
# Imports across a layer: commands start from the runs that people name, a format names a unit that devices know, and a
# device names the command that installs its compiler.
ACROSS = {("cli", "api"), ("formats", "devices"), ("devices", "io")}
LONGEST_FILE = 600
MOST_PARAMETERS = 7
MOST_ANY = 170  # in ops and kernels; the former nn and conformance are in ops
# Entry points, whose parameters are what a person may say.
WITH_MANY_PARAMETERS = [
    "data.loader", "data.prepare", "data.synthetic", "hf.export_model", "ops.mlp", "ops.qdot", "train.train",
]  # fmt: skip
VAGUE_NAMES = {"utils", "util", "helpers", "helper", "common", "misc"}
# The module that knows what differs between JAX versions, and its test.
OF_VERSIONS = ("src/halfbyte/devices/jax_versions.py", "tests/devices/test_jax_versions.py")
# Private names that every supported JAX has; without them an import is slower.
PRIVATE_NAMES = {"kernels/ptx_lanes.py"}
# Folders that only exist on somebody's machine.
MACHINE_PATH = re.compile(r"/(?:work|root|farm|home/[a-z]\w*|Users/\w+|tmp/bash_jobs)/|file:///")


def modules(source: Path) -> dict[str, Path]:
    """Dotted name -> file, for every module under `source`, the package's folder."""
    found = {}
    for file in sorted(source.rglob("*.py")):
        parts = file.relative_to(source.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def imported_modules(name: str, file: Path, known: dict[str, Path]) -> set[str]:
    """Modules of the package that `file` imports, anywhere in it, also inside functions."""
    package = name.split(".") if file.name == "__init__.py" else name.split(".")[:-1]
    top = name.split(".")[0]
    folders = {module.rpartition(".")[0] for module in known}
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            targets = {f"{origin}.{alias.name}" for alias in node.names}
            submodules = targets & (known.keys() | folders)
            found |= submodules | ({origin} if targets - submodules else set())
    return {target for target in found if target == top or target.startswith(f"{top}.")}


def package_of(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else None


def layer_violations(source: Path) -> list[str]:
    """Imports that point up, or across to another package of the same layer, and packages that no layer knows."""
    known = modules(source)
    bad = []
    for name, file in known.items():
        package = package_of(name)
        if package in (None, "__main__", "renamed"):  # the top __init__ exports names of every package
            continue
        if package not in LAYER_OF:
            bad.append(f"{name}: package {package!r} has no layer")
            continue
        for target in sorted(imported_modules(name, file, known)):
            other = package_of(target)
            if other is None and LAYER_OF[package] < len(LAYERS) - 1:
                bad.append(f"{name} imports the whole package: points up")
            if other == package or other not in LAYER_OF:
                continue
            if LAYER_OF[other] > LAYER_OF[package]:
                bad.append(f"{name} (layer {LAYER_OF[package]}) imports {target} (layer {LAYER_OF[other]}): points up")
            elif LAYER_OF[other] == LAYER_OF[package] and (package, other) not in ACROSS:
                bad.append(f"{name} imports {target}: packages of one layer do not import each other")
    return bad


def import_cycles(source: Path) -> list[list[str]]:
    """Every group of modules that import each other (Tarjan's components), counting imports inside functions."""
    known = modules(source)
    # A package's own __init__ re-exports its modules; a module that imports a sibling through it is caught as a cycle.
    edges = {name: imported_modules(name, file, known) & known.keys() - {name} for name, file in known.items()}
    edges = {name: targets - {name.split(".")[0]} for name, targets in edges.items() if "." in name}
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    cycles: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in sorted(edges.get(node, ())):
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            group = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(group) > 1:
                cycles.append(sorted(group))

    for name in edges:
        if name not in index:
            visit(name)
    return cycles


def long_files(source: Path) -> list[str]:
    sizes = {file: len(file.read_text(encoding="utf-8").splitlines()) for file in modules(source).values()}
    return [f"{file.relative_to(source)}: {size} lines" for file, size in sizes.items() if size > LONGEST_FILE]


def long_signatures(source: Path) -> list[str]:
    """Functions of more than MOST_PARAMETERS; `self` does not count, `*args` and `**kwargs` are one each."""
    found = []
    for module, file in modules(source).items():
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                given = node.args
                names = [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
                own = names[:1] in (["self"], ["cls"])
                count = len(names) - own + bool(given.vararg) + bool(given.kwarg)
                if count > MOST_PARAMETERS:
                    found.append(f"{package_of(module)}.{node.name}")
    return sorted(found)


def uses_of_any(source: Path) -> int:
    """How often `Any` stands in annotations and aliases of a tree."""
    trees = (ast.parse(file.read_text(encoding="utf-8")) for file in sorted(source.rglob("*.py")))
    return sum(isinstance(node, ast.Name) and node.id == "Any" for tree in trees for node in ast.walk(tree))


def roots_of(node: ast.expr) -> set[str]:
    """The first name of a dotted name such as `jax.core.Jaxpr`; empty for other expressions."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return {node.id} if isinstance(node, ast.Name) else set()


def jax_names(tree: ast.Module) -> set[str]:
    """Names that a module imports from JAX, as it calls them."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {(each.asname or each.name).split(".")[0] for each in node.names if is_jax(each.name)}
        elif isinstance(node, ast.ImportFrom) and is_jax(node.module or ""):
            names |= {each.asname or each.name for each in node.names}
    return names


def is_jax(module: str) -> bool:
    return module.split(".")[0] in ("jax", "jaxlib")


def version_comparisons(text: str) -> list[int]:
    """Lines that compare the version of JAX, or ask `jax_series` for it."""
    found = []
    for node in ast.walk(ast.parse(text)):
        parts = list(ast.walk(node)) if isinstance(node, ast.Compare | ast.Match) else []
        versions = [p for p in parts if isinstance(p, ast.Attribute) and p.attr in ("__version__", "__version_info__")]
        if any(roots_of(version) & {"jax", "jaxlib"} for version in versions) or (
            isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "jax_series"
        ):
            found.append(node.lineno)
    return found


def jax_probes(text: str) -> list[int]:
    """Lines that try whether JAX has a name: hasattr, getattr with a default, an import whose error is caught."""
    tree, found = ast.parse(text), []
    names = jax_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            asks = (node.func.id, len(node.args)) in (("hasattr", 2), ("getattr", 3))
            if asks and roots_of(node.args[0]) & names:
                found.append(node.lineno)
        elif isinstance(node, ast.Try):
            caught = {part.id for each in node.handlers for part in ast.walk(each.type or each)
                      if isinstance(part, ast.Name)}  # fmt: skip
            imported = jax_names(ast.Module(node.body, []))
            if imported and caught & {"ImportError", "ModuleNotFoundError", "AttributeError"}:
                found.append(node.lineno)
    return found


def vague_names(source: Path) -> list[str]:
    return [name for name in modules(source) if VAGUE_NAMES & set(name.split("."))]


def machine_paths(files: list[Path]) -> list[str]:
    """Lines of text files that name a folder of one particular machine."""
    bad = []
    for file in files:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:  # not text
            continue
        bad += [f"{file}:{at}: {line.strip()[:120]}" for at, line in enumerate(lines, 1) if MACHINE_PATH.search(line)]
    return bad


def repository_files() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout: no list of the repository's files")
    files = [ROOT / name for name in listed.stdout.decode().split("\0") if name]
    return [file for file in files if file.is_file() and file != Path(__file__).resolve()]


def test_imports_point_down_the_layers():
    assert layer_violations(SOURCE) == []


def test_layers_name_existing_packages():
    exists = {name for name in LAYER_OF if (SOURCE / name).is_dir() or (SOURCE / f"{name}.py").is_file()}
    assert set(LAYER_OF) == exists


def test_no_import_cycles():
    assert import_cycles(SOURCE) == []


def test_no_long_files():
    assert long_files(SOURCE) == []


@pytest.mark.slow
def test_only_entry_points_take_many_parameters():
    assert long_signatures(SOURCE) == WITH_MANY_PARAMETERS


def test_ops_and_kernels_use_little_any():
    assert uses_of_any(SOURCE / "ops") + uses_of_any(SOURCE / "kernels") < MOST_ANY


def test_no_vague_module_names():
    assert vague_names(SOURCE) == []


def test_one_module_compares_jax_versions():
    files = [file for folder in ("src", "tests", "benchmarks") for file in sorted((ROOT / folder).rglob("*.py"))]
    texts = {file.relative_to(ROOT).as_posix(): file.read_text(encoding="utf-8") for file in files}
    assert [name for name, text in texts.items() if version_comparisons(text) and name not in OF_VERSIONS] == []
    probing = {str(file.relative_to(SOURCE)) for file in modules(SOURCE).values() if jax_probes(file.read_text())}
    assert probing == PRIVATE_NAMES


def test_no_machine_paths():
    assert machine_paths(repository_files()) == []


def test_layers_of_architecture_page_are_the_checked_ones():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    for level, packages in enumerate(LAYERS):
        row = next((line for line in text.splitlines() if line.startswith(f"{level}  ")), None)
        assert row is not None, f"docs/architecture.md has no row for layer {level}"
        assert set(packages) <= set(re.findall(r"\w+", row)), f"layer {level}: {packages} against {row!r}"


def test_architecture_page_and_drawing_have_every_package():
    page, drawing = ((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("architecture.md", "packages.svg"))
    assert [package for package in LAYER_OF if not re.search(rf"^\| `{package}` \| `\w+\.py`", page, re.M)] == []
    assert [package for package in LAYER_OF if f">{package}</text>" not in drawing] == []


# The checkers themselves, on trees that break each rule.


def write_tree(folder: Path, files: dict[str, str]) -> Path:
    source = folder / "halfbyte"
    for name, text in {"__init__.py": "", **files}.items():
        file = source / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        (file.parent / "__init__.py").touch()
    return source


def args(count: int) -> str:
    return ", ".join("abcdefgh"[:count])


# What a checker finds in a small tree.
LOOP, UP = {"train/loop.py": "run = 1"}, "halfbyte.ops.dot (layer 2) imports halfbyte.{} (layer 4): points up"
SIGNATURES = f"def few({args(7)}): ...\ndef many({args(7)}, **more): ...\nclass A:\n    def of(self, {args(8)}): ...\n"
BROKEN = [
    (layer_violations, LOOP | {"ops/dot.py": "from halfbyte.train import loop"}, [UP.format("train.loop")]),
    (layer_violations, LOOP | {"ops/dot.py": "import halfbyte.train.loop"}, [UP.format("train.loop")]),
    (layer_violations, LOOP | {"ops/dot.py": "from halfbyte import train"}, [UP.format("train")]),
    (layer_violations, LOOP | {"ops/dot.py": "from ..train import loop"}, [UP.format("train.loop")]),
    (layer_violations, LOOP | {"ops/dot.py": "def later():\n    from halfbyte.train.loop import run\n"},
     [UP.format("train.loop")]),
    (layer_violations, {"ops/dot.py": "import halfbyte"}, ["halfbyte.ops.dot imports the whole package: points up"]),
    (layer_violations, {"models/llama.py": "from halfbyte.checkpoint import save", "checkpoint/save.py": ""},
     ["halfbyte.models.llama imports halfbyte.checkpoint.save: packages of one layer do not import each other"]),
    (layer_violations, {"attic/x.py": ""},
     [f"halfbyte.attic{name}: package 'attic' has no layer" for name in ("", ".x")]),
    (layer_violations, {"train/loop.py": "from halfbyte.ops import dot", "ops/dot.py": "import os"}, []),
    (import_cycles, {"train/loop.py": "from halfbyte.ops import dot", "ops/dot.py": "import os"}, []),
    (import_cycles, {"ops/a.py": "from halfbyte.ops import b", "ops/b.py": "from .c import x",
                     "ops/c.py": "def f():\n    import halfbyte.ops.a\n"},
     [["halfbyte.ops.a", "halfbyte.ops.b", "halfbyte.ops.c"]]),
    (import_cycles, {"ops/a.py": "from halfbyte.ops import name", "ops/__init__.py": "from halfbyte.ops.a import name"},
     [["halfbyte.ops", "halfbyte.ops.a"]]),
    (long_files, {"ops/long.py": "x = 1\n" * (LONGEST_FILE + 1)}, ["ops/long.py: 601 lines"]),
    (vague_names, {"ops/utils.py": "", "data/misc/x.py": ""},
     ["halfbyte.data.misc", "halfbyte.data.misc.x", "halfbyte.ops.utils"]),
    (long_signatures, {"ops/a.py": f"{SIGNATURES}    def well(self, {args(7)}): ...\n"}, ["ops.many", "ops.of"]),
    (uses_of_any, {"ops/a.py": "from typing import Any\nx: Any = 1\ndef f(a: list[Any]) -> Any: ...\n"}, 3),
]  # fmt: skip
VERSIONS = (
    "import jax\nNEW = jax.__version_info__ >= (0, 11)",
    "import jaxlib\ndef f():\n    return jaxlib.version.__version__ == '0.10.2'",
    "from halfbyte.devices.jax_versions import jax_series\nOLD = jax_series() < (0, 11)",
)
PROBES = {
    "import jax\nx = hasattr(jax.core, 'is_constant_dim')": 1,
    "from jax.experimental import pallas as pl\nx = getattr(pl, 'core_map', None)": 1,
    "try:\n    from jax import shard_map\nexcept ImportError:\n    shard_map = None": 1,
    "import jax\nx = hasattr(leaf, 'shape'), getattr(jax.config, 'jax_enable_pgle')": 0,
    "try:\n    import ray\nexcept ImportError:\n    ray = None": 0,
}


def test_checkers_find_what_breaks_their_rule(tmp_path):
    for number, (checker, files, found) in enumerate(BROKEN):
        assert checker(write_tree(tmp_path / str(number), files)) == found, files
    assert [len(version_comparisons(text)) for text in VERSIONS] == [1, 1, 1]
    assert {text: len(jax_probes(text)) for text in PROBES} == PROBES
    (tmp_path / "a.md").write_text("see /ro" + "ot/notes.txt\nfine: /dev/null")
    (tmp_path / "b.npz").write_bytes(b"\xff\xfe\x00/ro" + b"ot/x")
    assert len(machine_paths([tmp_path / "a.md", tmp_path / "b.npz"])) == 1
