"""Environments of Python that have the packages of this one but for some."""

from __future__ import annotations

import sysconfig
import venv
from pathlib import Path


def environment_without(folder: Path, *prefixes: str) -> tuple[str, Path]:
    """Make one there, without what begins so in site-packages. Return its Python and its own site-packages."""
    venv.create(folder, symlinks=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    for package in Path(sysconfig.get_path("purelib")).iterdir():
        if not package.name.startswith(prefixes):
            (packages / package.name).symlink_to(package)
    return f"{folder}/bin/python", packages
