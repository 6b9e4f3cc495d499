"""Patterns over source lines and kernel names in compiled programs. Oracle: the files and functions of the package."""

import ast
import itertools
import re
from pathlib import Path

import pytest

import halfbyte
from halfbyte.hlo.memory_traffic import ATTENTION_SOURCE, NORM, ORIGINS, ROUNDING_FUNCTIONS, category_of_name
from halfbyte.plan.simulator import LINEAR_OF_SOURCE, PURPOSES
from halfbyte.plan.step_placement import MOE_LOOP_FILES, MOE_SOURCE_FILE

SOURCE = Path(halfbyte.__file__).parent
PATTERNS = {
    **{f"ORIGINS {name}": pattern.pattern for name, pattern in ORIGINS},
    **{f"PURPOSES {name}": pattern.pattern for name, pattern in PURPOSES},
    **{f"LINEAR_OF_SOURCE {pattern}": pattern for pattern, _ in LINEAR_OF_SOURCE},
    **{f"MOE_LOOP_FILES {name}": name for name in (*MOE_LOOP_FILES, MOE_SOURCE_FILE)},
}
WORD = r"(?:\(\?:[a-z_|]+\)|[a-z_]+)"


def paths_of(pattern):
    """Returns the paths that a pattern names, groups of alternatives expanded: `ops/(?:mlp|linear)` names two."""
    found = []
    for folder, file in re.findall(rf"({WORD})/({WORD}(?:\\\.py)?)?", pattern.replace(r"\b", " ")):
        sides = ([part for part in re.split(r"\(\?:|\||\)", side.replace(r"\.py", "")) if part] or [""]
                 for side in (folder, file))  # fmt: skip
        suffix = ".py" if file.endswith(r"\.py") or ")\\.py" in pattern else ""
        found += [f"{a}/{b}{suffix if b else ''}" for a, b in itertools.product(*sides)]
    return found


def missing(pattern):
    return [path for path in paths_of(pattern) if not any(_named(path))]


def _named(path):
    here = SOURCE / path
    return here.is_dir(), here.is_file(), here.with_name(f"{here.name}.py").is_file()


def functions_of(file):
    tree = ast.parse((SOURCE / file).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("name", PATTERNS)
def test_pattern_names_only_paths_that_exist(name):
    assert missing(PATTERNS[name]) == []


def test_paths_are_expanded_and_a_missing_one_is_found():
    assert paths_of(r"\b(?:formats|kernels)/|ops/(?:mlp|linear)\b") == ["formats/", "kernels/", "ops/mlp", "ops/linear"]
    assert paths_of(r"ops/operand\.py:\d+:(?!f)") == ["ops/operand.py"]
    assert paths_of(r"train/(?:optimizers|step)\.py") == ["train/optimizers.py", "train/step.py"]
    assert missing(r"\b(?:formats|room)/|ops/(?:mlp|passes)\b") == ["room/", "ops/passes"]
    assert sum(map(len, map(paths_of, PATTERNS.values()))) > 25


def test_functions_in_patterns_exist():
    assert set(ROUNDING_FUNCTIONS.split("|")) <= functions_of("ops/operand.py")
    assert ATTENTION_SOURCE.pattern == r"attention(?!_block\b)" and "attention_block" in functions_of("models/llama.py")


def test_every_file_of_the_optimizer_is_in_its_category():
    """Origins as XLA writes them: an op name and a line of each file that updates weights."""
    pattern = dict(ORIGINS)["optimizer"]
    for file in ("optimizers", "train_step", "dynamic_scaling"):
        assert (SOURCE / "train" / f"{file}.py").is_file() and pattern.search(f"jit(step)/mul train/{file}.py:1:update")
    assert not pattern.search("jit(step)/mul models/llama.py:1:decoder")


def kernel_names():
    """Names of launches in `kernels`, as they are in compiled programs and traces."""
    texts = [path.read_text() for path in sorted((SOURCE / "kernels").glob("*.py"))]
    return {name for text in texts for name in re.findall(r'\b(?:kernel_)?name="([a-z0-9_]+)"', text)}


def test_kernels_are_categorized_by_their_names():
    names = kernel_names()
    norms = {name for name in names if NORM.search(f"/{name}/")}
    assert norms == {"rms_norm", "rms_norm_backward"}
    rest = {name: category_of_name(name) for name in names - norms}
    assert rest.pop("gemm") == "gemm" and rest.pop("pack_weight") == "other"
    assert len(rest) > 5 and set(rest.values()) == {"quantize"}
