"""`jshard new` makes a folder that `check` finds no fault in, and writes into none that holds something."""

from __future__ import annotations

from jshard.cli import main


def test_new_project_is_a_configuration_without_mistakes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    assert main(["new", "mine"]) == 0
    monkeypatch.chdir(tmp_path / "mine")
    assert main(["check", "train.yaml"]) == 0
    assert "experiment model model:Model, data data:moons" in capsys.readouterr().out


def test_new_mistakes_are_one_sentence_each(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/a").write_text("kept")
    for words, sentence in (
        (["new"], "jshard new needs a folder to make; type: jshard new mine"),
        (["new", "full"], "full is not empty; type: jshard new full-2"),
        (["new", "full/a"], "full/a can't be made: file exists; name another folder"),
    ):
        assert (main(words), capsys.readouterr().err) == (2, f"{sentence}\n")
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["a"]
