"""Run records -> summary rows, plots, one self-contained HTML page. The only user of a plotting library.

Importing this room loads neither matplotlib nor jinja2; `write_report` does, and says what to install without them.
"""

from foreroute.report.diagnosis import measure_rows, write_diagnosis
from foreroute.report.finding import run_finding
from foreroute.report.format import TableRow
from foreroute.report.plan import method_rows, plan_finding, plan_summary, write_plan_page
from foreroute.report.run import write_report
from foreroute.report.run_rows import SummaryRow, load_rows, summary_rows
from foreroute.report.simulation import (
    compared_methods,
    fit_rows,
    fit_summary,
    simulation_finding,
    simulation_rows,
    simulation_summary,
    write_simulation_page,
)
from foreroute.report.template import check_page

__all__ = [
    "SummaryRow",
    "TableRow",
    "check_page",
    "compared_methods",
    "fit_rows",
    "fit_summary",
    "load_rows",
    "measure_rows",
    "method_rows",
    "plan_finding",
    "plan_summary",
    "run_finding",
    "simulation_finding",
    "simulation_rows",
    "simulation_summary",
    "summary_rows",
    "write_diagnosis",
    "write_plan_page",
    "write_report",
    "write_simulation_page",
]
