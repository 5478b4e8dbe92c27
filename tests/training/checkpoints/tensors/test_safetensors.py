"""Files of safetensors: every dtype, the library's own bytes, and what can be wrong with one."""

from __future__ import annotations

import json

import numpy as np
import pytest

from jshard.errors import JShardError
from jshard.training.checkpoints.tensors.safetensors import DTYPES, by_name, new_header, read_header, read_headers


def safetensors(entries, data: bytes = b"", *, text: bytes | None = None) -> bytes:
    text = json.dumps(entries).encode() if text is None else text
    return len(text).to_bytes(8, "little") + text + data


def tensor(begin: int, end: int, dtype: str = "F32", shape=None):
    return {"dtype": dtype, "shape": [(end - begin) // 4] if shape is None else shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    "content, faults",
    [
        (b"short", ["{} is no safetensors file: its first 8 bytes are not the length of a header; name a file of safetensors"]),
        (safetensors({}, text=b""), ["the header of {} is no JSON: Expecting value: line 1 column 1 (char 0); fetch x.safetensors again"]),
        (b"x" * 50, ["{} is no safetensors file: its first 8 bytes are not the length of a header; name a file of safetensors"]),
        (safetensors({"a": tensor(0, 8)})[:30], ["{} has 30 bytes and its header alone 69: it was cut off; fetch x.safetensors again"]),
        (safetensors({}, text=b"{'a': 1}"), ["the header of {} is no JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1); fetch x.safetensors again"]),
        (safetensors({}, text=b"[]"), ["the header of {} is no JSON: it is no mapping; fetch x.safetensors again"]),
        (safetensors({}, text=b'{"a": \xff}'), ["the header of {} is no JSON: 'utf-8' codec can't decode byte 0xff in position 6: invalid start byte; fetch x.safetensors again"]),
        (
            safetensors({"a": tensor(0, 8), "b": tensor(4, 12), "c": tensor(16, 20)}, bytes(20)),
            ['by the header of {} "a" and "b" share bytes; fetch x.safetensors again', 'by the header of {} 4 bytes before "c" belong to no tensor; fetch x.safetensors again'],
        ),
        (
            safetensors({"a": 3, "b": tensor(0, 8, "F33"), "c": tensor(0, 8, shape=[3]), "d": tensor(0, 8, shape=[-2]), "e": tensor(0, 8, shape=[-1])}, bytes(8)),
            [
                '"a" in the header of {} has no dtype, shape and data_offsets; fetch x.safetensors again',
                '"b" in the header of {} has a dtype that jshard does not know, "F33"; fetch x.safetensors again',
                '"c" in the header of {} takes 8 bytes by its offsets and 12 by its shape, float32[3]; fetch x.safetensors again',
                '"d" in the header of {} has no dtype, shape and data_offsets; fetch x.safetensors again',
                '"e" in the header of {} has no dtype, shape and data_offsets; fetch x.safetensors again',
            ],
        ),
        (
            safetensors({}, bytes(8), text=b'{"a": %b, "a": %b}' % ((json.dumps(tensor(0, 8)).encode(),) * 2)),
            ['"a" in the header of {} is there twice; fetch x.safetensors again'],
        ),
    ],
)  # fmt: skip
def test_all_that_is_wrong_with_a_header_is_told(tmp_path, content, faults):
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(JShardError) as told:
        read_header(path, [])
    assert str(told.value).splitlines() == [fault.format(path) for fault in faults]


@pytest.mark.parametrize("size, cut", [(4, ": it was cut off"), (12, "")])
def test_file_with_too_few_or_too_many_bytes_is_told_with_its_tensors(tmp_path, size, cut):
    path = tmp_path / "x.safetensors"
    path.write_bytes(safetensors({"a": tensor(0, 8)}, bytes(size)))
    cut_off: list[JShardError] = []
    assert read_header(path, cut_off).tensors["a"].shape == (2,)
    assert [str(each) for each in cut_off] == [
        f"{path} has {69 + size} bytes and by its header 77{cut}; fetch x.safetensors again"
    ]


def folder(path, index, **parts):
    for name, content in parts.items():
        (path / f"{name}.safetensors").write_bytes(content)
    (path / "model.safetensors.index.json").write_text(
        index if isinstance(index, str) else json.dumps({"weight_map": index})
    )


PART = safetensors({"a": tensor(0, 8)}, bytes(8))


@pytest.mark.parametrize(
    "index, faults",
    [
        ({"a": "one.safetensors", "b": "two.safetensors", "c": "three.safetensors"}, [
            "{}/three.safetensors can't be read: no such file or directory; fetch three.safetensors",
            'the header of {}/two.safetensors is no JSON: Expecting value: line 1 column 1 (char 0); fetch two.safetensors again',
        ]),
        ({"b": "one.safetensors"}, [
            '{}/model.safetensors.index.json does not name "a", which is there; fetch them again',
            '{}/model.safetensors.index.json has "b", which no part has; fetch them again',
        ]),
        ({"a": "one.safetensors", "b": "again.safetensors"}, ['"a" is in again.safetensors and in one.safetensors of {}; remove one of the files']),
        ("{", ['{}/model.safetensors.index.json is no index of safetensors: it has no "weight_map" of names and files; fetch it again']),
        ({"a": "../one.safetensors"}, ['{}/model.safetensors.index.json is no index of safetensors: it has no "weight_map" of names and files; fetch it again']),
    ],
)  # fmt: skip
def test_all_that_is_wrong_with_a_folder_is_told(tmp_path, index, faults):
    folder(tmp_path, index, one=PART, again=PART, two=safetensors({}, text=b"no"))
    with pytest.raises(JShardError) as told:
        read_headers(tmp_path, [])
    assert sorted(str(told.value).splitlines()) == sorted(fault.format(tmp_path) for fault in faults)


def test_folder_without_safetensors_is_told(tmp_path):
    with pytest.raises(JShardError) as told:
        read_headers(tmp_path, [])
    assert str(told.value) == f"{tmp_path} holds no safetensors; name the folder with model.safetensors in it"


def test_parts_of_a_folder_are_read_by_its_index(tmp_path):
    folder(
        tmp_path, {"a": "one.safetensors", "b": "b.safetensors"}, one=PART, b=safetensors({"b": tensor(0, 4)}, bytes(4))
    )
    (tmp_path / "consolidated.safetensors").write_bytes(PART)  # not named, so not read
    found = by_name(read_headers(tmp_path, []))
    assert {name: (each.path.name, each.shape) for name, each in found.items()} == {
        "a": ("one.safetensors", (2,)),
        "b": ("b.safetensors", (1,)),
    }


def test_new_file_is_byte_for_byte_what_the_library_writes(extra, tmp_path):
    library = extra("safetensors.numpy")
    unknown = {"F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "C64", "F8_E4M3", "F8_E5M2"}  # to its numpy module
    for metadata in (None, {"format": "pt"}):
        arrays = {
            f"{i}é{word}": np.zeros((i, 2), dtype)
            for i in (0, 3)
            for word, dtype in DTYPES.items()
            if word not in unknown
        }
        library.save_file(arrays, tmp_path / "theirs", metadata=metadata)
        header = new_header(
            tmp_path / "ours", {name: (each.shape, each.dtype) for name, each in arrays.items()}, metadata
        )
        theirs = (tmp_path / "theirs").read_bytes()
        assert theirs[: len(header.text)] == header.text
        assert len(theirs) == header.size
        assert {name: each.at for name, each in read_header(tmp_path / "theirs", []).tensors.items()} == {
            name: each.at for name, each in header.tensors.items()
        }
