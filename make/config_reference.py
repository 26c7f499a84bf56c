"""Writes the keys of configurations into docs/train.md and docs/simulate.md, from the configurations in the code.

`make config-reference` runs it. A key's text is the string under it, or its entry under "Attributes:" where a table is
a plain dataclass. A key without one is an error.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import textwrap
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from foreroute.costs.cluster_file import TABLES, keys_of
from foreroute.files.config_file import Section
from foreroute.simulate.config import SimulateConfig
from foreroute.train.config import TrainConfig

DOCS = Path(__file__).parent.parent / "docs"
HEADING = "\n## Keys\n"
"""The section that is written anew, up to the end of its page."""
TRAINING = """The default comes first, then the type or other values. Numbers are above 0 unless the range, default or
text says otherwise; [0, 1) excludes 1; upper limits above 1,000 are not shown.
Unknown keys and wrong values are errors. A file has at most 64 KiB."""
SIMULATION = """Keys of `foreroute simulate FILE`, [read as those of a run](train.md#keys)."""
TOPOLOGY = """Keys of [the planner's file](planner.md#the-topology-file). Keys without a default are required, or
come from a preset: `ranks_per_node` and `[links]` from the hardware's."""
PLAIN = {bool: "true or false", int: "integer", float: "number", str: "text", Any: "anything"}
LEAST, MOST = {Ge: ("ge", "≥", "["), Gt: ("gt", ">", "(")}, {Le: ("le", "≤", "]"), Lt: ("lt", "<", ")")}
SHOWN = 1000
"""Upper bounds beyond it only keep out mistakes."""
UNSAID = ((1, "≥"), (0, ">"))
"""What the pages say of all numbers at once."""


def pages() -> dict[Path, str]:
    """Write each page with its keys."""
    topology = ["### Topology file", "", TOPOLOGY, "", *topology_tables()]
    sections = {
        "train.md": [TRAINING, "", *tables(TrainConfig)],
        "simulate.md": [SIMULATION, "", *tables(SimulateConfig), *topology],
    }
    written = {}
    for name, lines in sections.items():
        before = (DOCS / name).read_text(encoding="utf-8").partition(HEADING)[0]
        written[DOCS / name] = f"{before}{HEADING}\n" + "\n".join(lines).rstrip() + "\n"
    return written


def tables(cls: type[Section], name: str = "") -> Iterator[str]:
    """The lines of a table, then those of the tables in it."""
    if name:
        yield from (f"### [{name}]", "", _first_paragraph(cls), "")
    texts, rows, inner = _attribute_docstrings(cls), [], []
    for key, info in cls.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, Section):
            inner.append((info.annotation, f"{name}.{key}" if name else key))
            continue
        annotation = Annotated[(info.annotation, *info.metadata)] if info.metadata else info.annotation
        default = "required" if info.is_required() else _shown(info.get_default(call_default_factory=True))
        rows.append((key, _values(annotation, default), _required(texts, key, cls)))
    yield from _list(rows)
    for child, path in inner:
        yield from tables(child, path)


def topology_tables() -> Iterator[str]:
    """Write tables whose keys are the attributes of dataclasses."""
    for name, cls in TABLES.items():
        yield from (f"#### [{name}]", "", _first_paragraph(cls), "")
        texts, hints = _attributes_section(cls), get_type_hints(cls)
        known = keys_of(name)
        rows = [
            (
                field.name,
                "" if field.default is MISSING else _values(hints[field.name], _shown(field.default)),
                _required(texts, field.name, cls),
            )
            for field in fields(cls)
            if field.name in known
        ]
        if "preset" in known:
            rows.insert(0, ("preset", PLAIN[str], "Values for the other keys, which override it."))
        yield from _list(rows)


