"""Run records -> summary rows, plots, one self-contained HTML page. The only user of a plotting library.

Importing this room loads neither matplotlib nor jinja2; `write_report` does, and says what to install without them.
"""

from foreroute.report.diagnosis import MeasureRow, measure_rows, write_diagnosis
from foreroute.report.fit_rows import fit_rows, fit_summary
from foreroute.report.load_rows import LoadRow, load_rows
from foreroute.report.page import write_report
from foreroute.report.plan import write_plan_page
from foreroute.report.plan_rows import MethodRow, method_rows, plan_summary
from foreroute.report.reading import read_run, read_runs
from foreroute.report.records import Run
from foreroute.report.simulation import write_simulation_page
from foreroute.report.simulation_rows import SimulationRow, compared, simulation_rows, simulation_summary
from foreroute.report.table import Sides, SummaryRow, summary_rows
from foreroute.report.template import check_page

__all__ = [
    "LoadRow",
    "MeasureRow",
    "MethodRow",
    "Run",
    "Sides",
    "SimulationRow",
    "SummaryRow",
    "check_page",
    "compared",
    "fit_rows",
    "fit_summary",
    "load_rows",
    "measure_rows",
    "method_rows",
    "plan_summary",
    "read_run",
    "read_runs",
    "simulation_rows",
    "simulation_summary",
    "summary_rows",
    "write_diagnosis",
    "write_plan_page",
    "write_report",
    "write_simulation_page",
]
