"""`docs/paper.md` says what the program says of the paper's cases."""

import pytest

from scripts.paper_cases import BEGIN, CASES, END, PAGE, PICTURE, made


@pytest.mark.slow
def test_table_and_picture_are_what_the_commands_of_the_page_print() -> None:
    table, picture = made()
    page = PAGE.read_text(encoding="utf-8")
    assert f"{BEGIN}{table}{END}" in page, "run scripts/paper_cases.py"
    assert PICTURE.read_text(encoding="utf-8") == picture, "run scripts/paper_cases.py"
    assert all(f"megatrain plan {case.command}\n" in table for case in CASES)
