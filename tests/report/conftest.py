"""Pages whose words alone are looked at have pictures that are not painted."""

import pytest
from matplotlib.figure import Figure


@pytest.fixture
def unpainted(monkeypatch):
    """Painting the pictures of a page takes a second; they are made up to there, and told in words."""
    monkeypatch.setattr(Figure, "savefig", lambda figure, buffer, **how: buffer.write(b"<svg></svg>"))
