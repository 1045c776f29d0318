"""Text of any length and content, made safe to send."""

from __future__ import annotations

import pytest

from spark_elastic._text import as_utf8, brief, shortened, shown, without_secrets


def test_what_utf8_cannot_encode_is_escaped() -> None:
    assert as_utf8("a\udcff") == "a\\udcff"


def test_of_a_long_text_its_beginning_and_its_end_are_left() -> None:
    assert shortened("abcd", 4) == "abcd"
    assert shortened("ab" + 7 * "x" + "yz", 4) == "ab\n[… 7 characters are left out …]\nyz"


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("it was closed")


def test_a_brief_text_of_a_value_has_an_end_and_never_fails() -> None:
    assert brief(("a", 1)) == "('a', 1)"
    assert len(brief("x" * 9000)) == 200
    assert "array object at" in brief(type("array", (), {})())
    assert brief([Unprintable()]).startswith("[<Unprintable instance at 0x")


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("s3://AK:S3CRET@bucket/x", "s3://…@bucket/x"),
        ("s3://AK:S3@CRET@bucket/a@b", "s3://…@bucket/a@b"),
        ("s3://AK:S3/CR+ET@bucket/x", "s3://…@bucket/x"),
        ("s3://AK:/S3CRET@bucket/x", "s3://…@bucket/x"),
        ("s3://AK:S3?CRET@bucket/x", "s3://…@bucket/x"),
        ("odd://S3CRET@host:80/x", "odd://…@host:80/x"),
        ("simplecache::ftp://me:S3CRET@host/x", "simplecache::ftp://…@host/x"),
        ("zip://x::http://me:S3CRET@host:1/z.zip", "zip://x::http://…@host:1/z.zip"),
        (
            "zip://x::filecache::https://me:S3C::RET@h/z?sig=S3CRET&region=eu",
            "zip://x::filecache::https://…@h/z?sig=…&region=eu",
        ),
        ("http://me:S3CRET@[::1]:80/x?sig=S3CRET", "http://…@[::1]:80/x?sig=…"),
        ("s3://b/x?secret_key=S3=CRET&region=eu&access_key=AK", "s3://b/x?secret_key=…&region=eu&access_key=…"),
        (
            "s3://b/x?scheme=http&endpoint_override=http://u:p@h:9",
            "s3://b/x?scheme=http&endpoint_override=http://…@h:9",
        ),
    ],
)
def test_keys_and_secrets_in_a_url_are_not_shown(url: str, told: str) -> None:
    assert shown(url) == told


@pytest.mark.parametrize(
    "url",
    ["hdfs://node:8020/a@b", "hdfs://[::1]:8020/x", "s3://bucket/model@v1/x", "/a:b/c@d?e=f", "file:///a:b/c@d", "a"],
)
def test_what_is_no_secret_is_shown(url: str) -> None:
    assert shown(url) == url


@pytest.mark.parametrize(
    ("url", "said", "told"),
    [
        ("s3://AK:S3CRET@bucket/x", 'Invalid bucket name "AK:S3CRET@bucket"', 'Invalid bucket name "…@bucket"'),
        ("s3://AK:S3/CRET@bucket/x", 'Invalid bucket name "AK:S3"', 'Invalid bucket name "…"'),
        ("s3://b/x?key=S3CRET", "Cannot parse URI: 's3://b/x?key=S3CRET'", "Cannot parse URI: 's3://b/x?key=…'"),
        ("s3://b/x?key=S3%2FCRET", "bad query: key=S3/CRET", "bad query: key=…"),
        ("/a/b", "no file /a/b", "no file /a/b"),
        ("zip://x::http://me:S3CRET@h/z", "refused: http://me:S3CRET@h/z", "refused: http://…@h/z"),
        ("zip://x::http://h/z?sig=S3CRET", "403, url='http://h/z?sig=S3CRET'", "403, url='http://h/z?sig=…'"),
        ("http://h/z?sig=S3%2FCR%2BET%3D", "403, url='http://h/z?sig=S3/CR%2bET%3D'", "403, url='http://h/z?sig=…'"),
    ],
)
def test_what_libraries_repeat_of_a_url_is_not_shown_either(url: str, said: str, told: str) -> None:
    assert without_secrets(OSError(said), url) == told
