"""The API server: collections and single objects of the store over HTTP, watches over WebSockets."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any

from aiohttp import web

from kube.store import KINDS, Object, Query, Store, patch

logger = logging.getLogger("kube")

# An application's files travel in config maps.
LARGEST_REQUEST = 16 << 20


def make_api(store: Store, delete: Callable[[str, Object, int | None], None]) -> web.Application:
    """Return the server's application; ``delete(plural, object, seconds of grace)`` does what deletion entails."""
    api = Api(store, delete)
    application = web.Application(client_max_size=LARGEST_REQUEST)
    for interface in ("/api/v1", "/apis/networking.k8s.io/v1"):
        collection = interface + "/namespaces/{namespace}/{plural}"
        single = collection + "/{name}"
        application.add_routes(
            [
                web.post(collection, api.create),
                web.get(collection, api.list),
                web.delete(collection, api.delete_all),
                web.get(single, api.get),
                web.patch(single, api.patch),
                web.put(single, api.replace),
                web.delete(single, api.delete),
            ]
        )
    application.add_routes([web.get("/version", api.version), web.route("*", "/{rest:.*}", api.unknown)])
    return application


class Api:
    def __init__(self, store: Store, delete: Callable[[str, Object, int | None], None]) -> None:
        self._store = store
        self._delete = delete

    async def version(self, request: web.Request) -> web.Response:
        return web.json_response({"major": "1", "minor": "30", "gitVersion": "v1.30.0"})

    async def unknown(self, request: web.Request) -> web.Response:
        logger.error("no such thing: %s %s", request.method, request.path_qs)
        return _failure(404, "NotFound", f"{request.path} is not known")

    async def create(self, request: web.Request) -> web.Response:
        plural, obj = _plural(request), await request.json()
        if not self._store.add(plural, request.match_info["namespace"], obj):
            return _failure(409, "AlreadyExists", f"{plural} {obj['metadata']['name']} exists")
        return web.json_response(obj, status=201)

    async def list(self, request: web.Request) -> web.StreamResponse:
        query = _query(request)
        if request.query.get("watch") == "true":
            return await self._watch(request, query)
        return web.json_response(
            {
                "kind": f"{KINDS[query.plural][1]}List",
                "apiVersion": KINDS[query.plural][0],
                "metadata": {"resourceVersion": str(self._store.version)},
                "items": self._store.find(query),
            }
        )

    async def _watch(self, request: web.Request, query: Query) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        changes: asyncio.Queue[Object] = asyncio.Queue()
        watch = self._store.watch(query, int(request.query.get("resourceVersion") or 0), changes.put_nowait)

        async def send() -> None:
            while True:
                await socket.send_json(await changes.get())

        sending = asyncio.ensure_future(send())
        try:
            await socket.receive()  # the client sends nothing but its good-bye
        finally:
            self._store.watches.remove(watch)
            sending.cancel()
            with contextlib.suppress(asyncio.CancelledError, ConnectionError):
                await sending
        return socket

    async def delete_all(self, request: web.Request) -> web.Response:
        query, grace = _query(request), await _grace(request)
        for obj in self._store.find(query):
            self._delete(query.plural, obj, grace)
        return web.json_response({"kind": "Status", "apiVersion": "v1", "status": "Success"})

    async def get(self, request: web.Request) -> web.Response:
        return web.json_response(self._one(request))

    async def patch(self, request: web.Request) -> web.Response:
        names, change = request.match_info, await request.json()
        is_apply = request.content_type == "application/apply-patch+yaml"  # of which JSON is a part
        if is_apply and self._store.get(_plural(request), names["namespace"], names["name"]) is None:
            self._store.add(_plural(request), names["namespace"], change)
            return web.json_response(change, status=201)
        obj = self._one(request)
        patch(obj, change)
        self._store.modified(_plural(request), obj)
        return web.json_response(obj)

    async def replace(self, request: web.Request) -> web.Response:
        obj, new = self._one(request), await request.json()
        status = obj.get("status")  # has a way of its own, which only a kubelet takes
        obj.clear()
        obj.update(new)
        if status is not None:
            obj["status"] = status
        self._store.modified(_plural(request), obj)
        return web.json_response(obj)

    async def delete(self, request: web.Request) -> web.Response:
        obj = self._one(request)
        self._delete(_plural(request), obj, await _grace(request))
        return web.json_response(obj)

    def _one(self, request: web.Request) -> Object:
        names = request.match_info
        obj = self._store.get(_plural(request), names["namespace"], names["name"])
        if obj is None:
            raise web.HTTPNotFound(
                text=_failure(404, "NotFound", f"{names['plural']} {names['name']} not found").text,
                content_type="application/json",
            )
        return obj


def _plural(request: web.Request) -> str:
    plural = request.match_info["plural"]
    if plural not in KINDS:
        logger.error("no such collection: %s %s", request.method, request.path_qs)
        raise web.HTTPNotFound
    return plural


def _query(request: web.Request) -> Query:
    given = request.query
    return Query(
        _plural(request),
        request.match_info["namespace"],
        given.get("labelSelector", ""),
        given.get("fieldSelector", ""),
    )


async def _grace(request: web.Request) -> int | None:
    options: dict[str, Any] = await request.json() if request.can_read_body else {}
    grace = options.get("gracePeriodSeconds", request.query.get("gracePeriodSeconds"))
    return None if grace is None else int(grace)


def _failure(code: int, reason: str, message: str) -> web.Response:
    status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason, "code": code}
    return web.json_response({**status, "message": message}, status=code)
