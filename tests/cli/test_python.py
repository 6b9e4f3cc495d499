"""Runs from Python: the same run that the commands read, loaded, written with and scored."""

import pytest

import halfbyte as hb

pytestmark = pytest.mark.slow


def test_a_run_is_loaded_written_with_and_scored(tiny_run, one_device):
    loaded = hb.load(tiny_run)
    assert loaded.config.recipe == loaded.recipe == "nvfp4"
    assert loaded.params and loaded.tokenizer.decode(loaded.tokenizer.encode("the law")) == "the law"
    text = hb.generate(loaded, "the ", max_tokens=4, temperature=0.0)
    assert isinstance(text, str) and text == hb.generate(loaded, "the ", max_tokens=4, temperature=0.0)
    results = hb.evaluate(loaded, limit=1)
    assert [result.task for result in results] == ["validation/default"]
