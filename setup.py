"""What a package index shows beside pyproject.toml: the README with links that work there, and where the code lives.

The address of the repository is HALFBYTE_URL, or the clone's own `origin` if that is a web address. Where neither is
known the links become plain text, and no address is claimed. A repository on GitHub also gets a badge of its tests and
a link that opens the notebook in Colab.
"""

import os
import re
import subprocess
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
BADGES = re.compile(r"<!-- badges:.*?-->\n", re.S)
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)\s]+)\)")


def home() -> str:
    """The web address of the repository, or ""."""
    found = os.environ.get("HALFBYTE_URL", "")
    if not found:
        command = ["git", "-C", str(ROOT), "remote", "get-url", "origin"]
        try:
            found = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
        except OSError:  # no git
            return ""
    found = re.sub(r"^(?:ssh://)?git@([^:/]+)[:/]", r"https://\1/", found)
    return found.removesuffix(".git").rstrip("/") if found.startswith("https://") else ""


def page(address: str) -> str:
    """README.md with absolute links; pictures as files, not as the pages around them."""

    def absolute(link: "re.Match[str]") -> str:
        picture, text, path = link.groups()
        kind = "raw" if picture else "blob"
        return f"{picture}[{text}]({address}/{kind}/main/{path})" if address else "" if picture else text

    text = BADGES.sub(badges(address), (ROOT / "README.md").read_text(encoding="utf-8"))
    return LINK.sub(absolute, text)


def badges(address: str) -> str:
    """The state of the tests and the hosted notebook of a repository on GitHub, as a line of Markdown, or ""."""
    if not address.startswith("https://github.com/"):
        return ""
    tests, name = f"{address}/actions/workflows/ci.yml", address.removeprefix("https://github.com/")
    notebook = f"https://colab.research.google.com/github/{name}/blob/main/docs/nvfp4-in-ten-minutes.ipynb"
    return f"[![tests]({tests}/badge.svg)]({tests}) [Open the notebook in Colab]({notebook})\n\n"


def addresses(address: str) -> dict[str, str]:
    places = {"Source": "", "Documentation": "/tree/main/docs", "Issues": "/issues"}
    places["Changelog"] = "/blob/main/CHANGELOG.md"
    return {name: address + place for name, place in places.items()} if address else {}


setup(long_description=page(home()), long_description_content_type="text/markdown", project_urls=addresses(home()))
