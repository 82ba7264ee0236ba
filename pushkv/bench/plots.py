"""The figures of what was measured, as PNG and SVG, drawn from a result's JSON object alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pushkv.errors import BenchError

Row = Mapping[str, Any]
FORMATS = ("png", "svg")
COLOURS = {
    "none": "#888888",
    "pull": "#d95f02",
    "pull-default": "#a6761d",
    "push": "#1b9e77",
    "stream": "#7570b3",
    "raw": "#888888",
    "direct": "#1b9e77",
    "landing": "#7570b3",
    "auto": "#e7298a",
}
NAMES = {"none": "no transfer", "pull": "pull, on the engine's thread", "push": "push, whole requests",
         "pull-default": "pull, NIXL's default agent", "stream": "push, streaming", "raw": "raw NIXL"}  # fmt: skip


def draw(result: Row, folder: Path) -> list[Path]:
    """Draw a result's figures into a folder, which is made; gives the files.

    Raises BenchError without matplotlib, for an object that is no result, and where a file cannot be written.
    """
    figures = {"descriptors": _descriptors, "handover": _handover, "serve": _serve}.get(str(result.get("bench")))
    if figures is None:
        raise BenchError(f"A result of {result.get('bench')!r} cannot be drawn; give one of pushkv bench --json.")
    pyplot = _pyplot()
    written: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, figure in figures(pyplot, result):
            for kind in FORMATS:
                written.append(folder / f"{name}.{kind}")
                figure.savefig(written[-1], dpi=150)
            pyplot.close(figure)
    except (KeyError, ValueError) as error:
        raise BenchError(f"The result cannot be drawn: {type(error).__name__}: {error}.") from error
    except OSError as error:
        raise BenchError(
            f"Figures cannot be written to {folder}: {error.strerror}; choose another folder."
        ) from error
    return written


def require_matplotlib() -> None:
    """Raise BenchError where there is none, before anything is measured."""
    _pyplot()


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise BenchError(f"Figures need matplotlib ({error}); pip install 'pushkv[bench]'.") from error
    matplotlib.use("Agg")  # files alone, whatever display there is
    from matplotlib import pyplot

    return pyplot


Figures = Iterable[tuple[str, Any]]


def _descriptors(pyplot: Any, result: Row) -> Figures:
    """Time against the size of a piece, a line a way."""
    rows = result["rows"]
    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for way in ("raw", "direct", "landing", "auto"):
        _line(axes, way, [row["piece"] for row in rows], [row[f"{way}_ms"] for row in rows])
    axes.set(xscale="log", yscale="log", xlabel="bytes a piece", ylabel="ms a request")
    _finish(figure, [axes], f"{_mib(rows)} MiB a request, blocks scattered on both sides")
    yield "descriptors", figure


def _mib(rows: Sequence[Row]) -> str:
    sizes = {row["regions"] * row["pieces_a_region"] * row["piece"] >> 20 for row in rows}
    return str(sizes.pop()) if len(sizes) == 1 else f"{min(sizes)} to {max(sizes)}"


def _handover(pyplot: Any, result: Row) -> Figures:
    """Latency against size, NIXL alone beside it."""
    rows = result["rows"]
    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    sizes = [row["bytes"] for row in rows]
    _line(axes, "raw", sizes, [row["raw_write_ms_p50"] for row in rows])
    _line(axes, "direct", sizes, [row["handover_ms_p50"] for row in rows], "handover")
    axes.set(xscale="log", yscale="log", xlabel="bytes a request", ylabel="ms, median")
    _finish(figure, [axes], "From staging to the outcome at the consumer")
    yield "handover", figure


def _serve(pyplot: Any, result: Row) -> Figures:
    """TTFT and TPOT against load: a figure each, a plot a length, a line a mode."""
    yield "serve-ttft", _against_load(pyplot, result, "ttft_ms_p50", "TTFT, ms (median)", log=True)
    yield "serve-tpot", _against_load(pyplot, result, "tpot_ms_mean", "TPOT, ms (mean)", log=False)


def _against_load(pyplot: Any, result: Row, value: str, label: str, *, log: bool) -> Any:
    cells = result["cells"]
    lengths = list(dict.fromkeys(cell["length"] for cell in cells))
    modes = list(dict.fromkeys(cell["mode"] for cell in cells))
    width = 3.4 * len(lengths) + 0.6
    shape = {"figsize": (width, 4.2), "layout": "constrained", "squeeze": False, "sharey": not log}
    figure, every = pyplot.subplots(1, len(lengths), **shape)
    for axes, length in zip(every[0], lengths, strict=True):
        for mode in modes:
            ours = [cell for cell in cells if (cell["length"], cell["mode"]) == (length, mode)]
            _line(axes, mode, [cell["rate"] for cell in ours], [cell[value] for cell in ours])
        axes.set(xlabel="requests a second", title=f"{length:,} tokens", xscale="log")
        axes.set_xticks([cell["rate"] for cell in cells if cell["length"] == length])
        axes.xaxis.set_major_formatter(lambda rate, _: f"{rate:g}")
        axes.minorticks_off()
        if log:
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(lambda time, _: f"{time:g}")
            axes.yaxis.set_minor_formatter(lambda time, _: f"{time:g}")
    every[0][0].set_ylabel(label)
    _finish(figure, every[0], "")
    return figure


def _line(axes: Any, way: str, x: Sequence[float], y: Sequence[float], name: str = "") -> None:
    axes.plot(x, y, marker="o", color=COLOURS.get(way), label=name or NAMES.get(way, way))


def _finish(figure: Any, every: Iterable[Any], title: str) -> None:
    for axes in every:
        axes.grid(alpha=0.3, which="both")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    columns = max(1, min(len(labels), int(figure.get_figwidth() // 2)))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns)
    if title:
        figure.suptitle(title)
