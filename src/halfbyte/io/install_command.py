"""Returns the pip command that installs an extra of this package from the source of the installed package."""

import json
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlsplit

CHECKOUT = Path(__file__).resolve().parents[3]


def install_command(extra: str) -> str:
    """Returns `pip install ...` for an extra.

    A checkout is named by its path, a wheel or repository by its URL: the package need not be on an index.
    """
    if (CHECKOUT / "pyproject.toml").is_file() and (CHECKOUT / "src" / "halfbyte").is_dir():
        return f"pip install -e '{CHECKOUT}[{extra}]'"
    try:
        origin = json.loads(metadata.distribution("halfbyte").read_text("direct_url.json") or "{}")
    except (metadata.PackageNotFoundError, ValueError):
        origin = {}
    if vcs := origin.get("vcs_info"):
        return f"pip install 'halfbyte[{extra}] @ {vcs['vcs']}+{origin['url']}@{vcs['commit_id']}'"
    if url := origin.get("url"):
        path = unquote(urlsplit(url).path)
        editable = origin.get("dir_info", {}).get("editable")
        return f"pip install -e '{path}[{extra}]'" if editable else f"pip install 'halfbyte[{extra}] @ {url}'"
    return f"pip install 'halfbyte[{extra}]'"
