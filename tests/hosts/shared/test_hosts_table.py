"""docs/hosts.md has every row, a column of this host, and a reason for each no."""

from __future__ import annotations

from hosts_table import CAPABILITIES, LACKS, TABLE, host_at_hand, read_table, table_text


def test_the_page_has_every_row_and_a_column_of_this_host() -> None:
    columns = read_table(TABLE.read_text(encoding="utf-8"))
    assert table_text(columns) == TABLE.read_text(encoding="utf-8")
    assert all(tuple(column) == CAPABILITIES for column in columns.values())
    assert {"V0 1.6.0", "V1 1.58.0"} <= set(columns)
    lacking = {(name[:2], what) for name, column in columns.items() for what, cell in column.items() if cell == "no"}
    assert lacking == set(LACKS), "every no has its reason"
    here = host_at_hand()
    assert here is None or here not in ("V0 1.6.0", "V1 1.58.0") or "yes" in columns[here].values()
