"""The machine around the device: its file system, environment, packages and libraries, as a backend sees them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pushkv.backends.machine import AMAZON, NVIDIA, Machine
from pushkv.testing.neuron.nrt import FakeNrt

TRN1, TRN2, INF2 = 0x7164, 0x7364, 0x7264
EFA = 0xEFA3
_OTHER, _NETWORK, _GPU = 0x088000, 0x020000, 0x030200
LIBRARIES = ("libcuda.so.1", "libcudart.so.12", "libhwloc.so.15", "libfabric.so.1")
"""What NIXL's LIBFABRIC plug-in is linked with."""


@dataclass
class FakeHost:
    """A host that is described under ``root``, an empty folder. Start from :meth:`trn2` or :meth:`gpus`."""

    root: Path
    environ: dict[str, str] = field(default_factory=dict)
    packages: dict[str, str] = field(default_factory=dict)
    modules: set[str] = field(default_factory=set)
    libraries: set[str] = field(default_factory=lambda: set(LIBRARIES))
    nic_beside_the_chip: str = ""
    libnrt: Any = None
    provided: dict[str, Any] = field(default_factory=dict)
    """Libraries with functions of the test's own."""
    mapped: list[str] = field(default_factory=list)
    """Files that this process has mapped."""

    @classmethod
    def trn2(cls, root: Path, chips: int = 2, nics: int = 2) -> FakeHost:
        """A Trn2 instance, set up as vLLM-Neuron's worker leaves it; without ``nics`` it is a trn2.3xlarge."""
        host = cls(root)
        for chip in range(chips):
            host.add_pci(f"0000:{0x90 + chip:02x}:1e.0", AMAZON, TRN2, _OTHER)
        for nic in range(nics):
            host.add_nic(f"rdmap{nic}s0", f"0000:{0xA0 + nic:02x}:1a.0")
        host.nic_beside_the_chip = "0000:a0:1a.0" if nics else ""
        host.environ.update(NEURON_RT_MAP_HBM="1", FI_EFA_USE_DEVICE_RDMA="1", FI_EFA_ENABLE_SHM_TRANSFER="0")
        host.packages.update({"nixl-cu12": "1.5.1"})
        host.show_maps(None)
        return host

    @classmethod
    def gpus(cls, root: Path, nics: int = 0) -> FakeHost:
        """A host with two NVIDIA GPUs and so many RDMA NICs of another maker than Amazon."""
        host = cls(root)
        host.add_nvidia_gpu()
        host.add_pci("0000:02:00.0", NVIDIA, 0x2330, _GPU)
        for nic in range(nics):
            host.add_nic(f"mlx5_{nic}", f"0000:{0x50 + nic:02x}:00.0", vendor=0x15B3, device=0x1021)
        host.packages.update({"nixl-cu12": "1.5.1"})
        host.show_maps(None)
        return host

    def add_pci(self, address: str, vendor: int, device: int, kind: int) -> Path:
        """Plug something in."""
        folder = self.root / "sys/bus/pci/devices" / address
        folder.mkdir(parents=True, exist_ok=True)
        for name, number in (("vendor", vendor), ("device", device), ("class", kind)):
            (folder / name).write_text(f"{number:#x}\n")
        return folder

    def add_nic(self, name: str, address: str, vendor: int = AMAZON, device: int = EFA) -> None:
        """Plug an RDMA device in."""
        folder = self.add_pci(address, vendor, device, _NETWORK)
        entry = self.root / "sys/class/infiniband" / name
        entry.mkdir(parents=True, exist_ok=True)
        (entry / "device").symlink_to(folder)

    def add_nvidia_gpu(self) -> None:
        """Plug a GPU of another maker in."""
        self.add_pci("0000:01:00.0", NVIDIA, 0x2330, _GPU)

    def load_kernel_module(self, name: str) -> None:
        """As modprobe does."""
        (self.root / "sys/module" / name).mkdir(parents=True, exist_ok=True)

    def provide(self, nrt: FakeNrt, lite: bool) -> None:
        """Install the runtime library and one of the two torch backends."""
        self.libnrt = nrt
        self.modules.add("libtorch_neuronx_lite" if lite else "torch_neuronx")
        if not lite:
            self.packages.setdefault("torch-neuronx", "2.13.3")

    def show_maps(self, nrt: FakeNrt | None) -> None:
        """Bring /proc/self/maps up to date."""
        maps = self.root / "proc/self/maps"
        maps.parent.mkdir(parents=True, exist_ok=True)
        files = "".join(f"7000000000-7000001000 r-xp 0 00:00 1 {path}\n" for path in self.mapped)
        maps.write_text((nrt.maps() if nrt else "") + files)

    def load(self, name: str) -> Any:
        """Open a library, as ctypes does. Raises OSError, as the loader words it."""
        if name == "libnrt.so.1" and self.libnrt is not None:
            return self.libnrt.library()
        if name in self.provided:
            return self.provided[name]
        if name in self.libraries:
            return object()
        if name.endswith("libplugin_LIBFABRIC.so"):
            for needed in LIBRARIES:
                if needed not in self.libraries:
                    raise OSError(f"{needed}: cannot open shared object file: No such file or directory")
            return object()
        raise OSError(f"{name}: cannot open shared object file: No such file or directory")

    def machine(self) -> Machine:
        """What a backend is given."""
        return Machine(self.root, self.environ, self.packages.get, self.modules.__contains__, self.load)
