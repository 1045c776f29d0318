"""The stand-in's own logic, which needs no Spark."""

from __future__ import annotations

from typing import Any

import pytest
from kube.store import Query, Store, patch


def pod(name: str, **labels: str) -> dict[str, Any]:
    return {"metadata": {"name": name, "labels": labels}}


@pytest.mark.parametrize(
    ("selector", "found"),
    [
        ("", ["a", "b", "c"]),
        ("role=executor", ["a", "b"]),
        ("role=executor,id in (1, 3)", ["a"]),
        ("id notin (1,2)", ["c"]),
        ("role!=executor", ["c"]),
        ("id", ["a", "b"]),
        ("!id", ["c"]),
    ],
)
def test_labels_are_selected_as_kubernetes_does(selector: str, found: list[str]) -> None:
    store = Store()
    for new in (pod("a", role="executor", id="1"), pod("b", role="executor", id="2"), pod("c", role="driver")):
        store.add("pods", "default", new)
    assert [obj["metadata"]["name"] for obj in store.find(Query("pods", "default", selector))] == found


def test_who_watches_hears_of_each_change_from_the_version_that_was_asked_for() -> None:
    store, heard = Store(), []
    first, second = pod("a"), pod("b")
    store.add("pods", "default", first)
    seen = store.version
    store.add("pods", "default", second)
    store.watch(
        Query("pods", "default"),
        seen,
        lambda change: heard.append((change["type"], change["object"]["metadata"]["name"])),
    )
    store.modified("pods", first)
    store.remove("pods", second)
    store.modified("pods", second)  # by whoever has not heard of it yet
    assert heard == [("ADDED", "b"), ("MODIFIED", "a"), ("DELETED", "b")]


def test_fields_select_by_what_the_status_says() -> None:
    store = Store()
    store.add("pods", "default", pod("a"))
    assert not store.find(Query("pods", "default", fields="status.phase=Running"))
    store.find(Query("pods", "default"))[0]["status"]["phase"] = "Running"
    assert store.find(Query("pods", "default", fields="status.phase=Running"))


@pytest.mark.parametrize(
    "change",
    [
        {"metadata": {"labels": {"old": None, "new": "2"}}},
        [
            {"op": "remove", "path": "/metadata/labels/old"},
            {"op": "add", "path": "/metadata/labels/new", "value": "2"},
        ],
    ],
)
def test_both_kinds_of_patches_change_an_object(change: Any) -> None:
    obj = pod("a", old="1", kept="0")
    patch(obj, change)
    assert obj == pod("a", kept="0", new="2")
