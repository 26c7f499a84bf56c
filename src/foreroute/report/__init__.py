"""Run records -> summary rows, plots, one self-contained HTML page. The only user of a plotting library.

"""

from foreroute.report.records import Run, read_run, read_runs
from foreroute.report.table import Sides, SummaryRow, summary_rows

__all__ = [
    "Run",
    "Sides",
    "SummaryRow",
    "read_run",
    "read_runs",
    "summary_rows",
]
