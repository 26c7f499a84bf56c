"""The families of docs/huggingface.md, and the checks that do not apply to one: written by running this file."""

import functools
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs/huggingface.md"
BEGIN, END = "<!-- support table -->", "<!-- end of support table -->"
HOW_TO_UPDATE = "write it anew with `python tests/adapters/hf/support_table.py`"


@functools.cache
def committed():
    """{family: its gate, its class unless it is a usual one, and {check: why it does not apply}} of the page."""
    by_gate, exceptions, _ = _lists()
    found = {}
    for gate, names in by_gate:
        for name, _, model in (part.removesuffix(")").partition(" (") for part in names.split(", ")):
            found[name] = (gate, model, {})
    for check, said in exceptions:
        names, _, reason = said.partition(": ")
        for name in names.split(", "):
            found[name][2][check] = reason
    return found


@functools.cache
def committed_refusals():
    return dict(_lists()[2])


def class_to_name(model):
    return "" if model.endswith("ForCausalLM") else model


def _lists():
    blocks = PAGE.read_text().partition(BEGIN)[2].partition(END)[0].split("\n\n")
    return [re.findall(r"^- \*\*(.*?)\*\*: (.*)$", block, re.MULTILINE) for block in blocks if block[:2] == "- "]


def write():
    """Run every check on every family and put the outcome into the page."""
    import torch
    import transformers

    from tests.adapters.hf.families import FAMILIES
    from tests.adapters.hf.family_checks import CHECKS
    from tests.adapters.hf.family_gates import GATES
    from tests.adapters.hf.family_refusals import REFUSED, refusal

    torch.set_num_threads(1)
    by_gate, exceptions = {}, {}
    for name, model_class in FAMILIES.items():
        model = class_to_name(model_class)
        by_gate.setdefault(str(GATES[name]), []).append(f"{name} ({model})" if model else name)
        for check in CHECKS:
            if reason := check(name):
                exceptions.setdefault((check.__name__, reason), []).append(name)
    told = f"{len(FAMILIES)} families of transformers {transformers.__version__} pass, by gate:"
    gates = [(gate, ", ".join(names)) for gate, names in by_gate.items()]
    not_applied = [(check, f"{', '.join(names)}: {reason}") for (check, reason), names in sorted(exceptions.items())]
    refused = [(name, refusal(name)) for name in REFUSED]
    before, _, rest = PAGE.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    parts = [told, _list(gates), "A check does not apply to", _list(not_applied), "Refused:", _list(refused)]
    PAGE.write_text("\n\n".join([before + BEGIN, *parts, END + after]))


def _list(items):
    return "\n".join(f"- **{name}**: {said}" for name, said in items)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))  # run by its path
    write()
