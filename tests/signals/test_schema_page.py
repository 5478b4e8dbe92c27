"""`jshard schema --page` has a row for every key, with its values."""

from __future__ import annotations

from jshard.cli import main
from jshard.signals.schema import JSHARD, SIGNAL


def test_page_has_every_key_of_a_signal_and_of_jshard(capsys):
    assert main(["schema", "--page"]) == 0
    of_signal, of_jshard = capsys.readouterr().out.split("\n## ")[1:]
    for table, keys in ((of_signal, SIGNAL), (of_jshard, JSHARD)):
        assert [key for key in keys if f"\n| `{key}` | " not in table] == []
    assert "| `store.parameters` | text or a list | Parameters and the optimizer's state (FSDP). |" in of_signal
    assert "| `attention` | `ring`, `ulysses` | Under ring: " in of_signal
    assert of_jshard.count("| `train.data.shuffle` | ") == 1


def test_page_says_which_words_are_for_jshards_own_layers(capsys):
    main(["schema", "--page"])
    rows = capsys.readouterr().out.splitlines()
    own = [row.split("`")[1] for row in rows if "jshard's own layers" in row]
    assert own == ["output", "backward", "compile"]
