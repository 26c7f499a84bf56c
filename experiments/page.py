"""`docs/evidence.md` and the figures behind it, from the results alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from experiments.arms import Arms
from experiments.cells import Cell
from experiments.claims import claims
from experiments.grid import FEW, FRESH, SEEDS
from experiments.plots import draw_all
from experiments.premise_tables import (
    PLACES,
    balancers_table,
    facts_table,
    generators_table,
    loads_table,
    simulated_table,
    summary_table,
)
from experiments.rows import ENOUGH, VERDICTS, Row
from experiments.runner import current
from experiments.tables import (
    boundary_table,
    later_runs_table,
    noise_table,
    other_runs_table,
    replay_table,
    static_table,
)

FIGURES = "https://github.com/foreroute/foreroute/blob/main/experiments/results.md"


def write_page(cells: Sequence[Cell], results: Path, page: Path) -> None:
    """Draw the page, the pictures beside it in a folder of its name, and the figures beside the results.

    Args:
        cells: of the grid; results of others, or of other settings, are left out.
        results: one JSON object per finished cell; the figures get its name and the ending `.md`.
        page: to write.
    """
    done = current(cells, results)
    pictures = draw_all(Arms(done), page.with_suffix(""))
    page.write_text(page_text(cells, done, pictures, page.stem), encoding="utf-8")
    results.with_suffix(".md").write_text(figures_text(cells, done), encoding="utf-8")


def page_text(
    cells: Sequence[Cell], done: Mapping[str, dict[str, Any]], pictures: Mapping[str, str], folder: str
) -> str:
    """The page: findings, verdicts, how it was measured, pictures.

    Args:
        cells: of the grid.
        done: results by name.
        pictures: what each of the pictures shows, by name.
        folder: where they are, from the page.
    """
    found = claims(Arms(done))
    return _render(
        "evidence.md.j2",
        finished=len(done),
        cells=len(cells),
        seeds=len(SEEDS),
        fresh=len(FRESH),
        few=len(FEW),
        enough=ENOUGH,
        hours=sum(line["processor_s"] for line in done.values()) / 3600,
        versions=_versions(done.values()),
        found={row.claim: row.found for row in found},
        claims=len(found),
        verdicts={verdict: count for verdict in VERDICTS if (count := sum(row.verdict == verdict for row in found))},
        figures=FIGURES,
        noise={row[0]: row for row in noise_table(Arms(done))},
        summary=summary_table(Arms(done)),
        places=list(PLACES),
        pictures=[f"![{words}]({folder}/{name}.svg)" for name, words in pictures.items()],
    )


def figures_text(cells: Sequence[Cell], done: Mapping[str, dict[str, Any]]) -> str:
    """Every comparison and every arm, in tables.

    Args:
        cells: of the grid.
        done: results by name.
    """
    arms = Arms(done)
    return _render(
        "results.md.j2",
        finished=len(done),
        cells=len(cells),
        claims=_by_quantity(claims(arms)),
        static=static_table(arms),
        replays=replay_table(arms),
        runs=other_runs_table(arms),
        boundary=boundary_table(arms),
        facts=facts_table(arms),
        loads=loads_table(arms),
        balancers=balancers_table(arms),
        generators=generators_table(arms),
        simulated=simulated_table(arms),
        noise=noise_table(arms),
        later=later_runs_table(arms),
        few=len(FEW),
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


def _by_quantity(rows: Sequence[Row]) -> dict[str, list[Row]]:
    return {name: [row for row in rows if row.quantity == name] for name in dict.fromkeys(r.quantity for r in rows)}
