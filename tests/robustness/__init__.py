"""What others write, and where they point: nothing of it crashes, hangs, destroys, or passes unseen.

A sample runs with every test run; `FOREROUTE_SAMPLE=night pytest -rP tests/robustness` tries and counts everything.
"""

import os

NIGHT = os.environ.get("FOREROUTE_SAMPLE") == "night"
