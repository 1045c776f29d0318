"""The document of the event log is made from the classes of its records."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from spark_elastic.protocol.records import DRIVER_RECORDS
from spark_elastic.protocol.reports import REPORTS
from spark_elastic.timeline import schema
from spark_elastic.timeline.schema import document

ROOT = Path(__file__).parents[3]


def test_the_document_of_the_schema_is_made_from_it() -> None:
    assert (ROOT / "docs" / "events.md").read_text() == document(), (
        "python -m spark_elastic.timeline.schema > docs/events.md"
    )


def test_every_kind_of_event_is_a_section_with_its_meaning_and_its_fields() -> None:
    sections = {text.partition("\n")[0]: text for text in document().split("\n## ")[1:]}
    assert list(sections) == [*DRIVER_RECORDS, *REPORTS]
    for kind, own in {**DRIVER_RECORDS, **REPORTS}.items():
        assert all(f"- `{field.name}`: " in sections[kind] for field in msgspec.structs.fields(own)), kind


def test_a_line_of_a_docstring_that_is_about_no_field_is_found_out() -> None:
    class Odd(msgspec.Struct):
        """Something happens.

        gone: what no field is called any more
        """

        worker: int

    with pytest.raises(AssertionError, match="Odd has no gone"):
        schema._fields(Odd)
    Odd.__doc__ = "Something happens.\n\nworker: its number"
    assert schema._fields(Odd) == "- `worker`: int; its number\n"
