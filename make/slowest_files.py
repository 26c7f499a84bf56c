"""Writes tests/slowest_files.txt from the last `make test-whole`, longest first: pytest begins with these files."""

from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
LEAST_SECONDS = 5.0
"""A file that takes less leaves no core idle for long, wherever it stands in the order."""

seconds: dict[str, float] = defaultdict(float)
for case in ElementTree.parse(ROOT / ".pytest_cache" / "whole.xml").iter("testcase"):
    # "file" is where a test's function stands, which may be a helper
    seconds[case.get("classname", "").replace(".", "/") + ".py"] += float(case.get("time", 0))
slow = sorted((name for name in seconds if seconds[name] >= LEAST_SECONDS), key=seconds.__getitem__, reverse=True)
there = "".join(f"{name}\n" for name in slow if (ROOT / name).exists())
(ROOT / "tests" / "slowest_files.txt").write_text(there, encoding="utf-8")
