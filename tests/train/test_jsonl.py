"""Data sets: what a line may be, and the words for what it may not."""

import pytest

from foreroute.errors import DatasetError
from foreroute.train.tasks.jsonl import parse_rows


def parsed(*lines, end="\n"):
    content = b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines) + end.encode()
    return parse_rows(content, "data.jsonl")


def test_rows_keep_what_they_have():
    lines = [
        '{"prompt": "3*4?", "answer": 12, "level": {"hard": true}}',
        '{"messages": [{"role": "user", "content": "größer?"}], "answer": "ja"}',
    ]
    one, two = parsed(*lines, end="")
    assert one.values == {"prompt": "3*4?", "answer": "12", "level": {"hard": True}}
    assert two.values == {"messages": [{"role": "user", "content": "größer?"}], "answer": "ja"}
    assert two.where.endswith("data.jsonl, line 2")


GOOD = '{"prompt": "3*4?"}'


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", r"'' is not JSON"),
        ("{", r"'\{' is not JSON"),
        ("[1]", r'a list; expected an object such as \{"prompt"'),
        ("3", "a number; expected an object"),
        ("{}", r"neither of \"prompt\" and \"messages\" \(keys: none\); expected one of the two"),
        ('{"prompt": "a", "messages": []}', r"both of"),
        ('{"promt": "a"}', r"keys: promt"),
        ('{"prompt": ""}', "\"prompt\" is ''; expected text"),
        ('{"prompt": 3}', "\"prompt\" is '3'; expected text"),
        ('{"messages": []}', "expected a list of messages"),
        ('{"messages": ["hi"]}', r"message 1 is 'hi'; expected \{\"role\""),
        ('{"messages": [{"role": "user", "content": ["hi"]}]}', "both text"),
        ('{"messages": [{"role": "user", "content": "hi", "name": "x"}]}', "message 1 is"),
        ('{"prompt": "a", "answer": null}', "\"answer\" is 'null'; expected text or a number"),
        ('{"prompt": "a", "answer": true}', "expected text or a number"),
        ('{"prompt": "a", "prompt": "b"}', 'key "prompt" is there twice'),
        ('{"prompt": "a", "x": NaN}', "NaN is no JSON number"),
        (b'{"prompt": "\xff"}', "is not JSON .*utf-8"),
        ("[" * 100000, "is not JSON"),
        ('{"prompt": "a", "x": ' + "9" * 5000 + "}", "is not JSON"),
        (r'{"prompt": "a\ud800"}', r"'\\ud800' is half a character"),
        (r'{"messages": [{"role": "user", "content": "\udfff"}]}', "is half a character"),
        (r'{"prompt": "a", "x": {"\ud800": 1}}', "is half a character"),
        (r'{"prompt": "a", "answer": "\uD83D"}', "is half a character"),
        ('{"prompt": "a", "answer": 1e999}', "beyond the range of floats"),
    ],
)
def test_a_wrong_line_is_named(line, message):
    with pytest.raises(DatasetError, match=rf"data\.jsonl, line 2: .*{message}"):
        parsed(GOOD, line, GOOD)


def test_an_empty_file_is_named():
    with pytest.raises(DatasetError, match=r"data\.jsonl is empty"):
        parsed(end="")


def test_a_character_of_two_escapes_is_whole():
    (row,) = parsed(r'{"prompt": "\ud83d\ude00", "answer": "\u00e9"}')
    assert row.values == {"prompt": "\U0001f600", "answer": "é"}
