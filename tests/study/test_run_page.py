"""The page of one run: the same page as a parity's, with what one run can say."""

import shutil
import subprocess

import pytest
from fakes import fake_parity

from halfbyte.evaluation.loss_curves import MetricCurve
from halfbyte.io import dataclass_json
from halfbyte.study.run_report import load_figure, write_run_report
from halfbyte.study.study_runs import cell_directory


@pytest.fixture
def page(tmp_path):
    plan = fake_parity(tmp_path)
    arm = plan.arms[1]
    folder = cell_directory(tmp_path, arm, 0)
    dataclass_json.save_config(arm.configure(plan.base, 0), folder / "config.json")
    return write_run_report(folder, sample=("The <b>", " people\n& more"))


def test_a_run_leaves_a_page(page):
    text = page.read_text()
    parts = ["training loss 3.", "(mean of the last 20 steps), validation 3.", "after 60 steps"]
    parts += ["One run: it says what this run did", "Loss, nats"]
    parts += ["By source of text", "after The &lt;b&gt;", "people", "&amp; more", "Gradient truth", "Cost", "emulated"]
    parts += ["Precision", "Provenance", "config.json"]
    places = [text.index(part) for part in parts]
    assert places == sorted(places)
    assert "VERDICT" not in text and "<script" not in text and "http" not in text.replace("http-equiv", "")


def test_the_load_of_experts_is_drawn():
    rows = tuple({"step": n, "loss": 3.0, "tokens": 64.0 * n} for n in range(1, 9))
    loaded = tuple(row | {"fullest_expert": 1.0 + row["step"] / 8, "emptiest_expert": 0.5} for row in rows)
    assert not load_figure(MetricCurve("dense", rows), [1.0] * 8, 1)
    (drawn,) = load_figure(MetricCurve("experts", loaded), [float(n) for n in range(8)], 1)
    assert drawn.count("<path") + drawn.count("<polyline") >= 2 and "emptiest" in drawn


@pytest.mark.slow
def test_a_browser_opens_it_without_a_word(page):
    """No message on the console: nothing is refused by the page's own policy, nothing fails to load."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("needs Chromium")
    quiet = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking")
    command = [browser, *quiet, "--enable-logging=stderr", "--dump-dom", f"file://{page}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    assert "nats a token" in done.stdout and "CONSOLE" not in done.stderr
