"""Plans that are executed change nothing that a training run gives, and have every rank compute what they say."""

import dataclasses

import torch

from tests.adapters.megatron.executed_plans import furthest, trained
from tests.adapters.megatron.grid import with_settings

FLOAT64 = {"moe_router_dtype": "fp64", "params_dtype": torch.float64, "pipeline_dtype": torch.float64}
EXACT = 1e-12


def check_cases(cases):
    """(case, kinds of plans) each."""
    for case, kinds in cases:
        case = in_float64(case)
        plain = trained(case, None)
        for planned in kinds:
            try:
                check_equal(plain, trained(case, planned), planned)
            except Exception as error:
                raise AssertionError(f"[{case}], {planned}: {error}") from error


def check_equal(plain, executed, planned):
    """Bits without replicas, units of float64 with them; and the plan was carried out."""
    apart = furthest(executed, plain)
    most = 0.0 if planned == "static" else EXACT
    assert max(apart.values()) <= most, f"{apart} away from the run with every expert at home"
    assert executed["off_plan"] == 0, f"{executed['off_plan']} cells computed other numbers of rows than planned"
    assert (executed["replicas"] > 0) == (planned != "static")


def in_float64(case):
    settings = {**dict(case.cell.settings), **FLOAT64}
    fields = {f.name: getattr(case.cell, f.name) for f in dataclasses.fields(case.cell) if f.name != "settings"}
    return dataclasses.replace(case, cell=with_settings(settings, **fields))
