"""Does what a user does: installs the built wheel into a fresh environment outside the tree, and runs what the pages show.

The wheel is built from the sdist. README.md's examples run as scripts (started by the full path of the environment's Python,
which nobody has activated), by spark-submit, and in a notebook; the pages' other examples run as scripts, where they are
complete, or are after README.md's first one.

    make wheel-test                    # with the newest releases that pyproject.toml admits
    make wheel-test LOWEST=--lowest    # with the oldest

torch is the one of constraints.txt in both, because each release brings gigabytes.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
# With those that `ml` brings, because the lower bounds of an extra count only if it is named.
EXTRAS = "ml,data,spark,connect,images,pictures,tensorboard,mlflow,keras"
LIMIT_SECONDS = 300
# What stands before an example that is complete only after README.md's first one.
KNOWN = frozenset({"train_fn", "se", "spark_elastic", "torch"})
# Pages' places that exist on none of our machines.
ELSEWHERE = ("sc://", "s3://", "/dbfs/", "hdfs://", "abfss://")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lowest", action="store_true", help="install the oldest releases that are admitted")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="wheel-test-") as name:
        folder = Path(name)
        wheel = build(folder / "dist")
        python = install(wheel, folder / "environment", lowest=options.lowest)
        failed = [label for label, done in try_all(python, folder / "elsewhere") if not done]
    print(f"{len(failed)} failed" + "".join(f"\n  {label}" for label in failed))
    return bool(failed)


# ---------------------------------------------------------------- build and install


def build(folder: Path) -> Path:
    """Build the sdist, and the wheel from it; return the wheel."""
    python = environment_at(folder.parent / "builder")
    call(python, "-m", "pip", "install", "--quiet", "build")
    call(python, "-m", "build", "--outdir", str(folder), str(ROOT))
    (wheel,) = folder.glob("*.whl")
    assert list(folder.glob("*.tar.gz"))
    return wheel


def install(wheel: Path, folder: Path, lowest: bool) -> Path:
    """Install the wheel with its extras; return the environment's Python."""
    python = environment_at(folder)
    torch = next(line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch=="))
    call(python, "-m", "pip", "install", "--quiet", "--no-deps", str(wheel))
    program = "import importlib.metadata as m; print(*m.requires('spark-elastic'), sep='\\n')"
    # Optuna brings SQLAlchemy, of whose releases from 2.1 on MLflow's before 3.10 know nothing.
    old = [*lower_bounds(output(python, "-c", program).splitlines()), "sqlalchemy<2.1"] if lowest else []
    constraints = [torch, *old]
    path = folder / "constraints.txt"
    path.write_text("\n".join(constraints))
    wanted = [f"{wheel}[{EXTRAS}]", "nbconvert", "ipykernel", "ipywidgets", "lightning", "optuna"]
    call(python, "-m", "pip", "install", "--quiet", "--constraint", str(path), *wanted)
    call(python, "-m", "pip", "check")
    call(python, "-m", "pip", "freeze")
    return python


def lower_bounds(requirements: Iterable[str]) -> Iterator[str]:
    """Turn the lower bound of each requirement into the one version that is admitted."""
    for requirement in requirements:
        found = re.match(r"([\w.-]+)(?:\[[\w,]+\])?[^;]*?>=([\w.]+)", requirement)
        extra = re.search(r"extra == ['\"](\w+)", requirement)
        if found is not None and found[1] != "torch" and (extra is None or extra[1] in EXTRAS.split(",")):
            yield f"{found[1]}=={found[2]}"


def environment_at(folder: Path) -> Path:
    call(Path(sys.executable), "-m", "venv", str(folder))
    return folder / "bin" / "python"


# ---------------------------------------------------------------- run


def try_all(python: Path, folder: Path) -> Iterator[tuple[str, bool]]:
    """Run all examples, each from a folder of its own that is outside the tree; yield whether each has ended well."""
    folder.mkdir()
    for label, code, is_readme in examples():
        ways = ("script", "spark-submit", "notebook") if is_readme else ("script",)
        for way in ways:
            place = Path(tempfile.mkdtemp(dir=folder))
            begun = time.monotonic()
            done = start(way, python, code, place)
            is_good = done.returncode == 0
            print(f"{'ok    ' if is_good else 'FAILED'} {label} as {way}, {time.monotonic() - begun:.0f} s", flush=True)
            if not is_good:
                print(textwrap.indent((done.stdout + done.stderr)[-5000:], "    "), flush=True)
            yield f"{label} as {way}", is_good


def start(way: str, python: Path, code: str, place: Path) -> subprocess.CompletedProcess[str]:
    bin_folder = python.parent
    environment = outside()
    if way != "script":  # these are found on the path, as by those who have activated the environment
        environment["PATH"] = f"{bin_folder}{os.pathsep}{environment['PATH']}"
    if way == "notebook":
        cell = {"cell_type": "code", "metadata": {}, "outputs": [], "execution_count": None, "source": code}
        kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
        notebook = {"nbformat": 4, "nbformat_minor": 4, "metadata": kernel, "cells": [cell]}
        (place / "example.ipynb").write_text(json.dumps(notebook))
        convert = [str(bin_folder / "jupyter"), "nbconvert", "--to", "notebook", "--execute", "--output", "done"]
        command = [*convert, f"--ExecutePreprocessor.timeout={LIMIT_SECONDS}", "example.ipynb"]
    else:
        (place / "example.py").write_text(code)
        command = [str(python if way == "script" else bin_folder / way), "example.py"]
    return subprocess.run(
        command, cwd=place, env=environment, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False
    )


def outside() -> dict[str, str]:
    """The environment of somebody who has not activated anything and set nothing for Spark."""
    hidden = ("PYSPARK_", "SPARK_", "PYTHON", "VIRTUAL_ENV")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    own = str(Path(sys.executable).parent)
    return kept | {"PATH": os.pathsep.join(part for part in kept["PATH"].split(os.pathsep) if part != own)}


# ---------------------------------------------------------------- examples


def examples() -> Iterator[tuple[str, str, bool]]:
    """Yield where each example that can run stands, its code, and whether README.md has it."""
    readme, *pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    blocks = list(blocks_of(readme))
    for line, code in blocks:
        yield f"README.md:{line}", code, True
    first = blocks[0][1].partition("\nlosses = ")[0]
    for page in pages:
        for line, code in blocks_of(page):
            missing = missing_names(code)
            if "run(" in code and missing <= KNOWN and not any(place in code for place in ELSEWHERE):
                before = f"import spark_elastic\n{first}\n\n" if missing else ""
                yield f"{page.relative_to(ROOT)}:{line}", before + code, False


def blocks_of(page: Path) -> Iterator[tuple[int, str]]:
    text = page.read_text(encoding="utf-8")
    for block in re.finditer(r"^( *)```python\n(.*?)^\1```", text, re.DOTALL | re.MULTILINE):
        yield text[: block.start()].count("\n") + 2, textwrap.dedent(block[2])


def missing_names(code: str) -> set[str]:
    """Return the names that code uses and neither binds nor imports."""
    nodes = list(ast.walk(ast.parse(code)))
    names = [node for node in nodes if isinstance(node, ast.Name)]
    bound = {node.id for node in names if not isinstance(node.ctx, ast.Load)}
    bound |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    bound |= {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    imports = [alias for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom)) for alias in node.names]
    bound |= {(alias.asname or alias.name).partition(".")[0] for alias in imports}
    return (
        {node.id for node in names if isinstance(node.ctx, ast.Load)} - bound - {*dir(builtins), "__name__", "__file__"}
    )


# ---------------------------------------------------------------- small things


def call(python: Path, *arguments: str, env: Mapping[str, str] | None = None) -> None:
    print("$", python.name, *arguments, flush=True)
    subprocess.run([str(python), *arguments], check=True, cwd=tempfile.gettempdir(), env=env)


def output(python: Path, *arguments: str) -> str:
    done = subprocess.run(
        [str(python), *arguments], check=True, cwd=tempfile.gettempdir(), stdout=subprocess.PIPE, text=True
    )
    return done.stdout


if __name__ == "__main__":
    if shutil.which("java") is None and "JAVA_HOME" not in os.environ:
        sys.exit("the examples need Java for Spark")
    sys.exit(main())
