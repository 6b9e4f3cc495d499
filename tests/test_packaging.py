"""What a package index would show: one version number, links that work there, and addresses only where they are known.

Oracles: pyproject.toml, setup.py with the build left out, and CHANGELOG.md.
"""

import re
import runpy
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import setuptools
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import halfbyte as hb

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.fixture
def shown(monkeypatch):
    """shown(address) -> what setup.py hands to setuptools."""

    def run(address):
        given = {}
        monkeypatch.setattr(setuptools, "setup", lambda **fields: given.update(fields))
        monkeypatch.setenv("HALFBYTE_URL", address)
        runpy.run_path(str(ROOT / "setup.py"))
        return given

    return run


def links(text):
    return re.findall(r"\]\(([^)\s]+)\)", text)


@pytest.mark.parametrize("address", ["https://example.org/a/halfbyte", "git@example.org:a/halfbyte.git"])
def test_links_and_addresses_are_absolute(shown, address):
    given = shown(address)
    home = "https://example.org/a/halfbyte"
    assert given["project_urls"]["Source"] == home
    found = links(given["long_description"])
    assert len(found) > 20 and all(link.startswith(("https://", "#")) for link in found)
    assert f"{home}/blob/main/docs/results.md" in found and f"{home}/raw/main/docs/overview.svg" in found


def test_without_an_address_nothing_points_nowhere(shown):
    given = shown("/somewhere/on/a/disk")
    assert given["project_urls"] == {}
    assert all(link.startswith(("https://", "#")) for link in links(given["long_description"]))
    assert "results.md" in given["long_description"]


def test_badges_and_hosted_notebook_appear_with_a_github_address(shown):
    """None in the README itself, none for other addresses; workflow and notebook are files of the repository."""
    text = shown("git@github.com:a/halfbyte.git")["long_description"]
    assert "https://github.com/a/halfbyte/actions/workflows/ci.yml/badge.svg" in text
    notebook = re.search(r"https://colab\S+/github/a/halfbyte/blob/main/([^)\s]+)\)", text)[1]
    assert (ROOT / notebook).exists() and (ROOT / ".github" / "workflows" / "ci.yml").exists()
    for other in ("https://example.org/a/halfbyte", "/somewhere/on/a/disk"):
        plain = shown(other)["long_description"]
        assert not re.search("badge|colab", plain), plain[:300]
    assert "colab" not in (ROOT / "README.md").read_text(encoding="utf-8")


def test_there_is_one_version_number():
    project = PROJECT["project"]
    assert "version" not in project and "version" in project["dynamic"]
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "halfbyte.__version__"}
    first = re.search(r"^## (\S+) \((\d{4}-\d{2}-\d{2})\)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)
    assert first is not None and first[1] == hb.__version__
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert (citation["version"], str(citation["date-released"])) == first.groups()
    assert citation["license"] == project["license"] and citation["authors"] and citation["title"]


def test_every_dependency_has_a_lower_bound():
    assert [name for name in PROJECT["project"]["dependencies"] if ">=" not in name] == []


def test_install_page_says_what_each_core_dependency_is_for():
    """One row per dependency in pyproject.toml, and none for a package that is no dependency."""
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8").partition("## What comes with it")[2]
    rows = re.findall(r"^\| `([\w-]+)` \| \S.+ \|$", page.partition("\n## ")[0], re.M)
    assert sorted(rows) == sorted(Requirement(name).name for name in PROJECT["project"]["dependencies"])


def test_every_pin_runs_on_the_oldest_python_that_is_promised():
    """What the installed packages say of themselves; a pin for later Pythons alone has a marker."""
    oldest = PROJECT["project"]["requires-python"].removeprefix(">=") + ".0"
    refused = {}
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        pin = Requirement(line.partition("#")[0] or "comment")
        installed = next(metadata.distributions(name=pin.name), None)
        if installed is None or installed.version not in pin.specifier:
            continue
        wanted = installed.metadata.get("Requires-Python", "")
        counts = pin.marker is None or pin.marker.evaluate({"python_version": "3.11"})
        if counts and oldest not in SpecifierSet(wanted):
            refused[str(pin)] = wanted
    assert refused == {}
