"""Discovery: what pluggy and packaging would let slip through, with distributions on disk."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fake_site import BACKEND, FAILS, PASSES, PLUGIN, FakeSite
from pushkv.backends.base import ArrayDescription, Check, Fence, MemoryBackend, PassedFence, Verdict
from pushkv.backends.cpu import CpuBackend
from pushkv.discovery import DISABLE, Entry, Fault, discover, own_distribution
from pushkv.errors import BackendError, ConfigError, PushKVError, UnclaimedDevice
from pushkv.hookspecs import BackendRecord
from pushkv.plugins import Registry, State, backend_for, get_backend, registry


@pytest.fixture
def site(tmp_path: Path) -> FakeSite:
    folder = tmp_path / "site"
    folder.mkdir()
    return FakeSite(folder)


def test_built_ins_come_first_and_an_installed_plug_in_after_them(site: FakeSite) -> None:
    site.backend("pushkv-xpu", "xpu")
    rows = site.listing()
    assert list(rows) == ["cpu", "cuda", "neuron", "xpu"]
    assert rows["xpu"]["distribution"] == "pushkv-xpu 0.1"
    assert rows["xpu"]["device_types"] == ["xpu"]
    assert rows["xpu"]["status"] == "ready"


class TestOrderDecidesNothing:
    """pluggy calls the last registered first, and a first-result hook would let it win."""

    def test_two_owners_of_a_device_type_are_both_named(self, site: FakeSite) -> None:
        site.backend("pushkv-late", "late", device="cpu")
        error = site.error_of("import numpy; backend_for(numpy.zeros(2))")
        assert error["type"] == "BackendError"
        assert "'late' of pushkv-late 0.1" in error["text"]
        assert "'cpu' of pushkv" in error["text"]
        assert DISABLE in error["text"]

    def test_disabling_one_owner_leaves_the_other(self, site: FakeSite) -> None:
        site.backend("pushkv-late", "late", device="cpu")
        statement = "import numpy; assert backend_for(numpy.zeros(2)).name == {!r}"
        assert site.error_of(statement.format("cpu"), PUSHKV_DISABLE="late") == {}
        assert site.error_of(statement.format("late"), PUSHKV_DISABLE="cpu") == {}


class TestPlugInsThatAreBroken:
    """A broken plug-in is shown, hurts no other, and raises when its backend is asked for."""

    def assert_broken(self, site: FakeSite, *phrases: str) -> None:
        """``bad`` is broken and says so; the sound plug-ins on either side of it still stand."""
        site.backend("pushkv-aaa", "aaa")
        site.backend("pushkv-zzz", "zzz")
        rows = site.listing()
        assert rows["bad"]["status"] == "broken"
        assert rows["bad"]["distribution"] == "pushkv-bad 0.1"
        for phrase in phrases:
            assert phrase in rows["bad"]["reason"]
        assert {rows[name]["status"] for name in ("cpu", "aaa", "zzz")} == {"ready"}
        error = site.error_of("get_backend('aaa'), get_backend('zzz'), get_backend('bad')")
        assert error["type"] == "BackendError"
        assert "'bad' of pushkv-bad 0.1 is broken" in error["text"]
        assert error["cause"] is not None

    def hook(self, site: FakeSite, source: str) -> None:
        site.module("bad_plugin", "from pushkv.hookspecs import BackendRecord, hookimpl\n" + source)
        site.declare("pushkv-bad", "[pushkv]\nbad = bad_plugin\n")

    def test_its_import_fails(self, site: FakeSite) -> None:
        self.hook(site, "import a_library_that_is_not_here\n")
        self.assert_broken(site, "bad = bad_plugin", "ModuleNotFoundError", "a_library_that_is_not_here")

    def test_its_module_leaves_the_process(self, site: FakeSite) -> None:
        self.hook(site, "raise SystemExit('no licence')\n")
        self.assert_broken(site, "SystemExit", "no licence")

    def test_its_module_panics_in_an_extension(self, site: FakeSite) -> None:
        """Panics of extensions written in Rust derive from BaseException alone."""
        self.hook(site, "class PanicException(BaseException): pass\nraise PanicException('unwrap on None')\n")
        self.assert_broken(site, "PanicException: unwrap on None")

    def test_its_module_does_not_exist(self, site: FakeSite) -> None:
        site.declare("pushkv-bad", "[pushkv]\nbad = nowhere.at_all\n")
        self.assert_broken(site, "nowhere")

    def test_its_attribute_does_not_exist(self, site: FakeSite) -> None:
        site.declare("pushkv-bad", "[pushkv]\nbad = fake_plugin:missing\n")
        site.module("fake_plugin", "")
        self.assert_broken(site, "missing")

    def test_its_entry_point_is_no_reference(self, site: FakeSite) -> None:
        site.declare("pushkv-bad", "[pushkv]\nbad = ??\n")
        self.assert_broken(site, "bad = ??")

    def test_its_hook_takes_an_argument_that_is_not_in_the_specification(self, site: FakeSite) -> None:
        self.hook(site, "@hookimpl\ndef pushkv_backends(device):\n    return []\n")
        self.assert_broken(site, "PluginValidationError")

    def test_its_hook_is_misspelt(self, site: FakeSite) -> None:
        self.hook(site, "@hookimpl\ndef pushkv_backend():\n    return []\n")
        self.assert_broken(site, "unknown hook 'pushkv_backend'")

    def test_its_hook_is_not_marked(self, site: FakeSite) -> None:
        self.hook(site, "def pushkv_backends():\n    return []\n")
        self.assert_broken(site, "@hookimpl")

    def test_its_hook_raises(self, site: FakeSite) -> None:
        self.hook(site, "@hookimpl\ndef pushkv_backends():\n    raise RuntimeError('card on fire')\n")
        self.assert_broken(site, "RuntimeError", "card on fire")

    def test_its_hook_raises_while_it_is_read(self, site: FakeSite) -> None:
        self.hook(site, "@hookimpl\ndef pushkv_backends():\n    yield from ()\n    raise OSError('half way')\n")
        self.assert_broken(site, "OSError", "half way")

    def test_its_hook_forgets_to_return(self, site: FakeSite) -> None:
        self.hook(site, "@hookimpl\ndef pushkv_backends():\n    []\n")
        self.assert_broken(site, "returned None")

    def test_its_hook_returns_something_else(self, site: FakeSite) -> None:
        self.hook(site, "@hookimpl\ndef pushkv_backends():\n    return ['xpu']\n")
        self.assert_broken(site, "returned 'xpu'", "BackendRecord")

    def test_its_record_is_malformed(self, site: FakeSite) -> None:
        self.hook(site, "@hookimpl\ndef pushkv_backends():\n    return [BackendRecord('bad', ('bad'), 'a:B')]\n")
        self.assert_broken(site, "device_types 'bad'", "tuple")

    def test_it_cannot_be_hashed_or_compared(self, site: FakeSite) -> None:
        site.module(
            "odd_plugin",
            "class Odd:\n    __hash__ = None\n    def __eq__(self, other):\n        1 / 0\nodd = Odd()\n",
        )
        site.declare("pushkv-bad", "[pushkv]\nbad = odd_plugin:odd\n")
        self.assert_broken(site)


def test_an_unreadable_entry_points_file_is_shown_under_its_distribution(site: FakeSite) -> None:
    site.declare("pushkv-bad", "[pushkv]\nbad bad_plugin\n")
    rows = site.listing()
    assert rows["pushkv-bad"]["status"] == "broken"
    assert rows["cpu"]["status"] == "ready"


def test_distributions_that_are_not_ours_may_be_as_broken_as_they_like(site: FakeSite) -> None:
    site.declare("somebody-else", "[console_scripts]\nno equals sign\n")
    (site.folder / "left_over-1.dist-info").mkdir()
    (site.folder / "left_over-1.dist-info" / "entry_points.txt").write_text("[pushkv]\nleft = over\n")
    (site.folder / "binary-1.dist-info").mkdir()
    (site.folder / "binary-1.dist-info" / "entry_points.txt").write_bytes(b"\xff\xfe[pushkv]")
    assert list(site.listing()) == ["cpu", "cuda", "neuron"]


def test_a_broken_class_is_shown_and_raises_with_the_hint(site: FakeSite) -> None:
    site.backend("pushkv-xpu", "xpu")
    site.module("pushkv_xpu_backend", "import libxpu_that_is_not_here\n")
    row = site.listing()["xpu"]
    assert row["status"] == "broken"
    assert "libxpu_that_is_not_here" in row["reason"]
    error = site.error_of("get_backend('xpu')")
    assert error["cause"] == "ModuleNotFoundError"
    assert "install the xpu driver" in error["text"]


class TestDuplicateNames:
    """pluggy's loader skips a name that is taken, without a word."""

    def assert_both_named(self, site: FakeSite, first: str, second: str) -> None:
        done = site.python("-m", "pushkv", "backends")
        assert done.returncode == 1
        assert first in done.stderr
        assert second in done.stderr
        assert site.error_of("get_backend('cpu')")["type"] == "BackendError"

    def test_of_entry_points(self, site: FakeSite) -> None:
        site.backend("pushkv-xpu", "xpu")
        site.backend("other-xpu", "other", point="xpu")
        self.assert_both_named(site, "pushkv-xpu 0.1", "other-xpu 0.1")

    def test_of_backends_under_different_entry_points(self, site: FakeSite) -> None:
        site.backend("pushkv-xpu", "xpu", point="one")
        site.backend("other-xpu", "xpu", point="two")
        self.assert_both_named(site, "pushkv-xpu 0.1", "other-xpu 0.1")

    def test_of_a_built_in_backend(self, site: FakeSite) -> None:
        site.backend("cuckoo", "cpu", point="cuckoo")
        self.assert_both_named(site, " ".join(own_distribution()), "cuckoo 0.1")

    def test_are_resolved_by_disabling_one_distribution(self, site: FakeSite) -> None:
        site.backend("pushkv-xpu", "xpu")
        site.backend("other-xpu", "xpu")
        assert site.error_of("registry()")["type"] == "BackendError"
        check = "assert get_backend('xpu').__class__.__module__ == 'pushkv_xpu_backend'"
        assert site.error_of(check, PUSHKV_DISABLE="other_XPU") == {}

    def test_are_none_when_the_path_holds_one_distribution_twice(self, site: FakeSite, tmp_path: Path) -> None:
        site.backend("pushkv-xpu", "xpu")
        older = tmp_path / "older"
        site.declare("pushkv_xpu", "[pushkv]\nxpu = gone\n", version="0.0.9", folder=older)
        site.behind.append(older)
        assert site.listing()["xpu"]["distribution"] == "pushkv-xpu 0.1"


