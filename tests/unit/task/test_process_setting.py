from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from spark_elastic.task.process_setting import package_marks


def test_it_has_what_a_child_inherits_besides_variables() -> None:
    """In a process of its own, because a niceness cannot be taken back."""
    code = (
        "import os\nfrom spark_elastic.task.process_setting import ProcessSetting\n"
        "settings = [ProcessSetting.of_a_child({})]\n"
        "for change in (lambda: os.nice(1), lambda: os.umask(0o070), lambda: os.umask(0o071)):\n"
        "    change()\n    settings.append(ProcessSetting.of_a_child({}))\n"
        "assert all(one != other for one, other in zip(settings, settings[1:])), settings\n"
        "assert ProcessSetting.of_a_child({}) == settings[-1]\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_packages_that_are_installed_and_archives_that_are_replaced_are_noticed_and_user_code_is_not(
    tmp_path: Path,
) -> None:
    packages, code, archive = tmp_path / "site-packages", tmp_path / "code", tmp_path / "code.zip"
    packages.mkdir()
    code.mkdir()
    archive.write_text("one")
    path = ["", "/nowhere", str(code), str(packages), str(archive)]
    before = package_marks(path)
    (code / "module.py").touch()
    assert package_marks(path) == before
    (packages / "torch-3.0.dist-info").mkdir()
    os.utime(packages, ns=(1, 1))  # the clock of file systems may stand still for milliseconds
    between = package_marks(path)
    assert between != before
    archive.write_text("three")
    assert package_marks(path) != between
