"""Words that the house no longer uses stay away from pages, docstrings and messages, and prose from tests of errors."""

import ast
import re
from pathlib import Path

import pytest

from tests.source_nodes import source_nodes

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


# words of a name, which is read as snake_case: `OneThread` is `_one_thread_`, and a function `_given` is `__given_()`
NAMES_INSTEAD = {
    "_(lent|lend|borrow|borrowed)_": "sends, hosted, fetch",
    "_(give|take)_up_": "release, load",
    "_(hand|hands|handed)_(on|over)_": "return, send",
    "_(send|bring)_home_": "return_grads",
    "_(is_)?again_": "is_recompute, or how often",
    "_refetch(ed)?_": "recompute",
    "_heed(s|ed)?_": "the verb of what is done",
    "_told_": "what is said: a message, an error",
    "_in_force_": "active",
    "_rivals?_": "baseline",
    "_late_checks_": "DeferredChecks",
    "_one_thread_": "ThreadGuard",
    r"^_+(given|joined|ended|level|note|tell)_\(\)$": "a verb with its object",
}


def fences_away(page):
    return re.sub(r"^```.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL)


def texts():
    """Place -> text, of every page, and of every string of the sources."""
    for page in sorted((ROOT / "docs").rglob("*.md")):
        yield page.relative_to(ROOT), fences_away(page.read_text(encoding="utf-8"))
    for path, nodes in source_nodes():
        for node in nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield f"{path}:{node.lineno}", node.value


def snake(name):
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name.removesuffix("()")).lower()
    return f"_{words}_" + "()" * name.endswith("()")


def names_of(nodes):
    """What a module names: functions, classes, arguments, variables and attributes, with their lines."""
    for node in nodes:
        if isinstance(node, ast.FunctionDef):
            yield node.lineno, f"{node.name}()"
        elif isinstance(node, ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


@pytest.fixture(scope="module")
def all_texts():
    return list(texts())


@pytest.fixture(scope="module")
def all_names():
    return [(f"{path}:{line}", name) for path, nodes in source_nodes() for line, name in names_of(nodes)]


@pytest.mark.parametrize("word", INSTEAD)
def test_a_word_is_gone(all_texts, word):
    assert not [place for place, text in all_texts if re.search(word, text, re.IGNORECASE if word[0] == "\\" else 0)]


def test_words_are_seen_where_they_stand():
    planted = ["a Seal on it", "waits in vain", "rows. Of which", "padding: likewise.", "sent astray"]
    seen = [re.search("|".join(INSTEAD), text, re.IGNORECASE) for text in planted]
    assert all(seen)
    assert fences_away("a\n```python\n# Of such\n```\nb").split() == ["a", "b"]


@pytest.mark.parametrize("word", NAMES_INSTEAD)
def test_a_word_is_gone_from_names(all_names, word):
    found = [f"{place} {name}" for place, name in all_names if re.search(word, snake(name))]
    assert not found, f"instead: {NAMES_INSTEAD[word]}"


def test_words_are_seen_in_names():
    planted = (
        "class HandedOn:\n    def give_up(self, lent_E, is_again):\n        self._rivals = told = 1\ndef _given(): ..."
    )
    seen = {
        name for _, name in names_of(ast.walk(ast.parse(planted))) if re.search("|".join(NAMES_INSTEAD), snake(name))
    }
    assert seen == {"HandedOn", "give_up()", "lent_E", "is_again", "_rivals", "told", "_given()"}


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
    planted = (
        'pytest.raises(E, match="the trace has 3 rows, and not so many")\npytest.raises(E, match=r"trace.*3 rows")'
    )
    assert [line for line, _ in prose_in_matches(ast.parse(planted))] == [1]
