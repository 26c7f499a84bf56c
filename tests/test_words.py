"""Words that the house no longer uses, names that two things would share, errors without a remedy: there are none."""

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
INSTEAD = {
    r"\bseals?\b": "checksum",
    r"\bin vain\b": "what did not come",
    r"\bastray\b": "sent to the wrong ranks",
    r"\bheed(s|ed)?\b": "the verb of what is done",
    r"\bleads nowhere\b": "does not exist",
    r"\blikewise\b": "say it again",
    r"\bfor want of\b": "is missing",
    r"\btruth value\b": "bool",
    r"\bso many\b(?! words)": "this many",
    r"\bmisfits?\b": "what does not fit",
    r"\brivals?\b": "baseline",
    r"(?:^|[.!?]\s+|\n\s*- )Of [A-Za-z`\d]": "a sentence begins with its subject",
}


@cache
def source_nodes():
    """Each module, as a path below `src`, with all its nodes."""
    return [
        (path.relative_to(ROOT / "src"), [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))])
        for path in sorted((ROOT / "src").rglob("*.py"))
    ]


def fences_away(page):
    return re.sub(r"^```.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL)


def test_words_are_gone():
    """From every page, and from every string of the sources."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    texts = [(page, fences_away(page.read_text(encoding="utf-8"))) for page in pages]
    for path, nodes in source_nodes():
        strings = [node for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
        texts += [(f"{path}:{node.lineno}", node.value) for node in strings]
    for word in INSTEAD:
        how = re.IGNORECASE if word[0] == "\\" else 0
        assert not [place for place, text in texts if re.search(word, text, how)], word


def test_words_are_seen_where_they_stand():
    planted = ["a Seal on it", "rows. Of which"]
    seen = [re.search("|".join(INSTEAD), text, re.IGNORECASE) for text in planted]
    assert all(seen)
    assert fences_away("a\n```python\n# Of such\n```\nb").split() == ["a", "b"]


def docstrings_without_subject(nodes):
    """Lines of docstrings, of constants and fields too, that begin with a question or a conjunction."""
    opening = re.compile(r"(What|Which|How|Where|Whether|That|Who|Whose|Why|When|With|And)\b")
    strings = [node.value for node in nodes if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)]
    return [each.lineno for each in strings if isinstance(each.value, str) and opening.match(each.value.lstrip())]


def test_docstrings_begin_with_a_verb_or_a_noun():
    assert not [f"{path}:{line}" for path, nodes in source_nodes() for line in docstrings_without_subject(nodes)]
    planted = '"""How to plan."""\nA = 1\n"""With data."""\ndef f():\n    """Whatever is."""\n    """Which."""'
    assert docstrings_without_subject(ast.walk(ast.parse(planted))) == [1, 3, 6]


def test_nobody_is_told_to_install_a_name_that_is_not_ours():
    """foreroute is in no package index; whoever registers the name would own every reader's machine."""
    told = re.compile(r"foreroute\[[a-z,]+\]|(install|add|download)[^\S\n]+(-\S+\s+)*['\"]?foreroute\b(?! @)")
    places = ("src", "docs", "examples", "make", "benchmarks", "experiments")
    read = [ROOT / "README.md", ROOT / "Makefile", *(path for place in places for path in (ROOT / place).rglob("*"))]
    suffixes = {".py", ".md", ".j2", ".toml", ".mk", ".sh", ""}
    texts = {path: path.read_text(errors="replace") for path in read if path.is_file() and path.suffix in suffixes}
    assert len(texts) > 300
    assert not [path for path, text in texts.items() if told.search(text)]
    planted = (
        "pip install 'foreroute[report]'",
        "    pip install -U foreroute  # on every node",
        "pip install '.[hf]'",
    )
    assert [bool(told.search(text)) for text in planted] == [True, True, False]


def rows_of(table, names):
    """What a loop over this table goes through; of a dictionary, values."""
    match table:
        case ast.Tuple(elts=rows) | ast.List(elts=rows) | ast.Dict(values=rows):
            return rows
        case ast.Name(id=name):
            return [row for bound in names.get(name, []) for row in rows_of(bound, names | {name: []})]
        case ast.Call(func=ast.Attribute(value=inner, attr="values" | "items" as part)):
            rows = rows_of(inner, names)
            return rows if part == "values" else [ast.Tuple([ast.Constant(0), row]) for row in rows]
    return []


def bind(target, value, names):
    """Adds to `names` what this value gives to each name of a target."""
    match target, value:
        case ast.Name(id=name), _:
            names[name].append(value)
        case ast.Tuple(), ast.Subscript(value=table) | ast.Call(func=ast.Attribute(value=table, attr="get")):
            for row in rows_of(table, names):
                bind(target, row, names)
        case ast.Tuple(elts=targets), ast.Tuple(elts=parts) | ast.Call(args=parts):
            for one, part in zip(targets, parts, strict=False):
                bind(one, part, names)


def names_in(tree):
    """By name, all that a file binds to it: assigned, in a loop, in a column of a table, as an argument."""
    names, nodes = defaultdict(list), sorted(ast.walk(tree), key=lambda node: getattr(node, "lineno", 0))
    parameters = {node.name: node.args.args for node in nodes if isinstance(node, ast.FunctionDef)}
    for node in nodes:
        target, rows = None, []
        match node:
            case ast.Assign(targets=[target], value=value):
                rows = [value]
            case ast.For(target=target, iter=table) | ast.comprehension(target=target, iter=table):
                rows = rows_of(table, names)
            case ast.Call(func=ast.Attribute(attr="parametrize") | ast.Name(id="grid"), args=[first, table, *_]):
                columns = [ast.Name(name) for name in re.findall(r"\w+", ast.unparse(first))]
                target, rows = ast.Tuple(columns) if columns[1:] else columns[0], rows_of(table, names)
            case ast.Call(func=ast.Name(id=name)) if name in parameters:
                target, rows = ast.Tuple([ast.Name(each.arg) for each in parameters[name]]), [node]
        for row in rows:
            bind(target, row, names)
    return names


def texts_of(node, names):
    """The strings that an expression may be made of, and their lines."""
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield part.lineno, part.value
        for bound in names.get(getattr(part, "id", ""), []):
            yield from texts_of(bound, names | {part.id: []})


def prose_in_matches(tree):
    """Texts with three plain words in a row that are held against messages, wherever they stand, and their lines."""
    names, patterns = names_in(tree), []
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(attr="raises" | "warns"), keywords=given):
                patterns += [each.value for each in given if each.arg == "match"]
            case ast.Call(func=ast.Name(id="refuses"), args=[_, pattern, _]):
                patterns.append(pattern)
            case ast.Compare(left=said, comparators=[message]) if ".value)" in ast.unparse(message):
                patterns.append(said)
    for line, text in sorted({found for pattern in patterns for found in texts_of(pattern, names)}):
        plain = re.sub(r"\\.|\[[^\]]*\]|[.*+?(){}|^$]", " # ", text)
        if re.search(r"(?:^|[^\w])[A-Za-z']{2,}[,;:]? [A-Za-z']{2,}[,;:]? [A-Za-z']{2,}", plain):
            yield line, text


