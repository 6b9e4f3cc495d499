"""How a run is named on the command line. Oracle: the kinds of names that `halfbyte train` documents."""

import pytest

from halfbyte.cli.flag_parsing import train_arguments


@pytest.mark.parametrize("name, words", [
    ("demo", ("demo",)), ("run", ("--config", "run/config.json")), ("folder", ("--init-from", "folder")),
    ("tiny.json", ("--config", "tiny.json")),
])  # fmt: skip
def test_words_name_what_train_starts_from(tmp_path, monkeypatch, name, words):
    """A run of ours whatever directory has its name, a run directory's config, and a Hugging Face folder."""
    monkeypatch.chdir(tmp_path)
    for directory, content in {"demo": "{}", "run": "{}", "folder": '{"model_type": "llama"}'}.items():
        (tmp_path / directory).mkdir()
        (tmp_path / directory / "config.json").write_text(content)
    assert train_arguments(name) == words