class TestDisable:
    def test_a_disabled_plug_in_is_not_imported(self, site: FakeSite) -> None:
        site.module("trap", "raise SystemExit('imported')\n")
        site.declare("pushkv-trap", "[pushkv]\ntrap = trap\n")
        for name in ("trap", "pushkv-trap", "PushKV_Trap", " trap ,"):
            row = site.listing(PUSHKV_DISABLE=name)["trap"]
            assert (row["status"], row["reason"]) == ("disabled", "")

    def test_a_disabled_backend_raises_when_it_is_asked_for(self) -> None:
        known = Registry(discover({DISABLE: "cuda,cpu,neuron"}))
        assert [known.status(entry, probe=False).state for entry in known.entries] == [State.DISABLED] * 3
        with pytest.raises(BackendError, match=r"'cpu' of pushkv .* is disabled; take it out of PUSHKV_DISABLE"):
            known.get("cpu")
        with pytest.raises(UnclaimedDevice, match=r"'cpu' .* is disabled; take it out of PUSHKV_DISABLE"):
            known.for_array(np.zeros(2))

    def test_a_name_that_is_nothing_here_is_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"'cdua'.*backends: cpu, cuda, neuron.*correct it"):
            discover({DISABLE: "cuda,cdua"})

    def test_an_empty_setting_disables_nothing(self) -> None:
        assert not any(entry.disabled for entry in discover({DISABLE: " ,, "}))


