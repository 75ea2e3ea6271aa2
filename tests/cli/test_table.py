from __future__ import annotations

from vllm_metal.cli.table import table


def test_columns_are_as_wide_as_they_look() -> None:
    rows = [("日本 🦙", "1"), ("e\u0301te\u0301", "2"), ("plain", "")]
    assert table(("NAME", "SIZE"), rows) == "NAME     SIZE\n日本 🦙  1\ne\u0301te\u0301      2\nplain"


def test_a_cell_is_on_one_line_and_drives_no_terminal() -> None:
    assert table(("A",), [("x\n\x1b[2Jy",)]) == "A\nx  [2Jy"
