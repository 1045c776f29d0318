"""What run calls in the workers is found, travels, and is called as by Python itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from spark_elastic.cli.script import find_target


def called(target: Any) -> subprocess.CompletedProcess[str]:
    """Call what travels in a fresh interpreter."""
    program = "import pickle, sys; pickle.load(sys.stdin.buffer)()"
    done = subprocess.run([sys.executable, "-c", program], input=cloudpickle.dumps(target), capture_output=True)
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


def test_a_script_runs_as_main_with_its_arguments_and_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("value = 7\n")
    script = tmp_path / "script.py"
    script.write_text("import sys, beside\nif __name__ == '__main__':\n    print(sys.argv, __file__, beside.value)\n")
    done = called(find_target(str(script), ["--a", "b"]))
    assert done.stdout == f"['{script}', '--a', 'b'] {script} 7\n"


def test_annotations_of_a_script_are_what_python_makes_of_them(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("def f(x: int): pass\nprint(f.__annotations__['x'] is int)\n")
    assert called(find_target(str(tmp_path / "script.py"), [])).stdout == "True\n"


def test_a_script_that_is_no_python_is_refused_by_its_line_before_anything_starts(tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text("x = 1\nif x\n")
    with pytest.raises(ValueError, match=r"broken\.py, line 2: SyntaxError: expected ':'"):
        find_target(str(script), [])


@pytest.mark.parametrize("text", ["raise KeyError('x')", "def broken(:"])
def test_a_module_that_raises_when_it_is_imported_is_named_with_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    (tmp_path / "raising_module.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"'raising_module:go' cannot be imported: (KeyError|SyntaxError): "):
        find_target("raising_module:go", [])


def test_what_is_no_function_is_refused_before_anything_starts() -> None:
    with pytest.raises(ValueError, match=r"'math:pi' is no function, but 3\.14"):
        find_target("math:pi", [])


def test_a_module_runs_as_main_from_the_folder_of_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "train.py").write_text("import sys\nif __name__ == '__main__':\n    print(sys.argv[1:])\n")
    monkeypatch.chdir(tmp_path)
    target = find_target("package.train", ["a"], is_module=True)
    monkeypatch.chdir("/")
    assert called(target).stdout == "['a']\n"
    with pytest.raises(ValueError, match=r"module 'package\.nothing' does not exist"):
        find_target("package.nothing", [], is_module=True)


def test_relative_paths_are_those_of_the_command_or_a_line_says_that_they_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "script.py").write_text("import os\nprint(os.getcwd())\n")
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "there")
    target = find_target(str(tmp_path / "script.py"), [])
    monkeypatch.chdir("/")
    done = called(target)
    assert (done.stdout, done.stderr) == (f"{tmp_path / 'there'}\n", "")
    (tmp_path / "there").rmdir()
    done = called(target)
    assert done.stdout == "/\n"
    assert f"{tmp_path / 'there'}, where the command was given, cannot be entered on" in done.stderr
    assert "so relative paths are in / there" in done.stderr
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert called(target).stderr == ""


@pytest.mark.parametrize(("end", "status"), [("sys.exit()", 0), ("sys.exit(0)", 0), ("sys.exit(3)", 3), ("1/0", 1)])
def test_a_script_ends_as_it_says(end: str, status: int, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(f"import sys\n{end}\n")
    assert called(find_target(str(tmp_path / "script.py"), [])).returncode == status


def test_a_function_travels_to_where_its_module_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text("import sys\ndef go():\n    print('went', sys.argv)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    target = find_target("mine:go", ["x"])
    monkeypatch.chdir("/")
    assert called(target).stdout == "went ['mine:go', 'x']\n"
