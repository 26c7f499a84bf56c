"""Text of four kinds that is at hand wherever Python is, and continuing it as a task: byte by byte, to its end.

code        the standard library's sources
prose       the language reference, which Python has as its help
arithmetic  sums and products, one a line
records     JSON, one object a line
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from foreroute.train.chain import Demonstration, Problem, Task, right_share

KINDS = ("code", "prose", "arithmetic", "records")
SHORTEST, LONGEST = 64, 128
"""Characters of a text."""
PROMPTS = (24, 48)
"""Characters of a prompt: either."""
JUDGED = 8
"""Characters that a reward is about."""
NAMES = ("ada", "emmy", "grace", "kurt", "sofia", "alan")


class TextTask(Task):
    """Prompts of all kinds in turn; a reward is the share of the next characters that are right before a mistake.

    Tokens are ASCII characters. Token 0 begins every text and ends it.
    """

    end_token = 0
    vocabulary_size = 128
    max_response_tokens = LONGEST - min(PROMPTS) + 1

    def problems(self, count: int, step: int, rng: np.random.Generator) -> list[Problem]:
        return [_problem(KINDS[i % len(KINDS)], rng) for i in range(count)]

    def demonstrations(self, count: int, rng: np.random.Generator) -> list[Demonstration]:
        texts = [encode(text(KINDS[i % len(KINDS)], rng)) for i in range(count)]
        begin = np.zeros(1, np.int32)
        return [(begin, np.append(tokens, begin)) for tokens in texts]

    def rewards(self, problems: Sequence[Problem], responses: Sequence[NDArray[np.int32]]) -> NDArray[np.float64]:
        texts = [bytes(tokens[tokens != self.end_token].astype(np.uint8)).decode("ascii") for tokens in responses]
        pairs = zip(problems, texts, strict=True)
        return np.array([right_share(problem.row["answer"][:JUDGED], text) for problem, text in pairs])


def text(kind: str, rng: np.random.Generator) -> str:
    """Draw `SHORTEST` to `LONGEST` ASCII characters of a kind."""
    length = int(rng.integers(SHORTEST, LONGEST + 1))
    if kind in ("code", "prose"):
        whole = _sources() if kind == "code" else _reference()
        starts = _line_starts(kind)
        begin = int(starts[rng.integers(np.searchsorted(starts, len(whole) - LONGEST))])
        return whole[begin : begin + length]
    line = _calculation if kind == "arithmetic" else _record
    lines = ""
    while len(lines) < length:
        lines += line(rng) + "\n"
    return lines[:length]


def encode(characters: str) -> NDArray[np.int32]:
    """Give int32 [T], one token per character."""
    return np.frombuffer(characters.encode("ascii"), np.uint8).astype(np.int32)


def _problem(kind: str, rng: np.random.Generator) -> Problem:
    whole, length = text(kind, rng), int(rng.choice(PROMPTS))
    prompt, answer = whole[:length], whole[length:]
    return Problem(prompt, np.append(np.zeros(1, np.int32), encode(prompt)), {"kind": kind, "answer": answer})


@cache
def _sources() -> str:
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    return _ascii("\n".join(file.read_text(encoding="utf-8") for file in files))


@cache
def _reference() -> str:
    from pydoc_data.topics import topics

    return _ascii("\n".join(words for _, words in sorted(topics.items())))


@cache
def _line_starts(kind: str) -> NDArray[np.int64]:
    whole = _sources() if kind == "code" else _reference()
    return np.flatnonzero(np.frombuffer(whole.encode("ascii"), np.uint8) == ord("\n")) + 1


def _ascii(characters: str) -> str:
    return characters.encode("ascii", "ignore").decode("ascii").replace("\0", "")


def _calculation(rng: np.random.Generator) -> str:
    a, b = (int(n) for n in rng.integers(0, 1000, 2))
    operator = str(rng.choice(list("+-*")))
    return f"{a}{operator}{b}={ {'+': a + b, '-': a - b, '*': a * b}[operator] }"


def _record(rng: np.random.Generator) -> str:
    name, score = str(rng.choice(NAMES)), round(float(rng.random()), 2)
    return json.dumps({"id": int(rng.integers(10000)), "name": name, "score": score, "passed": score > 0.5})
