"""NIXL's LIBFABRIC backend on a machine without a GPU and without EFA: what it takes, put into a folder.

    python tests/faults/libfabric.py FOLDER

NIXL 1.4.1's plug-in asks for symbol version FABRIC_1.7 of libfabric; 1.5.1's asks for one that no release has yet.
libfabric comes out of the wheel `mpich`, libhwloc out of Debian's package, and libcuda and libcudart are stubs that
say that there is no GPU. The provider is tcp, so no accelerator memory; the code path is the one that EFA takes.
"""

from __future__ import annotations

import glob
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

NIXL, MPICH, HWLOC = "nixl-cu12==1.4.1", "mpich==5.0.2", "libhwloc15"

STUBS = {
    "libcuda.so.1": """
        int cuCtxSetCurrent(void *context) { return 100; }
        int cuDeviceGetPCIBusId(char *id, int length, int device) { return 100; }
        int cuPointerGetAttributes(unsigned count, void *attributes, void **data, unsigned long long pointer)
        { return 1; }
    """,
    "libcudart.so.12": """
        int cudaSetDevice(int device) { return 100; }
        const char *cudaGetErrorString(int error) { return "there is no GPU"; }
    """,
}
"""Library by source. 100 is CUDA's own code for "no device", 1 for "no pointer of mine"."""


def build(folder: Path) -> None:
    """Fill the folder, unless it is complete. Raises CalledProcessError where something cannot be had."""
    if (folder / "complete").exists():
        return
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "lib").mkdir(parents=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--quiet", "--no-deps", "--target", str(folder / "site"), NIXL], check=True)
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run([*pip, "download", "--quiet", "--no-deps", "--dest", scratch, MPICH], check=True)
        _libfabric(Path(glob.glob(f"{scratch}/mpich-*.whl")[0]), folder / "lib")
        _hwloc(Path(scratch), folder / "lib")
        for name, source in STUBS.items():
            _stub(Path(scratch), folder / "lib" / name, source)
    (folder / "complete").touch()


def _libfabric(wheel: Path, into: Path) -> None:
    with zipfile.ZipFile(wheel) as files:
        (name,) = (one for one in files.namelist() if one.endswith("/libfabric.so.1"))
        (into / "libfabric.so.1").write_bytes(files.read(name))


def _hwloc(scratch: Path, into: Path) -> None:
    download = ["apt-get", "--quiet", "--quiet", "download", HWLOC]
    if subprocess.run(download, cwd=scratch, capture_output=True, check=False).returncode:
        subprocess.run(["apt-get", "--quiet", "--quiet", "update"], check=True)
        subprocess.run(download, cwd=scratch, check=True)
    (package,) = scratch.glob(f"{HWLOC}_*.deb")
    subprocess.run(["dpkg-deb", "--extract", str(package), str(scratch / "hwloc")], check=True)
    (library,) = (scratch / "hwloc").glob("usr/lib/*/libhwloc.so.15")
    shutil.copy(library, into / library.name)


def _stub(scratch: Path, library: Path, source: str) -> None:
    """Compile one, with the symbol version that NIXL asks of it, which is its own name."""
    (scratch / "stub.c").write_text(source)
    (scratch / "stub.map").write_text(f"{library.name} {{ global: *; }};")
    version = f"-Wl,-soname,{library.name},--version-script,{scratch / 'stub.map'}"
    command = [os.environ.get("CC", "cc"), "-shared", "-fPIC", version, "-o", str(library), str(scratch / "stub.c")]
    subprocess.run(command, check=True)


if __name__ == "__main__":
    build(Path(sys.argv[1]))