class _Xpu(MemoryBackend):
    name = "xpu"
    device_types = ("xpu",)
    verdict = Verdict.PASS
    closed = 0

    def describe(self, array: object) -> ArrayDescription:
        raise NotImplementedError

    def fence(self, array: object | None = None) -> Fence:
        return PassedFence()

    def check(self, *, probe: bool = True) -> tuple[Check, ...]:
        return (Check("card", self.verdict, "no card is there", "plug one in"),)

    def close(self) -> None:
        type(self).closed += 1


class _Warned(_Xpu):
    verdict = Verdict.WARN


class _Failed(_Xpu):
    verdict = Verdict.FAIL


class _Raising(_Xpu):
    def check(self, *, probe: bool = True) -> tuple[Check, ...]:
        raise ZeroDivisionError("a bug")


class _Odd(_Xpu):
    def check(self, *, probe: bool = True) -> tuple[Check, ...]:
        return ("fine",)  # type: ignore[return-value]


class _Panicking(_Xpu):
    def __init__(self) -> None:
        raise SystemExit(3)


class _Renamed(_Xpu):
    name = "ypu"


def _registry_of(kind: str) -> Registry:
    record = BackendRecord("xpu", ("xpu",), f"{__name__}:{kind}")
    return Registry([*discover({}), Entry("xpu", "pushkv-xpu 0.1", record)])


