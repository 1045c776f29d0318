"""GPUs: everything that only a machine with one can show, in one command and within eight minutes.

    make gpu [PYTHON=python3] [DEVICE=cpu] [WHEELS=folder] [REPORT=gpu.json]
    python benchmarks/gpu.py [--device cuda|cpu] [--wheels folder] [--report gpu.json] [--seconds 470] [--phases tests,commit]

It takes a plain copy of the repository and the Python that it is started with, whose torch knows CUDA; neither Java nor Spark nor
a network. First come the tests of tests/gpu, then the figures of gpu_figures.py, each phase in a process of its own with a
limit of its own. It prints a table and a line of JSON, which ``--report`` also writes into a file, and ends with 0 only if every
phase has passed.

Without a GPU it says so and ends with 0 at once. ``--device cpu`` plays all of it on the CPU, at small sizes: that shows that the
command works, and its figures say nothing about GPUs.
"""

from __future__ import annotations

import argparse
import contextlib
import glob
import importlib.util
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Nothing here imports torch: that takes seconds, and this has to say at once that there is no GPU.
ROOT = Path(__file__).resolve().parents[1]
SECONDS = 470.0
# How much longer everything may take where a CPU of two cores stands in.
CPU_PACE = 2.0
# How long a phase that is over its limit may still take to tell what it has found.
LAST_WORDS = 10.0
# Modules, and the distributions that bring them; cryptography needs the last one.
PACKAGES = {
    "torch": "torch",
    "numpy": "numpy",
    "cloudpickle": "cloudpickle",
    "cryptography": "cryptography",
    "msgspec": "msgspec",
    "psutil": "psutil",
    "tqdm": "tqdm",
    "pyarrow": "pyarrow",
    "fsspec": "fsspec",
    "pytest": "pytest",
    "pytest_timeout": "pytest-timeout",
    "_cffi_backend": "cffi",
}
ABOUT_TORCH = """
import json, torch
from torch.cuda import nccl
gpus = [torch.cuda.get_device_name(gpu) for gpu in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
built = bool(gpus) and torch.distributed.is_nccl_available()
print(json.dumps({
    "torch": torch.__version__, "cuda": torch.version.cuda, "gpus": gpus,
    "nccl": ".".join(map(str, nccl.version())) if built else None,
}))
"""


@dataclass(frozen=True)
class Phase:
    """A part of the command: the seconds that it may take, and whether it has tests or figures."""

    name: str
    limit: float
    is_tests: bool = False


PHASES = (
    Phase("tests", 300.0, is_tests=True),
    Phase("steps", 110.0),
    Phase("loss", 45.0),
    Phase("join", 45.0),
    Phase("loader", 30.0),
    Phase("fit", 30.0),
    Phase("commit", 50.0),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--wheels", help="install the wheels of this folder for the command, if this Python lacks any package"
    )
    parser.add_argument("--report", help="write the JSON into this file, too")
    parser.add_argument("--seconds", type=float, help="how long all phases together may take")
    parser.add_argument("--phases", default=",".join(phase.name for phase in PHASES))
    options = parser.parse_args()
    names = options.phases.split(",")
    if unknown := sorted(set(names) - {phase.name for phase in PHASES}):
        parser.error(f"there is no phase {', '.join(unknown)}; there are {', '.join(phase.name for phase in PHASES)}")
    started = time.monotonic()
    pace = 1.0 if options.device == "cuda" else CPU_PACE
    seconds = options.seconds or pace * SECONDS
    if options.device == "cuda" and not has_gpu():
        print(
            "no GPU: this machine has no /dev/nvidia0, and no nvidia-smi that knows one. Nothing was run; DEVICE=cpu plays it"
        )
        return 0
    with tempfile.TemporaryDirectory(prefix="spark_elastic-gpu-") as folder:
        environment = make_environment(Path(folder), options.wheels)
        if environment is None:
            return 2
        machine = look_at(environment)
        if machine is None or (options.device == "cuda" and not machine["gpus"]):
            print(f"there is a GPU, but the torch of {sys.executable} cannot use it: {machine}. Set PYTHON=…")
            return 2
        print(f"{options.device} on {json.dumps(machine)}", flush=True)
        results: dict[str, Any] = {}
        for phase in (phase for phase in PHASES if phase.name in names):
            limit = min(pace * phase.limit, seconds - (time.monotonic() - started))
            results[phase.name] = run_phase(phase, options.device, limit, Path(folder), environment)
        passed = all(result["passed"] for result in results.values())
        print_table(results)
        report = {
            "benchmark": "gpu",
            "device": options.device,
            "machine": machine,
            "passed": passed,
            "seconds": round(time.monotonic() - started, 1),
            "phases": results,
        }
        text = json.dumps(report)
        if options.report:
            Path(options.report).write_text(text + "\n", encoding="utf-8")
        print(text)
    return 0 if passed else 1


# ---------------------------------------------------------------- what there is


