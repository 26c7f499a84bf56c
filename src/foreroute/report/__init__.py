"""Records -> findings, tables, plots, one self-contained HTML page. The only user of a plotting library.

Importing this room loads neither matplotlib nor jinja2; writing a page does, and says what to install without them.
"""

from foreroute.report.diagnosis import write_diagnosis

__all__ = ["write_diagnosis"]
