"""The cluster's objects, as its API shows them: who watches hears of every change. No I/O, no threads."""

from __future__ import annotations

import copy
import datetime
import re
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

Object = dict[str, Any]

# What there is by the name of its collection: the version of its interface, and its kind.
KINDS = {
    "pods": ("v1", "Pod"),
    "configmaps": ("v1", "ConfigMap"),
    "services": ("v1", "Service"),
    "persistentvolumeclaims": ("v1", "PersistentVolumeClaim"),
    "networkpolicies": ("networking.k8s.io/v1", "NetworkPolicy"),
}


@dataclass(frozen=True)
class Query:
    """Which objects of a collection are meant, in the words of a request."""

    plural: str
    namespace: str
    labels: str = ""
    fields: str = ""

    def matches(self, plural: str, obj: Object) -> bool:
        metadata = obj["metadata"]
        if (plural, metadata["namespace"]) != (self.plural, self.namespace):
            return False
        labels = metadata.get("labels") or {}
        wanted = dict(part.split("=", 1) for part in self.fields.split(",") if part)
        return all(_satisfies(labels, part) for part in _split(self.labels)) and all(
            _field(obj, path) == value for path, value in wanted.items()
        )


def _split(selector: str) -> list[str]:
    """Cut a label selector at its commas, but not at those within brackets."""
    return [part.strip() for part in re.split(r",(?![^(]*\))", selector) if part.strip()]


def _satisfies(labels: dict[str, str], requirement: str) -> bool:
    if found := re.fullmatch(r"(\S+) (in|notin) \((.*)\)", requirement):
        key, operator, values = found.groups()
        return (labels.get(key) in [value.strip() for value in values.split(",")]) == (operator == "in")
    if found := re.fullmatch(r"([^!=]+)(!=|==|=)(.*)", requirement):
        key, operator, value = found.groups()
        return (labels.get(key) == value) != (operator == "!=")
    return requirement[1:] not in labels if requirement.startswith("!") else requirement in labels


def _field(obj: Object, path: str) -> str:
    value: Any = obj
    for name in path.split("."):
        value = (value or {}).get(name)
    return str(value)


@dataclass(frozen=True)
class Watch:
    query: Query
    tell: Callable[[Object], None]


@dataclass
class Store:
    """Each change gives an object the next version and is told to those that watch it."""

    version: int = 0
    watches: list[Watch] = field(default_factory=list)
    _objects: dict[tuple[str, str, str], Object] = field(default_factory=dict)

    def get(self, plural: str, namespace: str, name: str) -> Object | None:
        return self._objects.get((plural, namespace, name))

    def find(self, query: Query) -> list[Object]:
        return [obj for (plural, *_), obj in self._objects.items() if query.matches(plural, obj)]

    def all(self, plural: str) -> list[Object]:
        return [obj for (of, *_), obj in self._objects.items() if of == plural]

    def add(self, plural: str, namespace: str, obj: Object) -> bool:
        """Take a new object in; False where one of its name is there."""
        metadata = obj.setdefault("metadata", {})
        metadata.update(namespace=namespace, uid=str(uuid.uuid4()), creationTimestamp=now())
        metadata.setdefault("name", metadata.get("generateName", "") + uuid.uuid4().hex[:5])
        obj["apiVersion"], obj["kind"] = KINDS[plural]
        if plural == "pods":
            obj["status"] = {"phase": "Pending"}
        key = (plural, namespace, metadata["name"])
        if key in self._objects:
            return False
        self._objects[key] = obj
        self._changed("ADDED", plural, obj)
        return True

    def modified(self, plural: str, obj: Object) -> None:
        """Note that an object has been changed. One that has gone meanwhile stays gone."""
        if self.get(plural, obj["metadata"]["namespace"], obj["metadata"]["name"]) is obj:
            self._changed("MODIFIED", plural, obj)

    def remove(self, plural: str, obj: Object) -> None:
        if self._objects.pop((plural, obj["metadata"]["namespace"], obj["metadata"]["name"]), None) is not None:
            self._changed("DELETED", plural, obj)

    def owned_by(self, owner: Object) -> Iterator[tuple[str, Object]]:
        """What the garbage collector takes along with an object."""
        for (plural, *_), obj in list(self._objects.items()):
            references = obj["metadata"].get("ownerReferences") or []
            if any(reference["uid"] == owner["metadata"]["uid"] for reference in references):
                yield plural, obj

    def watch(self, query: Query, since: int, tell: Callable[[Object], None]) -> Watch:
        """Tell of what has changed since that version and is still there, then of each change."""
        watch = Watch(query, tell)
        for obj in self.find(query):
            if int(obj["metadata"]["resourceVersion"]) > since:
                tell({"type": "ADDED", "object": copy.deepcopy(obj)})
        self.watches.append(watch)
        return watch

    def _changed(self, how: str, plural: str, obj: Object) -> None:
        self.version += 1
        obj["metadata"]["resourceVersion"] = str(self.version)
        for watch in self.watches:
            if watch.query.matches(plural, obj):
                watch.tell({"type": how, "object": copy.deepcopy(obj)})


def patch(obj: Object, change: Any) -> None:
    """Apply a merge patch, or a JSON patch, which is a list. Lists within a strategic merge patch replace the old ones."""
    if isinstance(change, list):
        for operation in change:
            _apply(obj, operation)
        return
    for name, value in change.items():
        if value is None:
            obj.pop(name, None)
        elif isinstance(value, dict) and isinstance(obj.get(name), dict):
            patch(obj[name], value)
        else:
            obj[name] = value


def _apply(obj: Any, operation: Object) -> None:
    *way, last = [part.replace("~1", "/").replace("~0", "~") for part in operation["path"].strip("/").split("/")]
    for name in way:
        obj = obj[int(name)] if isinstance(obj, list) else obj.setdefault(name, {})
    if operation["op"] == "remove":
        del obj[last]
    elif isinstance(obj, list):
        obj.insert(len(obj) if last == "-" else int(last), operation["value"])
    else:
        obj[last] = operation["value"]


def now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
