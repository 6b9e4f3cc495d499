"""What the site needs beyond the plain files: links to the repository, and the notebook as a page.

In a file, a link to ../src/... is right; on the site there is no such page. It becomes a link to the repository where
its address is known (HALFBYTE_URL), and the path as text where it is not.
"""

import json
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
FENCE = re.compile(r"(```.*?```|`[^`\n]*`)", re.S)


def on_files(files: Files, config: Any) -> Files:
    """Each notebook as a Markdown page of its name."""
    for file in list(files):
        if file.src_uri.endswith(".ipynb"):
            files.remove(file)
            page = file.src_uri.removesuffix(".ipynb") + ".md"
            files.append(File.generated(config, page, content=notebook_page(Path(file.abs_src_path))))
    return files


def on_config(config: Any) -> Any:
    """The menu names notebooks by their files; the site has pages."""
    config.nav = _renamed(config.nav)
    return config


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links that leave docs/ point to the repository."""
    folder = (ROOT / "docs" / page.file.src_uri).parent

    def replace(found: re.Match[str]) -> str:
        picture, text, target = found.groups()
        path = (folder / target.partition("#")[0]).resolve()
        if "://" in target or target.startswith("#"):
            return found[0]
        if path.suffix == ".ipynb" and path.is_relative_to(ROOT / "docs"):
            return f"[{text}]({target.replace('.ipynb', '.md')})"
        inside = path.is_relative_to(ROOT / "docs") and path.suffix not in (".json",) and path.is_file()
        if inside or picture:
            return found[0]
        address = f"{config.repo_url.rstrip('/')}/blob/main/{path.relative_to(ROOT)}" if config.repo_url else ""
        return f"[{text}]({address})" if address else text

    parts = FENCE.split(markdown)
    return "".join(part if at % 2 else LINK.sub(replace, part) for at, part in enumerate(parts))


def notebook_page(path: Path) -> str:
    """The cells of a notebook in order: text as it is, code and what it printed in fences."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return "\n\n".join(_cell(cell) for cell in cells) + "\n"


def _cell(cell: dict[str, Any]) -> str:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return source
    shown = "".join("".join(output["text"]) for output in cell["outputs"])
    return f"```python\n{source}\n```" + (f"\n\n```text\n{shown.rstrip()}\n```" if shown else "")


def _renamed(nav: Any) -> Any:
    if isinstance(nav, str):
        return nav.replace(".ipynb", ".md")
    if isinstance(nav, dict):
        return {name: _renamed(part) for name, part in nav.items()}
    return [_renamed(part) for part in nav]