def _values(annotation: Any, default: str) -> str:
    """The default, and what else a key takes."""
    if get_origin(annotation) is Literal:
        return ", ".join(dict.fromkeys([default, *type_words(annotation).split(", ")]))
    if annotation is bool:
        return default
    words = type_words(annotation)
    if default == "`[]`":
        return "" if "number" in words or "integer" in words else words
    if default not in ("", "required"):  # which shows the type
        words = re.sub(r"^(integer|number|text|table|list of text) ?", "", words)
    if words == "≥ 0" and default in ("`0`", "`0.0`"):
        words = ""
    return ", ".join(filter(None, [default, words]))


def type_words(annotation: Any) -> str:
    """A type in a reader's words, with the values that it takes."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return f"{type_words(arguments[0])} {_range(arguments[1:])}".strip()
    if origin is Literal:
        return ", ".join(f"`{json.dumps(value)}`" for value in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(type_words(each) for each in arguments if each is not type(None))
    if origin in (list, tuple):
        return f"list of {type_words(arguments[0])}"
    if origin in (dict, Mapping) or is_dataclass(annotation):
        return "table"
    return PLAIN.get(annotation, getattr(annotation, "__name__", str(annotation)))


def _range(metadata: Iterable[Any]) -> str:
    """An interval, or the one bound there is."""
    flat = [part for each in metadata for part in (each.metadata if isinstance(each, FieldInfo) else [each])]
    least, most = _bound(flat, LEAST), _bound(flat, MOST)
    if least[1] and most[1] and most[0] <= SHOWN:
        return f"in {least[2]}{least[0]:,g}, {most[0]:,g}{most[2]}"
    shown = [one for one in (least, most) if one[1] and one[0] <= SHOWN and one[:2] not in UNSAID]
    return " ".join(f"{sign} {bound:,g}" for bound, sign, _ in shown)


def _bound(metadata: Iterable[Any], constraints: Mapping[type, tuple[str, str, str]]) -> tuple[float, str, str]:
    """The bound, its sign, and its bracket; empty words where there is none."""
    for each in metadata:
        for constraint, (attribute, sign, bracket) in constraints.items():
            if isinstance(each, constraint):
                return getattr(each, attribute), sign, bracket
    return 0, "", ""


def _shown(value: Any) -> str:
    return "" if value is None or is_dataclass(value) else f"`{json.dumps(value)}`"


def _list(rows: list[tuple[str, str, str]]) -> Iterator[str]:
    for (values, text), alike in groupby(rows, key=lambda row: row[1:]):
        keys = ", ".join(f"**`{key}`**" for key, *_ in alike)
        yield f"- {keys} {values}. {text}" if values else f"- {keys} {text}"
    yield ""


def _required(texts: Mapping[str, str], key: str, cls: type) -> str:
    if key not in texts:
        raise SystemExit(f"{cls.__module__}.{cls.__name__}.{key} says nowhere what it means; write a string under it")
    return texts[key]


def _first_paragraph(cls: type) -> str:
    return _joined((inspect.getdoc(cls) or "").split("\n\n")[0])


def _attribute_docstrings(cls: type) -> dict[str, str]:
    """The string literal that follows each annotated name in the body of a class."""
    [definition] = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(definition, ast.ClassDef), "the source of a class is a class"
    texts = {}
    for before, after in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(before, ast.AnnAssign) and isinstance(before.target, ast.Name) and isinstance(after, ast.Expr):
            texts[before.target.id] = _joined(ast.literal_eval(after.value))
    return texts


def _attributes_section(cls: type) -> dict[str, str]:
    assert is_dataclass(cls), "tables without strings under their keys are dataclasses"
    section = (inspect.getdoc(cls) or "").split("Attributes:\n")[-1].split("\n\n")[0]
    entries = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", section, re.MULTILINE)
    # what follows the first letter stays: single letters such as E, and quoted values
    return {name: text[:1].upper() + _joined(text)[1:] for name, text in entries}


def _joined(text: str) -> str:
    return " ".join(text.split())


if __name__ == "__main__":
    for page, text in pages().items():
        page.write_text(text, encoding="utf-8")