class TestLookup:
    def test_a_numpy_array_is_the_cpu_backends(self) -> None:
        assert backend_for(np.zeros(3)).name == "cpu"
        assert backend_for(np.zeros(3)) is get_backend("cpu")
        assert registry() is registry()

    def test_an_unknown_name_is_told_with_the_known_ones(self) -> None:
        with pytest.raises(BackendError, match=r"'cdua' \(known: cpu, cuda, neuron\)"):
            get_backend("cdua")

    def test_what_is_no_array_is_refused(self) -> None:
        with pytest.raises(BackendError, match="a list cannot be described; pass a numpy array or a torch tensor"):
            backend_for([1, 2])

    def test_an_instance_is_made_once_and_anew_after_close(self) -> None:
        known = _registry_of("_Xpu")
        first, before = known.get("xpu"), _Xpu.closed
        assert known.get("xpu") is first
        known.close()
        known.close()
        assert _Xpu.closed == before + 1
        assert known.get("xpu") is not first

    def test_a_failed_check_raises_and_nothing_else_serves_the_device(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("pushkv.plugins.device_type_of", lambda array: "xpu")
        known = _registry_of("_Failed")
        with pytest.raises(BackendError, match="'xpu' cannot be used: no card is there; plug one in"):
            known.for_array(np.zeros(2))
        status = known.status(known.entries[-1], probe=True)
        assert str(status) == "unavailable: no card is there; plug one in"

    def test_a_warning_is_logged_once(self, caplog: pytest.LogCaptureFixture) -> None:
        known = _registry_of("_Warned")
        known.get("xpu")
        known.get("xpu")
        assert [record.getMessage() for record in caplog.records] == [
            "memory backend 'xpu': no card is there; plug one in"
        ]

    @pytest.mark.parametrize(
        ("kind", "phrase"),
        [
            ("_Raising", "cannot check itself, ZeroDivisionError: a bug"),
            ("_Odd", "cannot check itself, TypeError: 'fine' is no Check"),
            ("_Panicking", "cannot be loaded, SystemExit: 3"),
            ("_Renamed", "calls itself 'ypu'"),
            ("FakeSite", "cannot be loaded, TypeError"),
            ("Path", "is no MemoryBackend"),
            ("missing", "cannot be loaded, AttributeError"),
        ],
    )
    def test_a_class_that_is_wrong_is_broken(self, kind: str, phrase: str) -> None:
        known = _registry_of(kind)
        status = known.status(known.entries[-1], probe=False)
        assert status.state is State.BROKEN
        assert phrase in status.reason
        with pytest.raises(BackendError) as raised:
            known.get("xpu")
        assert phrase in str(raised.value)

    def test_a_broken_plug_in_of_the_devices_name_is_told(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("pushkv.plugins.device_type_of", lambda array: "xpu")
        why = ImportError("libxpu.so")
        known = Registry([*discover({}), Entry("xpu", "pushkv-xpu 0.1", fault=Fault("ImportError: libxpu.so", why))])
        with pytest.raises(
            UnclaimedDevice, match=r"known: cpu, cuda, neuron.*'xpu' of pushkv-xpu 0.1 is broken.*libxpu"
        ) as raised:
            known.for_array(np.zeros(2))
        assert raised.value.__cause__ is why

    def test_an_unclaimed_device_is_told_with_the_known_backends(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("pushkv.plugins.device_type_of", lambda array: "tpu")
        with pytest.raises(
            UnclaimedDevice, match=r"device .* \(known: cpu, cuda, neuron\); install the .* claims 'tpu'"
        ):
            backend_for(np.zeros(2))


@pytest.mark.parametrize(
    ("fields", "phrase"),
    [
        (("X", ("x",), "m:C"), "cannot be named 'X'"),
        (("x", "x", "m:C"), "device_types 'x'"),
        (("x", (), "m:C"), r"device_types \(\)"),
        (("x", ("x", 3), "m:C"), "device_types"),
        (("x", ("x",), "m.C"), "load 'm.C'"),
    ],
)
def test_a_malformed_record_is_refused(fields: tuple[str, tuple[str, ...], str], phrase: str) -> None:
    with pytest.raises(PushKVError, match=phrase):
        BackendRecord(*fields)


def test_the_fakes_are_sound(site: FakeSite) -> None:
    """The templates that the tests above break are sound as they are, and a failing check makes one unavailable."""
    assert "{name!r}" in PLUGIN
    assert "{name!r}" in BACKEND
    site.backend("pushkv-yes", "yes", checks=PASSES)
    site.backend("pushkv-no", "no", checks=FAILS)
    rows = site.listing()
    assert rows["yes"]["status"] == "ready"
    assert (rows["no"]["status"], rows["no"]["reason"]) == ("unavailable", "no card is there; plug one in")


def test_an_instance_with_settings_is_served_once_it_is_past_its_checks() -> None:
    known = Registry(discover({}))
    mine = CpuBackend()
    known.use(mine)
    assert known.get("cpu") is mine
    assert known.for_array(np.zeros(2)) is mine
    monkey = CpuBackend()
    monkey.check = lambda *, probe=True: (Check("luck", Verdict.FAIL, "no luck", "wait"),)  # type: ignore[method-assign]
    known.use(monkey)
    with pytest.raises(BackendError, match="'cpu' cannot be used: no luck; wait"):
        known.get("cpu")
    stranger = CpuBackend()
    stranger.name = "stranger"  # type: ignore[misc]
    with pytest.raises(BackendError, match="no memory backend is named 'stranger'"):
        known.use(stranger)
