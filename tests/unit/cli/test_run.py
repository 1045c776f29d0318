"""run: what its options mean, and mistakes that are named."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql import SparkSession

import spark_elastic
from spark_elastic.cli import main
from spark_elastic.cli.run import end_session, ending_at_ctrl_c, make_session
from spark_elastic.cli.script import find_target
from spark_elastic.protocol.messages import Member
from spark_elastic.worker import scripts


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["nothing.py"], "script 'nothing.py' does not exist"),
        (["nothing"], "must be a script, module:function, or -m and a module, not 'nothing'"),
        (["-m", "nothing"], "module 'nothing' does not exist"),
        (["json:dumps", "--max-restarts", "3"], "--max-restarts needs --restart-on-change"),
        (["json:dumps", "--restart-on-change", "--checkpoint", "x"], "continues from its own checkpoints"),
        (["json:dumps", "--nnodes", "2", "--min-np", "2"], "give either --min-np or torchrun's"),
        (["nothing:go"], "No module named 'nothing'"),
        (["json:nothing"], "has no attribute 'nothing'"),
        (["json:dumps", "--conf", "x"], "--conf must be NAME=VALUE, not 'x'"),
    ],
)
def test_a_mistake_is_named_before_anything_starts(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", *arguments]) == 2
    assert complaint in capsys.readouterr().err


def test_a_missing_script_is_all_that_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run"])
    assert capsys.readouterr().err.endswith("the following arguments are required: target\n")


@pytest.mark.parametrize("option", ["--epochs", "--check", "--event", "--b"])
def test_an_option_of_the_script_before_the_dashes_is_no_beginning_of_one_of_ours(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["run", "json:dumps", option, "3"])
    assert f"unrecognized arguments: {option} 3; the target's own options come after --" in capsys.readouterr().err


def test_the_place_of_the_driver_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(spark_elastic, "run", lambda call, **settings: given.update(settings) or [])
    assert main(["run", "--driver", "cluster", "json:dumps"]) == 0
    assert given["driver"] == "cluster"


# ---------------------------------------------------------------- scripts for torchrun


def environment() -> dict[str, str]:
    world = SimpleNamespace(rank=3, size=4, generation=2, me=Member(9, 3, 1, 2, 1, 2, None))
    return scripts.environment(world, scripts.Meeting("east", 2345, "west"), "abc", 3)  # type: ignore[arg-type]


def test_a_script_is_told_what_torchrun_tells() -> None:
    told = environment()
    names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR MASTER_PORT TORCHELASTIC_RESTART_COUNT"
    assert [told[name] for name in names.split()] == ["3", "4", "1", "2", "1", "east", "2345", "1"]


def test_a_worker_that_sees_one_gpu_is_the_first_of_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_ELASTIC_DEVICE", "cuda:0")
    told = environment()
    assert (told["LOCAL_RANK"], told["LOCAL_WORLD_SIZE"]) == ("0", "1")


def test_a_script_that_does_not_end_is_killed_with_what_it_has_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(scripts, "TERM_SECONDS", 0.1)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    text = (
        "import signal, subprocess, sys\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen(['sleep', '100'])\n"
        f"with open({str(pipe)!r}, 'w') as file: file.write(str(child.pid))\n"
        "child.wait()\n"
    )
    (tmp_path / "script.py").write_text(text)
    call = pickle.dumps(find_target(str(tmp_path / "script.py"), []))
    with scripts._running(call, {"PYTHONPATH": ":".join(sys.path)}) as (process, _):
        child = pipe.read_text()  # waits until the script has written it
    assert process.returncode == -9
    assert not Path("/proc", child).exists()


def test_the_url_of_a_spark_connect_server_is_no_master_that_needs_java(monkeypatch: pytest.MonkeyPatch) -> None:
    """Java was started with it, and said to be why Spark did not start."""
    made: list[str] = []
    builder = SparkSession.builder
    monkeypatch.setattr(type(builder), "remote", lambda self, url: made.append(url) or self)
    monkeypatch.setattr(type(builder), "getOrCreate", lambda self: "the session")
    assert make_session("sc://somewhere:15002", {}) == "the session"
    assert made == ["sc://somewhere:15002"]


def test_a_spark_connect_server_that_is_not_there_is_an_error_within_seconds(tmp_path: Path) -> None:
    """pyspark's own client tries for minutes to stop the session, and again when Python ends."""
    (script := tmp_path / "script.py").touch()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    command = [sys.executable, "-m", "spark_elastic.cli", "run", "--master", f"sc://127.0.0.1:{port}", str(script)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert f"no job can begin: the Spark Connect server at 127.0.0.1:{port} is gone" in ended.stderr


def test_a_client_of_spark_3_5_whose_server_is_gone_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its retries cannot be switched off. It does not tell the server that it stops."""

    class Session:
        is_stopped = False

        def stop(self) -> None:
            self.is_stopped = True

    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"127.0.0.1:{server.getsockname()[1]}"
    session: Any = Session()
    session.client = SimpleNamespace(_builder=SimpleNamespace(endpoint=endpoint))
    monkeypatch.setitem(sys.modules, "pyspark.sql.connect.session", SimpleNamespace(SparkSession=Session))  # type: ignore[arg-type]
    end_session(session)
    assert session.is_stopped


@pytest.mark.parametrize("command", [["run", "nothing.py"], ["doctor"]], ids=["run", "doctor"])
@pytest.mark.parametrize("other", [["--master", "local[2]"], ["--conf", "a=b"]], ids=["master", "conf"])
def test_local_and_settings_of_spark_are_refused_together(
    command: list[str], other: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--local", *other]) == 2
    assert "without Spark, so it cannot be given together with --master or --conf" in capsys.readouterr().err


def test_it_says_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert (ended.value.code, capsys.readouterr().out) == (0, f"spark-elastic {spark_elastic.__version__}\n")


def test_ctrl_c_during_the_imports_ends_the_process() -> None:
    """Torch swallowed the exception while it was imported, and the job ran as if nothing had happened."""
    code = (
        "import os, signal; from spark_elastic.cli.run import ending_at_ctrl_c\n"
        "with ending_at_ctrl_c():\n"
        "    try:\n"
        "        os.kill(os.getpid(), signal.SIGINT); signal.pause()\n"
        "    except BaseException: pass"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == -signal.SIGINT
    before = signal.getsignal(signal.SIGINT)
    with ending_at_ctrl_c():
        pass
    assert signal.getsignal(signal.SIGINT) is before
