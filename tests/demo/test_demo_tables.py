"""Plain text output."""

from __future__ import annotations

import io

import pytest

from pushkv.demo.tables import Progress, format_bytes, format_facts, format_seconds, format_table


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_numbers_stand_to_the_right_and_text_to_the_left():
    text = format_table(["request", "tokens", "way"], [["a", 5, "direct"], ["long name", 1200, "landing"]])
    assert text.splitlines() == [
        "request    tokens  way",
        "---------  ------  -------",
        "a               5  direct",
        "long name    1200  landing",
    ]


def test_a_table_without_rows_has_its_header():
    assert format_table(["a", "bc"], []) == "a  bc\n-  --"


def test_a_row_with_too_few_cells_is_an_error():
    with pytest.raises(ValueError, match="argument"):
        format_table(["a", "b"], [["only one"]])


def test_facts_are_aligned():
    assert format_facts([("requests", 16), ("ok", "yes"), ("note", "")]) == "requests  16\nok        yes\nnote"
    assert format_facts([]) == ""


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 << 20, "3.0 MiB"), (1 << 52, "4096.0 TiB")],
)
def test_bytes(count, text):
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 µs"), (1.5e-5, "15 µs"), (0.00123, "1.23 ms"), (12.5, "12.5 s")]
)
def test_seconds(seconds, text):
    assert format_seconds(seconds) == text


def test_progress_rewrites_its_line_on_a_terminal():
    stream = Terminal()
    progress = Progress("prefill", 2, stream=stream)
    progress.advance()
    progress.advance(5)
    assert stream.getvalue() == "\rprefill: 1/2\rprefill: 2/2\n"
    assert progress.done == 2


def test_progress_elsewhere_writes_a_line_each_quarter():
    stream = io.StringIO()
    progress = Progress("decode", 16, stream=stream)
    for _ in range(16):
        progress.advance()
    assert stream.getvalue().splitlines() == [f"decode: {count}/16" for count in (4, 8, 12, 16)]


def test_quiet_progress_counts_and_writes_nothing():
    stream = Terminal()
    progress = Progress("prefill", 3, stream=stream, quiet=True)
    progress.advance(3)
    assert (stream.getvalue(), progress.done) == ("", 3)
