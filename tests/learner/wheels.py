"""Packages made by tests, for pip to install without a network."""

import io
import tarfile
import zipfile
from pathlib import Path

SLOW = """
import os, pathlib, time
def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    pathlib.Path({started!r}).write_text(str(os.getpid()))
    time.sleep(600)
"""

DAEMON = """
import pathlib, shutil, subprocess
def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    outputs = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    daemon = subprocess.Popen(["sleep", "600"], start_new_session=True, **outputs)
    pathlib.Path({started!r}).write_text(str(daemon.pid))
    wheel = "{name}-1.0-py3-none-any.whl"
    shutil.copy(pathlib.Path({started!r}).with_name("built") / wheel, wheel_directory)
    return wheel
"""


def add_wheel(folder: Path, name: str, version: str, *, num_bytes: int = 0, source: str = "") -> None:
    """Add a wheel to ``folder`` whose only module has its version and ``source``, and a file of so many bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", f"version = {version!r}\n{source}")
        wheel.writestr(f"{name}_data.bin", b"x" * num_bytes)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


def add_slow_source(folder: Path, name: str, *, started: Path) -> None:
    """Add a source package that notes the process that builds it in ``started``, and takes ten minutes."""
    add_source(folder, name, SLOW.format(started=str(started)))


def add_source_with_daemon(folder: Path, name: str, *, started: Path) -> None:
    """Add a source package whose build starts a daemon, notes it in ``started``, and ends."""
    add_source(folder, name, DAEMON.format(started=str(started), name=name))


def add_source(folder: Path, name: str, backend: str) -> None:
    """Add a source package that is built by the code ``backend``."""
    folder.mkdir(parents=True, exist_ok=True)
    root = f"{name}-1.0"
    files = {
        "PKG-INFO": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        "pyproject.toml": '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n',
        "backend.py": backend,
    }
    with tarfile.open(folder / f"{root}.tar.gz", "w:gz") as archive:
        for path, content in files.items():
            member = tarfile.TarInfo(f"{root}/{path}")
            member.size = len(content.encode())
            archive.addfile(member, io.BytesIO(content.encode()))


def offline(folder: Path) -> dict[str, str]:
    """Return the variables by which pip installs from ``folder`` alone."""
    return {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder), "PIP_CONFIG_FILE": "/dev/null"}
