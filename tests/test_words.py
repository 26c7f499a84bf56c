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


def prose_in_matches(tree):
    """The patterns of `pytest.raises` and `pytest.warns` with three plain words in a row, and their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("raises", "warns"):
            for keyword in node.keywords:
                text = getattr(keyword.value, "value", "") if keyword.arg == "match" else ""
                if not isinstance(text, str):
                    continue
                plain = re.sub(r"\\.|\[[^\]]*\]|[.*+?(){}|^$]", " # ", text)
                if re.search(r"(?:^|[^\w])[A-Za-z']{2,}[,;:]? [A-Za-z']{2,}[,;:]? [A-Za-z']{2,}", plain):
                    yield node.lineno, text


@pytest.mark.slow
def test_errors_are_matched_by_their_class_and_key_words():
    """So that a message can be said better; what it must hold are names, numbers and two words."""
    found = [
        (str(test.relative_to(ROOT)), *place)
        for test in sorted((ROOT / "tests").rglob("*.py"))
        for place in prose_in_matches(ast.parse(test.read_text(encoding="utf-8")))
    ]
    assert not found
    planted = 'pytest.raises(E, match="the trace has 3 rows, not 4")\npytest.raises(E, match=r"trace.*3 rows")'
    assert [line for line, _ in prose_in_matches(ast.parse(planted))] == [1]


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
