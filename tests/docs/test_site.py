"""The documents as a site, the notebook, and the pages that must say what the code says. Oracles: mkdocs in strict
mode, the notebook's own stored output, docstrings, and the sources of the error messages."""

import importlib
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import halfbyte as hb

sys.path.insert(0, str(Path(__file__).parent))
import notebook

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
TEN_MINUTES = DOCS / "nvfp4-in-ten-minutes.ipynb"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the built site. In strict mode a warning is an error."""
    out = tmp_path_factory.mktemp("site")
    environment = {**os.environ, "HALFBYTE_URL": "https://example.org/halfbyte", "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return out


def test_every_page_is_built_and_loads_nothing_from_elsewhere(site):
    pages = [path.relative_to(DOCS).with_suffix(".html") for path in DOCS.glob("*.md")]
    assert len(pages) > 20
    for page in pages:
        text = (site / page).read_text(encoding="utf-8")
        loaded = re.findall(r"<(?:script|img|link|iframe)[^>]*?(?:src|href)=[\"']?(https?:[^\"' >]+)", text)
        assert loaded == [], page


def test_links_to_sources_point_to_the_repository(site):
    text = (site / "train.html").read_text(encoding="utf-8")
    assert "https://example.org/halfbyte/blob/main/src/halfbyte/train/run_presets.py" in text and "../src/" not in text


def test_signatures_and_fields_are_on_the_page_of_the_api(site):
    text = (site / "api.html").read_text(encoding="utf-8")
    for name in ("halfbyte.ops.qdot.qdot", "halfbyte.train.train_config.TrainConfig.init_from", "halfbyte.api.load"):
        assert f'id="{name}"' in text


def test_notebook_is_a_page_with_its_output(site):
    text = (site / "nvfp4-in-ten-minutes.html").read_text(encoding="utf-8")
    assert "bytes instead of 64" in text and 'href="parity.html"' in text


@pytest.mark.slow
def test_notebook_prints_what_it_stores(quick_code):
    """Numbers within 3%: sums of another processor differ in their last bits, and rounding makes steps of them."""
    for shown, wanted in zip(notebook.printed(TEN_MINUTES), notebook.stored(TEN_MINUTES), strict=True):
        number = r"-?\d+\.?\d*"
        assert re.sub(number, "N", shown) == re.sub(number, "N", wanted)
        pairs = zip(re.findall(number, shown), re.findall(number, wanted), strict=True)
        assert all(float(a) == pytest.approx(float(b), rel=0.03, abs=0.011) for a, b in pairs)


def public_objects():
    found = {name: getattr(hb, name) for name in hb._PACKAGE_OF}
    return {name: getattr(value, name) if inspect.ismodule(value) else value for name, value in found.items()}


def test_api_page_has_every_public_name_and_its_sentence():
    rows = dict(re.findall(r"^\| `hb\.(\w+)` \| (.*) \|$", (DOCS / "api.md").read_text(encoding="utf-8"), re.M))
    objects = public_objects()
    assert sorted(rows) == sorted(objects)
    for name, value in objects.items():
        if inspect.isfunction(value) or inspect.isclass(value):
            assert rows[name] == " ".join(inspect.getdoc(value).split("\n\n")[0].split()), name


def test_objects_of_api_page_exist():
    paths = re.findall(r"^::: (\S+)\.(\w+)$", (DOCS / "api.md").read_text(encoding="utf-8"), re.M)
    assert len(paths) > 20
    assert [(room, name) for room, name in paths if not hasattr(importlib.import_module(room), name)] == []


def test_messages_of_troubleshooting_page_are_in_the_source():
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    quoted = [text for row in re.findall(r"^\| (.*?) \| ", page, re.M) for text in re.findall(r"`([^`]+)`", row)]
    ours = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    ours = re.sub(r'"\s*\n\s*f?"', "", ours)  # a message that goes on in the next line
    jax_own = {
        "RESOURCE_EXHAUSTED",
        "ShardingTypeError: Use .at[...].get(out_sharding=)",
        "Unable to load CUDA. Is it installed?",
        "cudart_stub.cc:31] Could not find cuda drivers",
        "profile_guided_latency_estimator",
    }
    assert len(quoted) > 25
    missing = [
        text for text in quoted for part in text.split("...") if text not in jax_own and part.strip(" ;") not in ours
    ]
    assert missing == []


def test_menu_names_every_page():
    class Loader(yaml.SafeLoader):
        pass

    Loader.add_constructor("!ENV", lambda loader, node: "")
    menu = json.dumps(yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader)["nav"])
    pages = [str(path.relative_to(DOCS)) for kind in ("md", "ipynb") for path in DOCS.rglob(f"*.{kind}")]
    assert [page for page in pages if f'"{page}"' not in menu and not page.startswith("evidence/")] == []
