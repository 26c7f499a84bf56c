"""The support table of docs/huggingface.md: written from the checks by running this file, read by `test_every_family`.

Each family of the table passes every check, except those that its last cell names, with the reason why they do not
apply.
"""

import functools
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs/huggingface.md"
BEGIN, END = "<!-- support table -->", "<!-- end of support table -->"
HOW_TO_UPDATE = "write it anew with `python tests/adapters/hf/support_table.py`"
HEADER = ["family", "class", "gate", "does not apply"]


@functools.cache
def committed():
    """{family: its class, its gate, and {check: why it does not apply}} of the page."""
    header, _, *rows = [_cells(line) for line in _tables()[0]]
    assert header == HEADER
    return {family: (model, gate, _exceptions(cell)) for family, model, gate, cell in rows}


def _exceptions(cell):
    return dict(part.split(": ", 1) for part in cell.split("; ") if part)


@functools.cache
def committed_refusals():
    """{family: reason} of the page."""
    return dict(_cells(line) for line in _tables()[1][2:])


def _tables():
    section = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    return [block.splitlines() for block in section.split("\n\n") if block.startswith("|")]


def _cells(line):
    return [part.strip() for part in line.strip("|").split("|")]


def write():
    """Run every check on every family and put the outcome into the page."""
    import torch
    import transformers

    from tests.adapters.hf.families import FAMILIES
    from tests.adapters.hf.family_checks import CHECKS
    from tests.adapters.hf.family_gates import GATES
    from tests.adapters.hf.family_refusals import REFUSED, refusal

    torch.set_num_threads(1)
    rows = [HEADER]
    for name, family in FAMILIES.items():
        outcomes = {check.__name__: check(name) for check in CHECKS}
        exceptions = "; ".join(f"{check}: {reason}" for check, reason in outcomes.items() if reason)
        rows.append([name, family.model, str(GATES[name]), exceptions])
    refused = [["family", "reason"], *([name, refusal(name)] for name in REFUSED)]
    before, _, rest = PAGE.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    told = f"{len(rows) - 1} families of transformers {transformers.__version__} pass:"
    PAGE.write_text(f"{before}{BEGIN}\n\n{told}\n\n{_table(rows)}\n\nRefused:\n\n{_table(refused)}\n\n{END}{after}")


def _table(rows):
    header, *rest = rows
    lines = [header, ["---"] * len(header), *rest]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))  # run by its path
    write()
