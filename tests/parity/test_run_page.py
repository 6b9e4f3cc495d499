"""The page of one run: the same page as a parity's, with what one run can say."""

from fakes import fake_parity

from halfbyte.parity.run_page import write_run_page
from halfbyte.parity.runner import run_directory
from halfbyte.train import jsonconfig


def test_a_run_leaves_a_page(tmp_path):
    plan = fake_parity(tmp_path)
    arm = plan.arms[1]
    folder = run_directory(tmp_path, arm, 0)
    jsonconfig.save(arm.configure(plan.base, 0), folder / "config.json")
    text = write_run_page(folder).read_text()
    parts = ["nats a token, validation 3.", "after 60 steps", "One run: it says what this run did", "Loss, nats"]
    parts += ["By source of text", "Gradient truth", "Cost", "emulated", "Precision", "Provenance", "config.json"]
    places = [text.index(part) for part in parts]
    assert places == sorted(places)
    assert "VERDICT" not in text and "<script" not in text and "http" not in text.replace("http-equiv", "")
