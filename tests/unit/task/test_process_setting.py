from __future__ import annotations

import os
from pathlib import Path

from spark_elastic.task.process_setting import package_marks


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
