"""The parts of ``pushkv bench`` that need neither NIXL nor time: settings, arrivals, blocks, figures, lines."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pushkv.bench import plots, report, serve
from pushkv.bench.descriptors import DescriptorSettings, Shape
from pushkv.bench.engine import Blocks, Memory
from pushkv.bench.workload import Mode, Prefilled, Request, Served, ServeSettings
from pushkv.cli import main
from pushkv.errors import BenchError, ConfigError

SMALL = ServeSettings(lengths=(32, 64), block=16, token_bytes=64, regions=2, room=2)


class TestWorkload:
    def test_arrivals_are_the_same_in_every_mode_and_others_by_length_rate_and_seed(self) -> None:
        first = SMALL.arrivals(64, 4)
        assert first == SMALL.arrivals(64, 4)
        assert first[0] == 0
        assert first == sorted(first)
        others = [SMALL.arrivals(32, 4), SMALL.arrivals(64, 8), ServeSettings(seed=2).arrivals(64, 4)]
        assert all(first != other for other in others)

    def test_their_mean_gap_is_the_rates(self) -> None:
        many = ServeSettings(seconds=2000).arrivals(1024, 8)
        assert len(many) == 16_000
        assert np.diff(many).mean() == pytest.approx(1 / 8, rel=0.05)

    @pytest.mark.parametrize(
        ("changes", "told"),
        [
            ({"lengths": ()}, "lengths"),
            ({"lengths": (16, 0)}, "lengths"),
            ({"rates": (0.0,)}, "rates"),
            ({"modes": ()}, "modes"),
            ({"seconds": 0}, "seconds"),
            ({"new_tokens": 1}, "new_tokens is 1; give 2 or more"),
            ({"held": 1.5}, "held is 1.5"),
            ({"token_bytes": 100, "regions": 8}, "token_bytes is 100; give a multiple of 8 times 8"),
            ({"landing": "aside"}, "landing is 'aside'"),
        ],
    )
    def test_settings_that_cannot_be_are_refused(self, changes: dict[str, Any], told: str) -> None:
        with pytest.raises(ConfigError, match=told):
            ServeSettings(**changes)

    def test_shapes_of_descriptors_keep_the_bytes_of_a_request(self) -> None:
        settings = DescriptorSettings()
        assert settings.shape(512) == Shape(128, 1024, 512, settings.slot)
        assert settings.shape(4 << 20) == Shape(4, 4, 4 << 20, settings.slot)
        assert DescriptorSettings(count=3, regions=5).shape(512) == Shape(5, 3, 512, settings.slot)


class TestEngineParts:
    def test_blocks_are_scattered_given_back_and_run_out(self) -> None:
        blocks = Blocks(64, seed=1)
        taken = blocks.take(40)
        assert taken is not None
        assert len(set(taken)) == 40
        assert sum(b == a + 1 for a, b in itertools.pairwise(taken)) < 10
        assert blocks.take(25) is None
        blocks.give(taken)
        rest = blocks.take(64)
        assert rest is not None
        assert sorted(rest) == list(range(64))

    def test_kv_of_another_request_layer_or_place_is_found_out(self) -> None:
        memory, request = Memory(SMALL), Request(7, 64, 0.0)
        memory.stamp(request, (3, 1), 0)
        memory.stamp(request, (0, 2), 2)
        memory.check(request, (3, 1, 0, 2))
        for wrong in [(Request(8, 64, 0.0), (3, 1, 0, 2)), (request, (1, 3, 0, 2)), (request, (3, 1, 0, 4))]:
            with pytest.raises(BenchError, match="KV that is not its own"):
                memory.check(*wrong)
        memory.arrays[1][2, -1, -1] ^= 1
        with pytest.raises(BenchError, match="in layer 1"):
            memory.check(request, (3, 1, 0, 2))


def cell(mode: Mode, length: int = 64, rate: float = 2, token_s: float = 0.01) -> dict[str, Any]:
    """A cell of two requests: computed in 0.1 s, loaded after 0.02 more, then a token each ``token_s``."""
    requests = [Request(number, length, float(number)) for number in (1, 2)]
    prefilled = [Prefilled(one, (1,), one.arrived, one.arrived + 0.1) for one in requests]
    served = [
        Served(one, one.arrived + 0.12, one.arrived + 0.13, one.arrived + 0.13 + 3 * token_s, 4) for one in requests
    ]
    return serve.cell_of(SMALL, mode, length, rate, prefilled, served)


def result_of_serve() -> dict[str, Any]:
    cells = [
        cell(mode, length, rate, 0.01 if mode is Mode.NONE else 0.012)
        for length in (32, 64) for mode in Mode for rate in (1, 2)
    ]  # fmt: skip
    return {"bench": "serve", "settings": {}, "cells": serve.with_ratios(cells)}


RESULTS: dict[str, dict[str, Any]] = {
    "serve": result_of_serve(),
    "handover": {
        "bench": "handover",
        "idle_share_of_a_core": {"consumer": 0.011, "producer": 0.012},
        "rows": [
            {"bytes": size, "raw_write_ms_p50": 1.0, "handover_ms_p50": 2.0, "beyond_raw_ms_p50": 1.0,
             "offer_seen_ms_p50": 0.5, "offer_seen_ms_max": 0.75, "path": "UCX: cma"}
            for size in (1024, 2048)
        ],
    },
    "descriptors": {
        "bench": "descriptors",
        "rows": [
            {"piece": piece, "regions": 4, "pieces_a_region": (1 << 18) // piece, "raw_ms": 4.0, "direct_ms": 3.0,
             "landing_ms": 1.0, "auto_ms": 1.0, "raw_over_landing": 4.0, "direct_over_landing": 3.0}
            for piece in (512, 4096)
        ],
    },
}  # fmt: skip


class TestFigures:
    def test_times_are_from_arrival_and_between_tokens(self) -> None:
        told = cell(Mode.PUSH)
        assert told["requests"] == 2
        assert told["ttft_ms_p50"] == pytest.approx(130)
        assert told["tpot_ms_mean"] == pytest.approx(10)
        assert told["prefill_ms_p50"] == pytest.approx(100)
        assert told["loaded_after_prefill_ms_p50"] == pytest.approx(20)

    def test_ratios_are_to_the_same_cell_without_a_transfer(self) -> None:
        cells = serve.with_ratios([cell(Mode.NONE), cell(Mode.PULL, token_s=0.015), cell(Mode.PULL, rate=4)])
        assert [one.get("tpot_over_none") for one in cells] == [pytest.approx(1), pytest.approx(1.5), None]

    @pytest.mark.parametrize(
        ("bench", "names"),
        [
            ("serve", ["serve-ttft", "serve-tpot"]),
            ("handover", ["handover"]),
            ("descriptors", ["descriptors"]),
        ],
    )
    def test_a_result_is_drawn_as_png_and_svg(self, bench: str, names: list[str], tmp_path: Path) -> None:
        saved = tmp_path / "result.json"
        saved.write_text(json.dumps(RESULTS[bench]))
        assert main(["bench", "draw", str(saved), "--plot", str(tmp_path / "figures")]) == 0
        files = {path.name: path.read_bytes() for path in (tmp_path / "figures").iterdir()}
        assert sorted(files) == sorted(f"{name}.{kind}" for name in names for kind in ("png", "svg"))
        assert all(data.startswith(b"\x89PNG") for name, data in files.items() if name.endswith("png"))
        assert all(b"<svg" in data for name, data in files.items() if name.endswith("svg"))

    def test_every_mode_has_a_line_of_its_own_in_the_legend(self, tmp_path: Path) -> None:
        pyplot = plots._pyplot()
        for _, figure in plots._serve(pyplot, RESULTS["serve"]):
            labels = [text.get_text() for text in figure.legends[0].get_texts()]
            assert labels == [plots.NAMES[mode.value] for mode in Mode]
            assert [axes.get_title() for axes in figure.axes] == ["32 tokens", "64 tokens"]
            pyplot.close(figure)

    @pytest.mark.parametrize(
        ("text", "told"),
        [
            ("", "holds no result"),
            ("[1]", "holds no result but a list"),
            ("{}", "cannot be drawn"),
            ('{"bench": "serve"}', "KeyError: 'cells'"),
            ('{"bench": "handover", "rows": [{"bytes": 1}]}', "KeyError: 'raw_write_ms_p50'"),
        ],
    )
    def test_what_is_no_result_is_told(
        self, text: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        saved = tmp_path / "result.json"
        saved.write_text(text)
        assert main(["bench", "draw", str(saved), "--plot", str(tmp_path)]) == 1
        assert told in capsys.readouterr().err

    def test_a_folder_that_cannot_be_is_told(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        saved = tmp_path / "result.json"
        saved.write_text(json.dumps(RESULTS["handover"]))
        assert main(["bench", "draw", str(saved), "--plot", str(saved)]) == 1
        assert "choose another folder" in capsys.readouterr().err

    def test_without_matplotlib_the_remedy_is_told_before_anything_is_measured(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        import sys

        monkeypatch.setitem(sys.modules, "matplotlib", None)
        assert main(["bench", "serve", "--plot", str(tmp_path)]) == 1
        assert "pip install 'pushkv[bench]'" in capsys.readouterr().err


class TestLines:
    @pytest.mark.parametrize("bench", RESULTS)
    def test_a_row_is_one_line(self, bench: str) -> None:
        result = RESULTS[bench]
        for row in result.get("rows") or result["cells"]:
            line = report.line_of(bench, row)
            assert line.strip()
            assert "\n" not in line

    def test_what_is_said_at_the_end(self) -> None:
        assert report.closing_lines(RESULTS["handover"]) == [
            "an idle consumer: 1.10% of a core",
            "an idle producer: 1.20% of a core",
        ]
        assert report.closing_lines(RESULTS["descriptors"]) == []
        told = report.closing_lines(RESULTS["serve"])
        assert [line.partition(":")[0] for line in told] == ["pull", "pull-default", "push", "stream"]
        assert all("at most +20.0% of no transfer" in line for line in told)


class TestUsage:
    @pytest.mark.parametrize(
        "argv", [["bench"], ["bench", "nonesuch"], ["bench", "serve", "--lengths", "many"], ["bench", "draw", "x"]]
    )
    def test_wrong_usage_is_the_parsers(self, argv: list[str]) -> None:
        with pytest.raises(SystemExit) as told:
            main(argv)
        assert told.value.code == 2

    @pytest.mark.parametrize(
        ("argv", "told"),
        [
            (["--modes", "pull,puhs"], "no mode 'puhs'; give some of none, pull"),
            (["--lengths", ""], "lengths is ()"),
            (["--held", "2"], "held is 2.0"),
        ],
    )
    def test_settings_that_cannot_be_are_one_line(
        self, argv: list[str], told: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["bench", "serve", *argv]) == 1
        assert told in capsys.readouterr().err
