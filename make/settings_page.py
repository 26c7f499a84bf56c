"""Writes docs/settings.md from the tests: each line is a mark `shows` of the test that shows it.

`make config-reference` runs it. Tests are read, not imported, as some need frameworks of an environment of their own:

    @pytest.mark.shows("TRL", "`torch_compile`")                                # works
    @pytest.mark.shows("TRL", "DeepSpeed", refused="it takes the model apart")  # refused, and why
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "settings.md"
FRAMEWORKS = ("Hugging Face", "TRL", "verl, FSDP engine", "verl, Megatron engine")
INTRO = """# Settings by framework

Look up whether replay goes with a setting of your script. *Works*: the linked test compares it with an independent
result, on CPUs. *Refused*: one error names it before anything is trained. *Not tried*: nobody has looked; so is what
stands neither here nor on the framework's page. [What runs where](where.md) has hardware and versions.
"""
NOT_TRIED = {
    "Hugging Face": (
        "4-bit, FP8 and MXFP4 weights that stay packed on a GPU",
        "FSDP1",
        "Unsloth itself; kernels of the Hub themselves",
        "sequence and context parallelism of `accelerate`",
    ),
    "TRL": (
        "images with vLLM or a `rollout_func`",
        "Liger's kernels themselves",
        "vLLM that is tensor-parallel, or beside experts spread by `ep_implementation`",
    ),
    "verl, FSDP engine": ("FP8 rollouts", "a real SGLang server", "images under Ulysses"),
    "verl, Megatron engine": (
        "FP8 rollouts",
        "Megatron-Bridge",
        "a real SGLang server",
        "images",
        "rollouts that draft (`model.mtp.enable_rollout`)",
    ),
}
SOURCE = "https://github.com/foreroute/foreroute/blob/main/"


class Shown(NamedTuple):
    """One line: of a framework, a setting, why it is refused, and the file of the test that shows it."""

    framework: str
    setting: str
    refused: str
    file: str


def settings_page(tests: Path = ROOT / "tests") -> str:
    """The text of the page.

    Raises:
        ValueError: for a mark that names no framework, or a setting that stands twice.
    """
    rows = [row for file in sorted(tests.rglob("test_*.py")) for row in _rows_of(file)]
    seen = [(row.framework, row.setting) for row in rows]
    wrong = {row for row in seen if row[0] not in FRAMEWORKS or seen.count(row) > 1}
    if wrong:
        raise ValueError(f"marks of {sorted(wrong)}: expected one of {FRAMEWORKS}, and each setting once")
    return INTRO + "".join(_lists(framework, rows) for framework in FRAMEWORKS)


def _rows_of(file: Path) -> Iterator[Shown]:
    text = file.read_text("utf-8")
    if "mark.shows(" not in text:
        return
    for function in ast.walk(ast.parse(text)):
        if not isinstance(function, ast.FunctionDef):
            continue
        for call in (node for decorator in function.decorator_list for node in ast.walk(decorator)):
            if isinstance(call, ast.Call) and ast.unparse(call.func).endswith("mark.shows"):
                framework, setting = (ast.literal_eval(arg) for arg in call.args)
                why = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
                yield Shown(framework, setting, why.get("refused", ""), file.relative_to(ROOT).as_posix())


def _lists(framework: str, rows: list[Shown]) -> str:
    mine = sorted((row for row in rows if row.framework == framework), key=lambda row: row.setting)
    works = [f"- [{row.setting}]({SOURCE}{row.file})" for row in mine if not row.refused]
    refused = [f"- [{row.setting}]({SOURCE}{row.file}): {row.refused}" for row in mine if row.refused]
    not_tried = [f"- {setting}" for setting in NOT_TRIED[framework]]
    parts = [f"\n## {framework}"]
    for title, lines in (("Works:", works), ("Refused:", refused), ("Not tried:", not_tried)):
        parts += [title, "\n".join(lines)]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(settings_page(), "utf-8")
