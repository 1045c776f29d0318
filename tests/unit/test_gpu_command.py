"""``make gpu`` on machines that have no GPU, and what it makes of phases that fail or hang. Its tests are in tests/gpu."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def command() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "benchmarks" / "gpu.py"))


def test_without_a_gpu_it_says_so_and_ends_well_before_anything_is_started(
    command: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(command["glob"], "glob", lambda pattern: [])
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **settings: pytest.fail("something was started"))
    assert command["main"]() == 0
    assert "no GPU" in capsys.readouterr().out


def test_a_phase_that_there_is_not_is_refused(
    command: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """It would run nothing, and say that all has passed."""
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--device", "cpu", "--phases", "tests,step"])
    with pytest.raises(SystemExit) as ended:
        command["main"]()
    assert ended.value.code == 2
    assert "there is no phase step; there are tests" in capsys.readouterr().err


def test_torch_which_takes_seconds_is_not_imported_by_the_command_itself() -> None:
    code = "import runpy, sys; runpy.run_path(sys.argv[1]); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code, str(ROOT / "benchmarks" / "gpu.py")]).returncode == 0


def test_a_python_that_lacks_packages_is_told_which_and_how_to_bring_them(
    command: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setitem(command["PACKAGES"], "no_such_package", "no-such-package")
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--device", "cpu"])
    assert command["main"]() == 2
    assert "lacks no-such-package. Install them, or give WHEELS=folder" in capsys.readouterr().out


def test_what_the_folder_of_wheels_has_is_found_by_all_phases_and_by_nobody_else(
    command: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "wheels").mkdir()
    wheel = tmp_path / "wheels" / "brought_along-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("brought_along.py", "")
        archive.writestr(
            "brought_along-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: brought-along\nVersion: 1.0\n"
        )
        archive.writestr(
            "brought_along-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("brought_along-1.0.dist-info/RECORD", "")
    monkeypatch.setitem(command["PACKAGES"], "brought_along", "brought-along")
    monkeypatch.setattr(sys, "path", [*sys.path])
    environment = command["make_environment"](tmp_path, str(tmp_path / "wheels"))
    ask = [sys.executable, "-c", "import brought_along"]
    assert subprocess.run(ask, env=environment).returncode == 0
    assert subprocess.run(ask, stderr=subprocess.DEVNULL).returncode != 0


def test_a_phase_that_hangs_is_killed_at_its_limit_and_one_that_fails_is_told_from_one_that_passes(
    command: dict[str, Any],
) -> None:
    started = time.monotonic()
    assert command["run_command"](["sleep", "60"], 0.2, os.environ) is None
    assert time.monotonic() - started < 30
    assert [command["run_command"]([name], 10, os.environ) for name in ("true", "false")] == [0, 1]


def test_tests_that_failed_are_named(command: dict[str, Any], tmp_path: Path) -> None:
    told = tmp_path / "told.xml"
    cases = '<testcase name="a"/><testcase name="b"><failure message="no"/></testcase>'
    cases += '<testcase name="c"><skipped message="needs CUDA"/></testcase><testcase name="d"><error message="x"/></testcase>'
    told.write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    assert command["read_tests"](told) == {"tests": 1, "failed": ["b", "d"], "skipped": ["c: needs CUDA"]}
