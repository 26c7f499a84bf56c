"""Every MoE family of the installed transformers, checked; docs/huggingface.md says exactly what came out."""

import re

import pytest
from transformers.models.auto.configuration_auto import model_type_to_module_name
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from tests.adapters.hf import support_table
from tests.adapters.hf.families import FAMILIES, MODELLING, lacks, skip_in_older
from tests.adapters.hf.family_checks import (
    CHECKS,
    backends,
    checkpointing,
    configuration,
    foreign,
    is_newest,
    native,
    record,
)
from tests.adapters.hf.family_gates import GATES
from tests.adapters.hf.family_refusals import REFUSED, refusal

ROUTES = re.compile(r"^class (\w*(?:MoE|Moe|MOE|Experts?|Router|TopKGating)\w*)\(", re.MULTILINE)
AT_ONCE = [
    *("dbrx", "deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4", "dots1", "gemma4", "glm5_next"),
    *("gpt_oss", "hunyuan_v1_moe", "inkling", "jamba", "jetmoe", "lfm2_moe", "llama4", "longcat_flash"),
    *("mixtral", "olmoe", "phimoe", "qwen3_moe", "qwen3_vl_moe", "step3p7", "zaya"),
]
"""One of each kind of gate, selection and attention, which `make test` looks at. The others are like one."""
LONG = [native, checkpointing, backends, configuration]
"""These find what families alike have alike. CI has two of them of a family that is in `AT_ONCE`, by turns."""
LONG_AT_ONCE = ["deepseek_v3", "qwen3_moe"]
"""Families of which `make test` has every check."""
ROUTES_NO_TOKENS = {"granite_docling": "its density router regresses a number of pages; there are no experts"}


def test_every_family_of_transformers_is_here():
    """Fails when transformers adds a family: give it a tiny configuration and a gate, or a refusal."""
    routing = {path: path.read_text() for path in MODELLING.glob("*/modeling_*.py") if ROUTES.search(path.read_text())}
    classes = "".join(routing.values())
    has_code = {path.parent.name for path in MODELLING.glob("*/modeling_*.py")}
    configured = {
        model_type
        for model_type, model in MODEL_MAPPING_NAMES.items()
        if model_type_to_module_name(model_type) not in has_code and f"class {model}(" in classes
    }
    upstream = {path.parent.name for path in routing} | configured
    here = {name for name in FAMILIES.keys() | REFUSED.keys() if (MODELLING / name).exists()}
    assert upstream - ROUTES_NO_TOKENS.keys() == here
    assert GATES.keys() == FAMILIES.keys()
    assert {str(GATES[name]) for name in AT_ONCE} == {str(gate) for gate in GATES.values()}
    if reasons := [why for why in map(lacks, FAMILIES) if why]:
        skip_in_older(", ".join(reasons))


def marks_of(name, check):
    if name not in AT_ONCE:
        return pytest.mark.slow if check is foreign else pytest.mark.exhaustive
    if name in LONG_AT_ONCE or check is foreign:
        return ()
    if check is record:
        return () if name in ("dbrx", "jetmoe") else pytest.mark.slow  # whose routers select by functions of their own
    is_by_day = name == "gpt_oss" or LONG.index(check) % 2 == AT_ONCE.index(name) % 2
    return pytest.mark.slow if is_by_day else pytest.mark.exhaustive


@pytest.mark.shows("Hugging Face", "73 families, left and right padding, checkpointing of both kinds")
@pytest.mark.parametrize(
    ("name", "check"),
    [
        pytest.param(name, check, marks=marks_of(name, check), id=f"{name}-{check.__name__}")
        for name in FAMILIES
        for check in CHECKS
    ],
)
def test_family(name, check):
    why_not = check(name)
    *_, exceptions = support_table.committed()[name]
    if is_newest():  # the page is of that one
        assert exceptions.get(check.__name__) == why_not, support_table.HOW_TO_UPDATE


@pytest.mark.parametrize("name", REFUSED)
def test_refused_family(name):
    assert support_table.committed_refusals().get(name) == refusal(name), support_table.HOW_TO_UPDATE


def test_the_committed_table_has_these_families_and_no_others():
    rows = support_table.committed()
    assert sorted(rows) == sorted(FAMILIES)
    assert list(support_table.committed_refusals()) == list(REFUSED)
    for name, (gate, model, exceptions) in rows.items():
        if is_newest():  # an older release may lack the class
            assert (gate, model) == (str(GATES[name]), support_table.class_to_name(FAMILIES[name]))
        assert exceptions.keys() <= {check.__name__ for check in CHECKS}
