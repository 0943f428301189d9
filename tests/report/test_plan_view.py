"""Tables outside a terminal: a row is a line, whatever its length."""

from io import StringIO

from rich.console import Console
from rich.table import Table

from megatrain_cli.report.plan_view import print_table


def test_a_long_row_stays_on_one_line_in_a_file() -> None:
    table = Table.grid(padding=(0, 2))
    long = " ".join(["word"] * 60)
    table.add_row("label", long)
    file = StringIO()
    print_table(table, Console(file=file))
    assert file.getvalue() == f"label  {long}\n"
