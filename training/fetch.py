"""Fetches packages by name through the registries' ordinary clients and unpacks them.

Network use ends here: everything after works on the unpacked files.
"""

import hashlib
import shutil
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from .sources import Source


@dataclass(frozen=True, slots=True)
class Package:
    """A fetched archive: where it is, where it was unpacked, and what identifies it (bytes, sha256, version)."""

    source: Source
    archive: Path
    root: Path
    version: str
    archive_bytes: int
    sha256: str


def fetch(source: Source, cache: Path) -> Package:
    """Downloads (unless cached) and unpacks one source's package under ``cache``."""
    home = cache / source.registry / source.name
    archives, root = home / "archive", home / "root"
    archives.mkdir(parents=True, exist_ok=True)
    found = sorted(p for p in archives.iterdir() if p.suffix in {".deb", ".whl", ".tgz", ".gz"})
    if not found:
        _COMMANDS[source.registry](source.package, archives)
        found = sorted(archives.iterdir())
    if len(found) != 1:
        raise RuntimeError(f"{source.package}: wanted one archive in {archives}, got {[p.name for p in found]}")
    archive = found[0]
    if not root.exists():
        staging = home / "staging"
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir()
        _unpack(archive, staging)
        staging.rename(root)
    data = archive.read_bytes()
    return Package(source, archive, root, _version(archive), len(data), hashlib.sha256(data).hexdigest())


def _apt(package: str, folder: Path) -> None:
    subprocess.run(["apt-get", "download", package], cwd=folder, check=True, stdout=subprocess.DEVNULL)


def _pip(package: str, folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(folder), package]
    subprocess.run(command, check=True)


def _npm(package: str, folder: Path) -> None:
    subprocess.run(["npm", "pack", "--silent", package], cwd=folder, check=True, stdout=subprocess.DEVNULL)


_COMMANDS = {"deb": _apt, "pypi": _pip, "npm": _npm}


def _unpack(archive: Path, folder: Path) -> None:
    if archive.suffix == ".deb":
        subprocess.run(["dpkg-deb", "-x", str(archive), str(folder)], check=True)
    elif archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as z:
            z.extractall(folder)
    else:
        with tarfile.open(archive) as t:
            t.extractall(folder, filter="data")


def _version(archive: Path) -> str:
    """Version as the registry writes it, read from the archive's name."""
    name = archive.name.replace("%3a", ":")
    if archive.suffix == ".deb":
        return name.split("_")[1]
    if archive.suffix == ".whl":
        return name.split("-")[1]
    return name.removesuffix(".tgz").rsplit("-", 1)[1]
