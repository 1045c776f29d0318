from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from spark_elastic.task.process_setting import PRELOAD_VARIABLE, ProcessSetting, module_marks, package_marks


def test_it_has_what_a_child_inherits_besides_variables() -> None:
    """In a process of its own, because a niceness cannot be taken back; it may be as high as it can be already."""
    code = (
        "import os\nfrom spark_elastic.task.process_setting import ProcessSetting\n"
        "settings = [ProcessSetting.of_a_child({})]\n"
        "nicer = [lambda: os.nice(1)] if os.nice(0) < 19 else []\n"
        "for change in (*nicer, lambda: os.umask(0o070), lambda: os.umask(0o071)):\n"
        "    change()\n    settings.append(ProcessSetting.of_a_child({}))\n"
        "assert all(one != other and repr(one) != repr(other) for one, other in zip(settings, settings[1:])), settings\n"
        "assert ProcessSetting.of_a_child({}) == settings[-1]\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_same_variables_in_another_order_are_the_same_setting_in_the_same_words() -> None:
    one, other = (ProcessSetting.of_a_child(variables) for variables in ({"A": "1", "B": "2"}, {"B": "2", "A": "1"}))
    assert one == other
    assert repr(one) == repr(other)


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


def test_a_package_that_is_installed_into_a_folder_of_the_path_is_noticed(tmp_path: Path) -> None:
    """As ``pip install --target`` does, also for the first package of a folder, and again with the same version."""
    marks = [package_marks([str(tmp_path)])]
    (metadata := tmp_path / "torch-3.0.dist-info").mkdir()
    marks.append(package_marks([str(tmp_path)]))
    os.utime(metadata, ns=(1, 1))
    marks.append(package_marks([str(tmp_path)]))
    metadata.rename(tmp_path / "torch-3.1.dist-info")
    marks.append(package_marks([str(tmp_path)]))
    assert len(set(marks)) == 4
    (tmp_path / "module.py").touch()
    assert package_marks([str(tmp_path)]) == marks[-1]


def test_a_package_that_is_installed_into_the_working_directory_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = package_marks([""])
    (tmp_path / "torch.egg-info").touch()
    assert package_marks([""]) != before


@pytest.mark.parametrize(
    ("module", "changed"),
    [
        ("heavy", "heavy/__init__.py"),
        ("heavy", "heavy/models.py"),
        ("heavy.inner.models", "heavy/__init__.py"),
        ("heavy.inner.models", "heavy/inner/models.py"),
        ("namespace.inner", "namespace/inner/__init__.py"),
        ("single", "single.py"),
    ],
)
def test_a_module_to_import_ahead_whose_code_is_edited_is_noticed(
    module: str, changed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / changed
    file.parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / "heavy").mkdir(exist_ok=True)
    (tmp_path / "heavy" / "__init__.py").touch()
    file.write_text("VALUE = 1\n")
    before = module_marks([module])
    (file.parent / "notes.txt").touch()
    assert module_marks([module]) == before
    file.write_text("VALUE = 22222\n")
    assert module_marks([module]) != before


def test_links_that_lead_nowhere_and_hidden_files_leave_the_other_marks_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as the lock that Emacs makes beside a file while it is edited, and the metadata of a package that is gone."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "torch.egg-info").touch()
    (folder := tmp_path / "heavy").mkdir()
    (folder / "__init__.py").touch()
    before = package_marks([str(tmp_path)]), module_marks(["heavy"])
    assert all(before)
    (tmp_path / "gone.egg-info").symlink_to("nowhere")
    (folder / "gone.py").symlink_to("nowhere")
    (folder / ".#models.py").symlink_to("me@host.1:2")
    (folder / "._models.py").touch()
    assert (package_marks([str(tmp_path)]), module_marks(["heavy"])) == before


def test_a_module_file_that_vanishes_meanwhile_has_no_mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "single.py").touch()
    importlib.invalidate_caches()

    def vanishes(path: str) -> bool:
        Path(path).unlink()
        return True

    monkeypatch.setattr(os.path, "isfile", vanishes)
    assert module_marks(["single"]) == ()


def test_a_module_whose_finder_raises_has_no_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    class Finder:
        def find_spec(self, *arguments: object) -> None:
            raise RuntimeError("no network")

    monkeypatch.setattr(sys, "meta_path", [Finder()])
    assert module_marks(["heavy_of_a_finder"]) == ()


@pytest.mark.parametrize("module", ["nowhere.at.all", ".relative", "sys"])
def test_a_module_without_files_has_no_marks(module: str) -> None:
    assert module_marks([module]) == ()


def test_a_setting_has_the_marks_of_the_modules_that_its_environment_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "heavy.py").write_text("VALUE = 1\n")
    environment = {PRELOAD_VARIABLE: "torch, heavy"}
    before = ProcessSetting.of_a_child(environment)
    assert ProcessSetting.of_a_child(environment) == before
    (tmp_path / "heavy.py").write_text("VALUE = 22222\n")
    assert ProcessSetting.of_a_child(environment) != before
