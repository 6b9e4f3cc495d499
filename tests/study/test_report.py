"""The page: complete, escaped, alone in the world, and drawn by a real browser without an error."""

import json
import re
import shutil
import subprocess

import pytest
from fakes import GAPS, fake_parity

from halfbyte.cli.study_flags import print_study_table
from halfbyte.study.analysis import analyse_study
from halfbyte.study.study_report import write_report

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parity")
    plan = fake_parity(folder, skip={("mxfp4", 2)})
    data = analyse_study(plan, folder)
    return data, write_report(plan, folder, data)


@pytest.mark.slow
def test_the_page_has_all_parts_in_order(report):
    text = report[1]["html"].read_text()
    parts = ["INCOMPLETE: 14 of 15 runs", "VERDICT: PASS nvfp4", "Scope: tiny", "Gap over seeds", "Ranking"]
    parts += ["Curves", "Controls", "By source of text", "Tokens", "Gradient truth", "Cost", "Precision"]
    parts += ["How it was judged", "Provenance"]
    places = [text.index(part) for part in parts]
    assert places == sorted(places)
    assert text.count("VERDICT:") == 1
    assert "emulated" in text and "jax 0." in text and "halfbyte parity &lt;tiny&gt; &amp; co" in text


def test_nothing_is_loaded_and_everything_is_escaped(report):
    text = report[1]["html"].read_text()
    assert not re.findall(r"(?:src|href|url)\s*[=(]\s*[\"']?(?!data:,)[a-z/]", text)
    assert "<script" not in text and "http" not in text.replace("http-equiv", "")
    assert "<b>news" not in text and "&lt;b&gt;news" in text and "&lt;0.88&gt;" in text


def test_json_and_markdown_beside_it(report):
    data = json.loads(report[1]["json"].read_text())
    assert data["verdict"] == report[0]["verdict"] and data["facts"]["versions"].startswith("halfbyte")
    lines = report[1]["md"].read_text().splitlines()
    assert lines[2].startswith("**INCOMPLETE") and sum("VERDICT:" in line for line in lines) == 1
    assert any(line.startswith("| nvfp4 | PASS | +0.1") for line in lines)


def test_the_terminal_has_one_verdict_line_and_the_scope_under_it(report, capsys):
    print_study_table(report[0])
    lines = capsys.readouterr().out.splitlines()
    (at,) = [place for place, line in enumerate(lines) if line.startswith("VERDICT:")]
    assert lines[at + 1].startswith("Scope: ")
    assert any("nvfp4" in line and "PASS" in line and "emulated" in line for line in lines)


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_browser_draws_it_without_error_or_request(report, tmp_path, dark):
    page = report[1]["html"]
    picture = tmp_path / "page.png"
    flags = ["--force-dark-mode", "--blink-settings=preferredColorScheme=0"] if dark else []
    done = subprocess.run(
        [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=380,1400",
         "--enable-logging=stderr", "--v=0", f"--log-net-log={tmp_path / 'net.json'}", *flags,
         f"--user-data-dir={tmp_path / 'profile'}", f"--screenshot={picture}", page.as_uri()],
        capture_output=True, text=True, timeout=1800, check=False,
    )  # fmt: skip
    assert picture.read_bytes().startswith(b"\x89PNG"), done.stderr
    assert "CONSOLE" not in done.stderr
    asked = set(re.findall(r'"url":"([a-z]+://[^"]+)"', (tmp_path / "net.json").read_text()))
    ours = {url for url in asked if page.name in url or url.startswith("file:")}
    assert not {url for url in asked - ours if page.parent.name in url}
    assert len(picture.read_bytes()) > 20_000  # not an empty page


def test_names_of_arms_are_the_plans(report):
    assert [arm["name"] for arm in report[0]["arms"]] == list(GAPS)
