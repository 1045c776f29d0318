"""URLs of local files."""

from __future__ import annotations

import pytest

from spark_elastic._urls import without_file_scheme


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("file:///x/a%20b", "/x/a b"),
        ("file:/x", "/x"),
        ("file://localhost/x", "/x"),
        ("file:localhost/x", "localhost/x"),
        ("/x/a%20b", "/x/a%20b"),
        ("s3://bucket/x", "s3://bucket/x"),
        ("simplecache::file:///x", "simplecache::file:///x"),
    ],
)
def test_only_a_file_url_becomes_a_path(url: str, path: str) -> None:
    assert without_file_scheme(url) == path
