"""The cells of a notebook, run in order as a reader's Python would.

python tests/docs/notebook.py docs/nvfp4-in-ten-minutes.ipynb     writes what they print into the file
"""

import contextlib
import io
import json
import sys
from pathlib import Path

import jax


def printed(path):
    """What each code cell prints, in order."""
    names, found = {"__name__": "notebook"}, []
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for cell in code_cells(json.loads(path.read_text(encoding="utf-8"))):
            output = io.StringIO()
            with contextlib.redirect_stdout(output):
                exec(compile("".join(cell["source"]), path.name, "exec"), names)
            found.append(output.getvalue())
    return found


def code_cells(notebook):
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def stored(path):
    """What the file says that each code cell prints."""
    cells = code_cells(json.loads(path.read_text(encoding="utf-8")))
    return ["".join("".join(output["text"]) for output in cell["outputs"]) for cell in cells]


def write(path):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    for number, (cell, text) in enumerate(zip(code_cells(notebook), printed(path), strict=True), 1):
        shown = {"name": "stdout", "output_type": "stream", "text": text.splitlines(keepends=True)}
        cell["execution_count"], cell["outputs"] = number, [shown] if text else []
    path.write_text(json.dumps(notebook, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
