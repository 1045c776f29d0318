"""JSON as we write it is read, and what only Python's parser takes for JSON is refused."""

from __future__ import annotations

import json

import pytest

from spark_elastic.checkpoint.strict_json import load_json


def test_what_is_written_is_read() -> None:
    value = {"steps": 2**63, "size": -1.5e-300, "objects": {"Tromsø": [None, True, "\udcff"], "": {}}}
    assert load_json(json.dumps(value).encode("ascii")) == value


@pytest.mark.parametrize("text", ['{"a": 1, "a": 1}', '[{"b": {"a": 1, "c": 2, "a": 3}}]'])
def test_a_name_comes_once_in_an_object_however_deep_it_lies(text: str) -> None:
    with pytest.raises(ValueError, match="an object has the same name twice"):
        load_json(text.encode())


@pytest.mark.parametrize("constant", ["NaN", "Infinity", "-Infinity"])
def test_numbers_that_are_none_are_refused(constant: str) -> None:
    with pytest.raises(ValueError, match=f"^{constant} is not JSON"):
        load_json(f'{{"a": [{constant}]}}'.encode())


def test_only_utf8_is_text() -> None:
    assert load_json('"Tromsø"'.encode()) == "Tromsø"
    with pytest.raises(UnicodeDecodeError):
        load_json('"Tromsø"'.encode("utf-16"))
