"""Run all cases of the releases whose interpreters are named, and print the page of all results that were kept."""

import sys
from pathlib import Path

from tests.engines.releases.page import page
from tests.engines.releases.results import kept, run

for python in map(Path, sys.argv[1:]):
    run(python).keep()
sys.stdout.write(page(kept()))
