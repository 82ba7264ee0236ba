"""What may import what, read off the sources; and that ``import pushkv`` loads nothing heavy."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import pushkv

ROOT = Path(pushkv.__file__).parent
STANDARD = frozenset(sys.stdlib_module_names)
CORE_FORBIDDEN = {"threading", "socket", "time", "asyncio", "queue", "multiprocessing", "selectors", "datetime"}
HEAVY = {"torch", "zmq", "nixl", "nixl_cu12", "nixl_cu13"}


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """Each module that a file imports, and whether it does so at the top level."""
    tree = ast.parse(path.read_text())
    inner = {id(node) for outer in ast.walk(tree) if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef))
             for node in ast.walk(outer)}  # fmt: skip
    typing_only = {id(node) for outer in ast.walk(tree) if isinstance(outer, ast.If)
                   and isinstance(outer.test, ast.Name) and outer.test.id == "TYPE_CHECKING"
                   for node in ast.walk(outer)}  # fmt: skip
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, id(node) not in inner) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            assert node.module is not None
            yield node.module, id(node) not in inner


def files(folder: str) -> list[Path]:
    found = sorted((ROOT / folder).rglob("*.py"))
    assert found
    return found


def ours(module: str) -> str:
    """The folder of ours that a module lies in, or nothing."""
    parts = module.split(".")
    return "" if parts[0] != "pushkv" else parts[1] if len(parts) > 1 else "pushkv"


@pytest.mark.parametrize(
    ("folder", "third_party", "folders"),
    [
        ("core", {"numpy", "msgspec"}, {"core", "errors"}),
        ("backends", {"numpy", "msgspec", "torch", "triton"}, {"backends", "core", "errors", "hookspecs"}),
        ("transport", {"numpy", "msgspec"}, {"transport", "core", "errors"}),
        ("runtime", {"numpy", "msgspec", "zmq"}, {"runtime", "transport", "backends", "core", "errors", "config",
                                                  "cache", "trace"}),
    ],
)  # fmt: skip
def test_each_folder_imports_what_it_may(folder: str, third_party: set[str], folders: set[str]) -> None:
    for path in files(folder):
        for module, _ in imports(path):
            top = module.partition(".")[0]
            if top == "pushkv":
                assert ours(module) in folders, f"{path} imports {module}"
            else:
                assert top in STANDARD | third_party, f"{path} imports {module}"


def test_the_core_has_no_threads_sockets_or_clocks() -> None:
    for path in files("core"):
        for module, _ in imports(path):
            assert module.partition(".")[0] not in CORE_FORBIDDEN, f"{path} imports {module}"


def test_torch_is_imported_inside_functions_alone() -> None:
    for path in files("."):
        for module, top_level in imports(path):
            if module.partition(".")[0] == "torch":
                assert not top_level, f"{path} imports {module} when it is loaded"


def test_triton_is_one_modules_alone() -> None:
    found = [(path.name, module) for path in files(".") for module, _ in imports(path)]
    importing = {name for name, module in found if module.partition(".")[0] == "triton"}
    assert importing == {"row_kernel.py"}


def test_nixl_is_the_nixl_transports_alone() -> None:
    """It is found by name at run time, so that the names are looked for as well as the imports."""
    for path in files("."):
        names = {module.partition(".")[0] for module, _ in imports(path)}
        of_nixl = path.parent.name == "transport" and path.name.startswith("nixl")
        assert of_nixl or not names & {"nixl", "nixl_cu12", "nixl_cu13", "nixl_rocm"}, f"{path} imports nixl"
        constants = {node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)}
        assert of_nixl or not constants & {"nixl_cu12", "nixl_cu13", "nixl_rocm"}, f"{path} names nixl's module"


def test_zmq_is_the_runtimes_alone() -> None:
    for path in files("."):
        if path.parent.name not in ("runtime", "commands"):
            assert "zmq" not in {module.partition(".")[0] for module, _ in imports(path)}, f"{path} imports zmq"


def loaded(code: str) -> set[str]:
    script = f"import sys; {code}; print(' '.join({{name.partition('.')[0] for name in sys.modules}}))"
    return set(
        subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout.split()
    )


def test_import_pushkv_loads_nothing_heavy() -> None:
    assert not loaded("import pushkv") & {*HEAVY, "numpy", "msgspec", "pluggy"}
    assert (
        not loaded("from pushkv import EndpointConfig, KVCache, Limits, Outcome, prompt_digest, read_config") & HEAVY
    )
    assert not loaded("from pushkv import Ended, Released, StageEnded, StageReleased, Kind, shard, Trace") & HEAVY
    assert not loaded("from pushkv import Producer, Consumer") & (HEAVY - {"zmq"})


def test_every_public_name_is_there() -> None:
    for name in pushkv.__all__:
        assert getattr(pushkv, name).__name__ == name
    with pytest.raises(AttributeError, match="has no attribute 'Produzer'"):
        pushkv.Produzer  # noqa: B018


def test_a_missing_nixl_says_how_to_get_it() -> None:
    """Whatever is installed here: the import of all its modules is blocked."""
    code = """
import importlib.util, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name.startswith("nixl") else find(name, *more)
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0].startswith("nixl"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocked())
import threading
import numpy as np
from pushkv import EndpointConfig, KVCache, Producer
from pushkv.errors import TransportUnavailable
try:
    Producer(EndpointConfig(engine="p"), KVCache.of(np.zeros((1, 4, 4, 8), np.float32), "LBNC"))
except TransportUnavailable as error:
    print(error)
print(threading.active_count(), "thread")
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    text, threads = done.stdout.splitlines()
    assert "pip install" in text
    assert "nixl" in text
    assert threads == "1 thread"
