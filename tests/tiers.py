"""Which cells of a grid `make test` runs, which CI runs too (they are slow), and which run by night (exhaustive)."""

import pytest


def grid(names, values, *, quick, day=None, **options):
    """`pytest.mark.parametrize`, of which so many cells, spread over the values, are run by `make test`.

    Args:
        names: of the arguments, as `parametrize` takes them; a tuple or list where there are several.
        values: by cell. Marks that one has already stay, and one that is slow by itself is not counted.
        quick: how many cells are not marked slow.
        day: how many are not exhaustive; all by default.
        options: of `parametrize`, such as ids.
    """
    cells = [_cell(names, value) for value in values]
    places = [place for place, cell in enumerate(cells) if not cell.marks]
    kept, by_day = (_spread(places, count) for count in (quick, len(places) if day is None else day))

    def marked(place, cell):
        if place in kept or cell.marks:
            return cell
        when = pytest.mark.slow if place in by_day else pytest.mark.exhaustive
        return pytest.param(*cell.values, marks=when, id=cell.id)

    return pytest.mark.parametrize(names, [marked(*each) for each in enumerate(cells)], **options)


def _cell(names, value):
    if isinstance(value, type(pytest.param())):
        return value
    return pytest.param(value) if isinstance(names, str) else pytest.param(*value)


def _spread(places, count):
    """So many of these."""
    return {places[number * len(places) // count] for number in range(count)} if count < len(places) else set(places)
