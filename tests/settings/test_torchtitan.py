"""The factor made of known rows, in the code of torchtitan that sizes HybridEP's buffer.

torchtitan 0.3.0 does not import under torch 2.13.0: its module wants `CustomClassBase` of `torch._library`, which is of
a later one. The function that sizes the buffer calls nothing, and is compiled from its file as it stands there.
"""

import ast
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from foreroute.errors import PlanError
from foreroute.layout import pack_sequences
from foreroute.plan import known_rows
from foreroute.testing.routes import synthetic_trace
from tests.settings.comparing import needs
from tests.traces import spec_of

pytestmark = needs("torchtitan")
RANKS, EXPERTS, TOP_K = 4, 8, 2
NAME = "_num_permuted_tokens_for_non_blocking"


@pytest.fixture(scope="module")
def buffer():
    """torchtitan's rows of a buffer."""
    (folder,) = find_spec("torchtitan").submodule_search_locations
    path = Path(folder) / "distributed" / "deepep" / "hybridep.py"
    tree = ast.parse(path.read_text("utf-8"))
    tree.body = [node for node in tree.body if getattr(node, "name", None) == NAME]
    found = {}
    exec(compile(tree, path, "exec"), found)
    return found[NAME]


@pytest.mark.parametrize("align", [1, 32])
def test_buffers_hold_every_row_and_a_tenth_less_drops_some(align, buffer):
    assert version("torchtitan") == "0.3.0"
    trace = synthetic_trace(spec_of(), [2400, 2000, 1600, 2800, 1200, 2200, 2640, 800], seed=0, correlation=0.7)
    packing, home_LE = pack_sequences(trace.lengths, RANKS, 2800), np.tile(np.arange(EXPERTS) // 2, (3, 1))
    rows = known_rows(trace, home_LE, packing=packing, align=align)
    given = rows.torchtitan_arguments()["non_blocking_capacity_factor"]
    most_M = [
        max(int(trace.lengths[packing.sequences(m, g)].sum()) for g in range(RANKS)) for m in range(len(rows.rows_MLG))
    ]

    def buffers(factor):
        sizes = [
            buffer(tokens, RANKS, EXPERTS // RANKS, TOP_K, factor, align if align > 1 else None) for tokens in most_M
        ]
        return np.array(sizes)[:, None, None]

    rows.require_room(buffers(given))
    with pytest.raises(PlanError, match="are reserved"):
        rows.require_room(buffers(0.9 * given))
