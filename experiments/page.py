"""`docs/evidence.md` and the figures behind it, from the results alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from experiments.arms import Arms
from experiments.cells import Cell
from experiments.claimed import claims
from experiments.claims import ENOUGH, VERDICTS, judged
from experiments.grid import FEW, FRESH, SEEDS
from experiments.page_tables import tables
from experiments.plots import draw_all
from experiments.runner import current

FIGURES = "https://github.com/foreroute/foreroute/blob/main/experiments/results.md"


def write_page(cells: Sequence[Cell], results: Path, page: Path) -> None:
    """Draw the page, the pictures beside it in a folder of its name, and the figures beside the results."""
    done = current(cells, results)
    pictures = draw_all(Arms(done), page.with_suffix(""))
    page.write_text(page_text(cells, done, pictures, page.stem), encoding="utf-8")
    results.with_suffix(".md").write_text(figures_text(cells, done), encoding="utf-8")


def page_text(
    cells: Sequence[Cell], done: Mapping[str, dict[str, Any]], pictures: Mapping[str, str], folder: str
) -> str:
    """Write the page: findings, verdicts, how it was measured, and pictures by name in a folder."""
    arms = Arms(done)
    found = judged(claims(), arms)
    return _render(
        "evidence.md.j2",
        finished=len(done),
        cells=len(cells),
        few=len(FEW),
        hours=sum(line["processor_s"] for line in done.values()) / 3600,
        versions=_versions(done.values()),
        found={row.claim: row.found for row in found},
        claims=len(found),
        verdicts={verdict: count for verdict in VERDICTS if (count := sum(row.verdict == verdict for row in found))},
        figures=FIGURES,
        noise={row[0]: row for row in tables()["noise"].lines(arms)},
        regimes={row[0]: row for row in tables()["boundary"].lines(arms)},
        summary=[row for name in ("swing", "summary") for row in tables()[name].lines(arms)],
        places=tables()["summary"].columns[1:],
        pictures=[f"![{words}]({folder}/{name}.svg)" for name, words in pictures.items()],
    )


def figures_text(cells: Sequence[Cell], done: Mapping[str, dict[str, Any]]) -> str:
    """Write every comparison and every arm, in tables."""
    arms = Arms(done)
    found = judged(claims(), arms)
    by_quantity = {
        name: [claim for claim in found if claim.quantity == name] for name in dict.fromkeys(c.quantity for c in found)
    }
    return _render(
        "results.md.j2",
        finished=len(done),
        cells=len(cells),
        seeds=len(SEEDS),
        fresh=len(FRESH),
        enough=ENOUGH,
        early=sum("trainer" not in line for line in done.values()),
        claims=by_quantity,
        tables=tables(),
        arms=arms,
    )


def _render(template: str, **values: object) -> str:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    return environment.get_template(template).render(values)


def _versions(lines: Iterable[dict[str, Any]]) -> str:
    found = {f"{name} {number}" for line in lines for name, number in line["versions"].items()}
    return ", ".join(sorted(found))
