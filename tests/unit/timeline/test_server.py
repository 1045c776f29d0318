"""The page of a running job: who gets it, and what it shows while the log grows; cli/test_timeline.py has the command."""

from __future__ import annotations

import http.client
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import story
from serving import serving

from spark_elastic.cli import main
from spark_elastic.timeline.server import SILENT_SECONDS, LiveRun, PageServer

EVENTS = story.killed()


def append(log: Path, *events: dict[str, Any]) -> None:
    with log.open("a", encoding="utf-8") as file:
        file.write("".join(json.dumps(event) + "\n" for event in events))


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "events.jsonl"


@pytest.fixture
def server(log: Path) -> Iterator[PageServer]:
    with serving(log) as made:
        yield made


def ask(server: PageServer, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], str]:
    """Ask for a path as it is, which a better client would put in order."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    connection.putrequest(method, path, skip_host="Host" in headers)
    for name, value in headers.items():
        connection.putheader(name.replace("_", "-"), value)
    connection.endheaders()
    answer = connection.getresponse()
    content = answer.status, dict(answer.getheaders()), answer.read().decode()
    connection.close()
    return content


def facts(server: PageServer) -> dict[str, Any]:
    status, _, body = ask(server, f"/{server.token}/facts.json")
    assert status == 200
    found: dict[str, Any] = json.loads(body)
    return found


# ---------------------------------------------------------------- who gets it


def test_the_address_is_of_this_machine_alone_and_has_a_token_of_its_own(log: Path) -> None:
    with PageServer(LiveRun(log)) as one, PageServer(LiveRun(log)) as other:
        assert one.socket.getsockname()[0] == "127.0.0.1"
        assert re.fullmatch(rf"http://127\.0\.0\.1:{one.server_port}/[\w-]{{32}}/", one.address)
        assert one.token != other.token


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "",
        "/facts.json",
        "/x/",
        "/x/facts.json",
        "/TOKE/",
        "/TOKENx/",
        "/token/",
        "/%54OKEN/",
        "*",
        "/ü/",
    ],
)
def test_nothing_is_told_without_the_token(path: str, server: PageServer, log: Path) -> None:
    append(log, *EVENTS)
    asked = path.replace("TOKEN", server.token).replace("TOKE", server.token[:-1]).replace("ü", "\\xfc")
    status, _, body = ask(server, asked)
    assert (status, body) == (403, "The address that the command has printed has a token, which this one lacks.\n")


@pytest.mark.parametrize(
    "name", ["../", "..%2f..%2fetc/passwd", "../../../../etc/passwd", "page.js", "x", "facts.json/"]
)
def test_there_are_three_contents_and_no_files(name: str, server: PageServer, log: Path) -> None:
    assert ask(server, f"/{server.token}/{name}")[0] == 404


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1", "127.0.0.1:1", "localhost.evil.example:PORT", ""])
def test_a_request_to_another_name_is_refused_because_a_site_may_have_bound_it_to_this_address(
    host: str, server: PageServer
) -> None:
    port = str(server.server_port)
    assert ask(server, f"/{server.token}/", Host=host.replace("PORT", port))[0] == 403
    for own in ("127.0.0.1", "localhost"):
        assert ask(server, f"/{server.token}/", Host=f"{own}:{port}")[0] == 200


def test_other_methods_than_get_and_head_are_refused(server: PageServer) -> None:
    assert ask(server, f"/{server.token}/", method="POST")[0] == 501
    status, headers, body = ask(server, f"/{server.token}/", method="HEAD")
    assert (status, body) == (200, "")
    assert int(headers["Content-Length"]) > 1000


@pytest.mark.parametrize("path", ["/TOKEN/", "/TOKEN/facts.json", "/TOKEN/save", "/", "/TOKEN", "/TOKEN/x"])
def test_every_answer_keeps_browsers_from_keeping_framing_and_handing_on(path: str, server: PageServer) -> None:
    headers = ask(server, path.replace("TOKEN", server.token))[1]
    assert headers["Server"] == "spark_elastic"
    assert headers["Cache-Control"] == "no-store"
    assert headers["Referrer-Policy"] == "no-referrer"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Content-Security-Policy"] == "frame-ancestors 'none'"


def test_the_address_without_its_last_slash_leads_to_the_page(server: PageServer) -> None:
    status, headers, _ = ask(server, f"/{server.token}")
    assert (status, headers["Location"]) == (308, f"/{server.token}/")


# ---------------------------------------------------------------- what it shows


def test_the_page_waits_for_the_log_then_for_a_run_and_follows_it_to_its_end(server: PageServer, log: Path) -> None:
    assert facts(server)["waiting"] == f"Waiting for {log}: there is no such file yet."
    log.touch()
    assert facts(server)["waiting"] == f"No run has begun in {log} yet."
    append(log, *EVENTS[:5])
    present = facts(server)
    assert "waiting" not in present
    assert (present["title"], present["isOver"], len(present["workers"])) == ("run abcd", False, 2)
    assert present["headline"].startswith("The run goes on.")
    append(log, *EVENTS[5:])
    present = facts(server)
    assert (present["isOver"], len(present["resets"]), len(present["workers"])) == (True, 2, 3)
    assert present["headline"].startswith("The run finished.")


def test_a_run_that_begins_later_in_the_same_file_takes_the_place_of_the_last(server: PageServer, log: Path) -> None:
    append(log, *EVENTS)
    assert facts(server)["title"] == "run abcd"
    append(log, {**EVENTS[0], "run_id": "efgh"})
    assert (facts(server)["title"], facts(server)["isOver"]) == ("run efgh", False)


def test_the_run_that_is_asked_for_is_waited_for(log: Path) -> None:
    run = LiveRun(log, "efgh")
    append(log, *EVENTS)
    assert run.facts()[1]["waiting"] == f"Waiting for the run efgh, which is not in {log} yet."
    append(log, {**EVENTS[0], "run_id": "efgh"}, EVENTS[0])
    assert run.facts()[1]["title"] == "run efgh"


def test_what_has_not_changed_is_not_sent_again(server: PageServer, log: Path) -> None:
    append(log, *EVENTS)
    version = facts(server)["live"]["version"]
    assert ask(server, f"/{server.token}/facts.json", If_None_Match=version)[::2] == (304, "")
    append(log, EVENTS[0])
    assert ask(server, f"/{server.token}/facts.json", If_None_Match=version)[0] == 200


def test_time_goes_on_while_a_run_does_until_it_has_been_silent_for_long(log: Path) -> None:
    append(log, *EVENTS[:12])
    os.utime(log, (1003.1, 1003.1))
    now = 1005.0
    run = LiveRun(log, now=lambda: now)
    before, first = run.facts()
    assert first["seconds"] == 5.0
    now = 1009.0
    after, later = run.facts()
    assert (later["seconds"], after != before) == (9.0, True)
    now += SILENT_SECONDS
    _, silent = run.facts()
    assert silent["seconds"] == pytest.approx(3.1)
    assert silent["live"]["silent"] == "nothing was written for 0:35.0"


def test_the_page_that_is_saved_is_the_one_that_is_written_without_a_server(
    server: PageServer, log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    append(log, *EVENTS)
    assert main(["timeline", str(log), "-o", str(log.with_suffix(".html"))]) == 0
    _, headers, saved = ask(server, f"/{server.token}/save")
    assert headers["Content-Disposition"] == 'attachment; filename="timeline.html"'
    assert saved == log.with_suffix(".html").read_text()
    assert server.token not in saved
    _, _, live = ask(server, f"/{server.token}/")
    assert re.sub(r', "live": \{.*?\}', "", live) == saved


@pytest.mark.parametrize("run", [None, "efgh"])
def test_lines_that_cannot_be_read_are_said_where_nothing_else_is_there(run: str | None, log: Path) -> None:
    append(log, {**EVENTS[0], "version": 99})
    waited_for = "No run has begun" if run is None else "Waiting for the run efgh"
    sentence = LiveRun(log, run).facts()[1]["waiting"]
    assert isinstance(sentence, str)
    assert sentence.startswith(waited_for)
    assert "1 line of the log could not be read; the first: line 1: it has version 99, " in sentence


def test_a_log_that_cannot_be_read_is_said_on_the_page(log: Path) -> None:
    log.mkdir()
    assert LiveRun(log).facts()[1]["waiting"] == f"{log} cannot be read: Is a directory."