PLANTED = """
TABLE, TWO = {"is no pattern": (0, "the trace has 5")}, "the trace has 2"
pytest.raises(E, match="the trace has 1"), pytest.warns(E, match=f"{name}.*{TWO}")
@pytest.mark.parametrize("row, said", [(0, "the trace has 3"), pytest.param("is no pattern", "trace.*row")])
def test(row, said): pytest.raises(E, match=said)
for _, (_, words) in {"is no pattern": ("is no pattern", "the trace has 4")}.items(): pytest.raises(E, match=words)
_, text = TABLE[each]
def refused(given, pattern): refuses(E, pattern, pytest.raises(E, match="a" + text))
refused("is no pattern", "the trace has 6")
assert refuses(E, "the trace has 7", "is no pattern") or "the trace has 8" in str(told.value)
"""


@pytest.mark.slow
def test_errors_are_matched_by_their_class_and_key_words():
    """So that a message can be said better; what it must hold are names, numbers and two words."""
    found = [
        (str(test.relative_to(ROOT)), *place)
        for test in sorted((ROOT / "tests").rglob("*.py"))
        for place in prose_in_matches(ast.parse(test.read_text(encoding="utf-8")))
    ]
    assert not found, "a name that is bound to a pattern is bound to nothing else in that file"
    assert sorted(text for _, text in prose_in_matches(ast.parse(PLANTED))) == [
        f"the trace has {n}" for n in range(1, 9)
    ]


def test_every_folder_with_modules_of_the_tests_is_a_package():
    """A module of another folder would be imported under its bare name, where it may hide one or be hidden."""
    folders = {path.parent.relative_to(ROOT) for path in (ROOT / "tests").rglob("*.py")}
    assert not [each for each in folders if "fake" not in each.parts and not (ROOT / each / "__init__.py").exists()]


def test_no_two_public_classes_share_a_name():
    where = defaultdict(list)
    for path, nodes in source_nodes():
        for node in nodes:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                where[node.name].append(f"{path}:{node.lineno}")
    assert {name: places for name, places in where.items() if len(places) > 1} == {}


def error_classes():
    """Names of `ForerouteError` and of all public classes below it."""
    classes = [
        node for _, nodes in source_nodes() for node in nodes if isinstance(node, ast.ClassDef) and node.name[0] != "_"
    ]
    found, before = {"ForerouteError"}, set()
    while found != before:
        before = set(found)
        found |= {node.name for node in classes if before & {ast.unparse(base) for base in node.bases}}
    return found


def faults_of_remedies(page, classes, texts):
    """Classes without a remedy or unknown, and quotations of no message."""
    sections = re.findall(r"^### (\w+)$(.*?)(?=^##|\Z)", page, re.MULTILINE | re.DOTALL)
    remedied = {name for name, text in sections if re.search(r"\*\*Do:\*\*\s+\S", text)}
    quoted = re.findall(r'^> "(.+)"$', page, re.MULTILINE)
    return sorted(classes ^ remedied), [quotation for quotation in quoted if quotation not in texts]


@pytest.mark.slow
def test_every_error_has_its_remedy_and_every_quotation_is_of_a_message():
    page, classes = (ROOT / "docs" / "errors.md").read_text(), error_classes()
    every = [node for _, nodes in source_nodes() for node in nodes]
    documentation = {id(node.value) for node in every if isinstance(node, ast.Expr)}
    strings = [node for node in every if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    # what f-strings fill in divides a message
    texts = "\n".join(node.value for node in strings if id(node) not in documentation)
    assert faults_of_remedies(page, classes, texts) == ([], [])
    assert faults_of_remedies(page.replace("### LayoutError\n", ""), classes, texts)[0] == ["LayoutError"]
