"""Records -> findings, tables, plots, one self-contained HTML page. The only user of a plotting library.

Importing this room loads neither matplotlib nor jinja2; writing a page does, and says what to install without them.
"""

from foreroute.report.diagnosis import finding_table, measure_table, write_diagnosis
from foreroute.report.finding import run_finding
from foreroute.report.page import check_page
from foreroute.report.plan import plan_finding, plan_table, plan_tiles, write_plan_page
from foreroute.report.run import write_report
from foreroute.report.run_tables import SummaryRow, load_table, summary_rows, summary_table
from foreroute.report.simulation import (
    compared_methods,
    executed,
    fit_summary,
    fit_table,
    simulation_finding,
    simulation_table,
    simulation_tiles,
    write_simulation_page,
)

__all__ = [
    "SummaryRow",
    "check_page",
    "compared_methods",
    "executed",
    "finding_table",
    "fit_summary",
    "fit_table",
    "load_table",
    "measure_table",
    "plan_finding",
    "plan_table",
    "plan_tiles",
    "run_finding",
    "simulation_finding",
    "simulation_table",
    "simulation_tiles",
    "summary_rows",
    "summary_table",
    "write_diagnosis",
    "write_plan_page",
    "write_report",
    "write_simulation_page",
]