def has_gpu() -> bool:
    """Whether this machine has an NVIDIA GPU, found without torch."""
    if glob.glob("/dev/nvidia[0-9]*"):
        return True
    command = shutil.which("nvidia-smi")
    if command is None:
        return False
    try:
        done = subprocess.run([command, "-L"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0 and "GPU " in done.stdout


def make_environment(folder: Path, wheels: str | None) -> dict[str, str] | None:
    """Return the environment of all phases, in which every package can be imported; None, having said why, if one cannot be."""
    paths = [str(ROOT)]
    lacking = find_lacking()
    if lacking and wheels:
        target = folder / "packages"
        found = sorted(map(str, Path(wheels).glob("*.whl")))
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-index",
            "--no-deps",
            "--target",
            str(target),
        ]
        if found and subprocess.run([*command, *found]).returncode != 0:
            return None
        sys.path.append(str(target))
        importlib.invalidate_caches()
        paths.append(str(target))
        lacking = find_lacking()
    if lacking:
        missing = ", ".join(PACKAGES[name] for name in lacking)
        print(
            f"{sys.executable} ({platform.python_version()}) lacks {missing}. Install them, or give WHEELS=folder with their "
            "wheels (pip download --no-deps --only-binary=:all: --python-version … --dest folder …); PYTHON=… takes another"
        )
        return None
    inherited = os.environ.get("PYTHONPATH")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*paths, *([inherited] if inherited else [])])}
    return {**environment, "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}


def find_lacking() -> list[str]:
    """Return the modules that cannot be found, without importing any."""
    return [name for name in PACKAGES if importlib.util.find_spec(name) is None]


def look_at(environment: Mapping[str, str]) -> dict[str, Any] | None:
    """Return what this machine has; None if torch cannot be imported."""
    done = subprocess.run([sys.executable, "-c", ABOUT_TORCH], env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        print(done.stderr)
        return None
    about: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {
        **about,
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "kernel": platform.release(),
    }


# ---------------------------------------------------------------- phases


def run_phase(phase: Phase, device: str, limit: float, folder: Path, environment: Mapping[str, str]) -> dict[str, Any]:
    """Run a phase to its end, or to its limit. Return whether it has passed, its seconds, and its tests or figures."""
    if limit <= 0:
        return {"passed": False, "seconds": 0.0, "error": "no time was left"}
    print(f"--- {phase.name}, at most {limit:.0f} s", flush=True)
    told = folder / f"{phase.name}.told"
    command = [sys.executable, "benchmarks/gpu_figures.py", phase.name, "--device", device, "--out", str(told)]
    if phase.is_tests:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu", "--on", device]
        command += ["--timeout", "60", *side_by_side()]
        command += ["--junitxml", str(told), "--durations", "15"]
    started = time.monotonic()
    code = run_command(command, limit, environment)
    result: dict[str, Any] = {"passed": code == 0, "seconds": round(time.monotonic() - started, 1)}
    if code is None:
        result["error"] = f"it was not done within {limit:.0f} s"
    elif code != 0:
        result["error"] = f"exit code {code}"
    if told.exists():
        result |= read_tests(told) if phase.is_tests else {"figures": json.loads(told.read_text(encoding="utf-8"))}
    return result


def side_by_side() -> list[str]:
    """Return the options with which tests run side by side, where pytest-xdist is installed and there are cores for it."""
    processes = min(8, len(os.sched_getaffinity(0)) // 2)
    return ["-n", str(processes)] if processes > 2 and importlib.util.find_spec("xdist") else []


def run_command(command: Sequence[str], limit: float, environment: Mapping[str, str]) -> int | None:
    """Run a command from the repository's folder; return its exit code, or None if it was killed at its limit."""
    process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)  # on which pytest tells what has failed until now
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(LAST_WORDS)
        return None
    finally:
        # Workers have sessions of their own, but end with the process that has started them.
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def read_tests(path: Path) -> dict[str, Any]:
    """Return what pytest has written: how many tests passed, and the names of those that did not."""
    ended: dict[str, list[str]] = {"passed": [], "failure": [], "error": [], "skipped": []}
    for case in ElementTree.parse(path).iter("testcase"):
        name = case.get("name", "")
        outcome = next((child for child in case if child.tag in ended), None)
        reason = "" if outcome is None or outcome.tag != "skipped" else f": {outcome.get('message')}"
        ended["passed" if outcome is None else outcome.tag].append(name + reason)
    return {"tests": len(ended["passed"]), "failed": ended["failure"] + ended["error"], "skipped": ended["skipped"]}


# ---------------------------------------------------------------- what is printed


def print_table(results: Mapping[str, Mapping[str, Any]]) -> None:
    """Print a line for each phase and each figure, with its goal."""
    rows = [("phase", "what", "measured", "goal"), *table_rows(results)]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def table_rows(results: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str, str, str]]:
    for name, result in results.items():
        outcome = "passed" if result["passed"] else f"FAILED: {result.get('error', '')}"
        yield name, outcome, f"{result['seconds']:.0f} s", ""
        if "tests" in result:
            yield "", "tests passed", str(result["tests"]), ""
            for test in result["failed"]:
                yield "", f"FAILED {test}", "", ""
            for test in result["skipped"]:
                yield "", f"skipped {test}", "", ""
        for figure, value in result.get("figures", {}).items():
            yield "", figure, value["text"], value.get("wanted", "")


if __name__ == "__main__":
    sys.exit(main())
