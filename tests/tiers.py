"""Which cells of a grid `make test` runs. The others are slow: CI runs them, as every test that is not exhaustive."""

import pytest


def grid(names, values, *, quick, **options):
    """`pytest.mark.parametrize`, of which so many cells, spread over the values, are run by `make test`.

    Args:
        names: of the arguments, as `parametrize` takes them; a tuple or list where there are several.
        values: by cell. Marks that one has already stay, and one that is slow by itself is not counted.
        quick: how many cells are not marked slow.
        options: of `parametrize`, such as ids.
    """
    cells = [_cell(names, value) for value in values]
    places = [place for place, cell in enumerate(cells) if not cell.marks]
    kept = {places[number * len(places) // quick] for number in range(quick)} if quick < len(places) else set(places)
    slow = [
        cell if place in kept or cell.marks else pytest.param(*cell.values, marks=pytest.mark.slow, id=cell.id)
        for place, cell in enumerate(cells)
    ]
    return pytest.mark.parametrize(names, slow, **options)


def _cell(names, value):
    if isinstance(value, type(pytest.param())):
        return value
    return pytest.param(value) if isinstance(names, str) else pytest.param(*value)
