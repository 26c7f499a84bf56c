"""Scores: which of the kit's checks the replay of others passes, each in a process of its own.

python -m tests.conformance.peers          hold its table against README.md beside this file
python -m tests.conformance.peers --page   write that page: the table, and of each check that failed what it saw
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from foreroute.conformance import ALL_CHECKS
from tests.conformance.peers.scores import scores_of

PEERS = {
    "core": ("foreroute.core",),
    "megatron": ("Megatron-Core {megatron-core}", "megatron-core"),
    "automodel": ("NeMo Automodel {nemo-automodel}", "nemo-automodel"),
    "veomni": ("VeOmni {veomni} under verl {verl}", "veomni", "verl"),
    "twinkle": ("twinkle {twinkle-kit}", "twinkle-kit"),
    "twinkle:deepseek_v3": ("twinkle {twinkle-kit}, sigmoid gates", "twinkle-kit"),
}
"""Name on the command line: title, and the distributions whose versions stand in it."""
FOLDERS = {"automodel": "with-nemo-automodel", "veomni": "with-veomni"}
"""What stands before an environment's own packages, in its folder."""
MARKS = {"passed": "●", "failed": "○", "not applicable": "-", "blocked": "·"}
PAGE = Path(__file__).with_name("README.md")
ROOT = PAGE.parents[3]
COMPARISON = ROOT / "docs" / "comparison.md"
SHORT_HEAD = "| replay | passed | also fails |"


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.conformance.peers", description=__doc__.splitlines()[0])
    parser.add_argument("peers", nargs="*", help=f"of {', '.join(PEERS)}; all by default")
    parser.add_argument("--page", action="store_true", help="write README.md beside this file")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.only:
        sys.stdout.write(json.dumps(scores(given.only)) + "\n")
        return
    if given.page and given.peers:
        parser.error("a page has all peers; name none with --page")
    text = page({peer: scores_apart(peer) for peer in given.peers or PEERS})
    sys.stdout.write(text)
    if given.page:
        PAGE.write_text(text, encoding="utf-8")
        before, _, behind = COMPARISON.read_text(encoding="utf-8").partition(SHORT_HEAD)
        behind = behind.partition("\n\n")[2]
        COMPARISON.write_text(f"{before}{short_table(text)}\n\n{behind}", encoding="utf-8")
    elif not given.peers and table(text) != table(PAGE.read_text(encoding="utf-8")):
        raise SystemExit(f"the table is not that of {PAGE}")


def table(text):
    """The lines of the table of a page."""
    return [line for line in text.splitlines() if line.startswith("|")]


def short_table(text):
    """The table of docs/comparison.md, from that of the page: what each fails beside that which all of them fail."""
    head, _, *rows, passed = [[cell.strip(" *") for cell in line.split("|")[1:-1]] for line in table(text)]
    failed = {column: [row[0] for row in rows if row[column] == MARKS["failed"]] for column in range(1, len(head))}
    by_all = set.intersection(*map(set, failed.values()))
    lines, above = [SHORT_HEAD, "|---|---|---|"], set()
    for column, checks in failed.items():
        names = [check.partition("]")[0].strip("[") for check in checks if check not in by_all]
        more = ["the same"] + [name for name in names if name not in above]
        said = more if above and above < set(names) else names
        lines.append(f"| {head[column]} | {passed[column]} | {', '.join(said) or 'none'} |")
        above = set(names)
    return "\n".join(lines)


def scores_apart(peer):
    """Of `scores`, in a process with the packages of the peer in front."""
    folders = [ROOT, ROOT / "src", Path(sys.prefix, FOLDERS.get(peer, "with-scores")), Path(sys.prefix, "with-scores")]
    paths = [*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [sys.executable, "-m", __spec__.parent, "--only", peer]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)}, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"{peer} did not run:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def scores(peer):
    """{"versions": ..., "checks": {check: (outcome, reason, smallest input)}} of a peer."""
    if peer == "megatron":
        from tests.adapters.megatron.forked_ranks import run

        [found] = run("conformance_worker.scores", timeout=500)
    else:
        name, *family = peer.split(":")
        module = importlib.import_module(f"tests.conformance.peers.{name}")
        found = scores_of(module.Peer(*family))
    return {"versions": {name: version(name) for name in (*PEERS[peer][1:], "torch", "transformers")}, "checks": found}


def page(found):
    """Table, versions, and for each failed check what was seen and the smallest input."""
    of = {peer: each["checks"] for peer, each in found.items()}
    of_peer = {peer: PEERS[peer][0].format(**each["versions"]) for peer, each in found.items()}
    lines = [INTRODUCTION, f"| check | {' | '.join(of_peer.values())} |", f"|---|{'---|' * len(of_peer)}"]
    for check in ALL_CHECKS:
        if any(check.id in checks for checks in of.values()):
            marks = " | ".join(MARKS[checks[check.id][0]] for checks in of.values())
            name = f"[{check.id}](#{check.id})" if MARKS["failed"] in marks else check.id
            lines.append(f"| {name} | {marks} |")
    counts = [str(sum(outcome == "passed" for outcome, *_ in checks.values())) for checks in of.values()]
    lines += [f"| **passed** | {' | '.join(counts)} |", "", "## Versions", ""]
    for peer, each in found.items():
        lines.append(f"- {of_peer[peer]}: {', '.join(f'{name} {number}' for name, number in each['versions'].items())}")
    for check in ALL_CHECKS:
        failed = {peer: checks[check.id] for peer, checks in of.items() if checks.get(check.id, [""])[0] == "failed"}
        if failed:
            lines += ["", f"### {check.id}", "", f"{check.title}.", ""]
            lines += [f"- {of_peer[peer]}, {size} tokens: {reason}" for peer, (_, reason, size) in failed.items()]
    reasons = {
        f"- {check}, {of_peer[peer]}: {reason}"
        for peer, checks in of.items()
        for check, (outcome, reason, _) in checks.items()
        if outcome == "not applicable"
    }
    lines += ["", "## Not applicable", "", *sorted(reasons)]
    return "\n".join(lines) + "\n"


INTRODUCTION = """\
# The conformance kit on the replay of others

Written by `make scores`. ● passed, ○ failed, - does not apply, · blocked: a check that it needs failed. Models have
three layers, eight experts and two picks, in float32 on a CPU. Adapters drive each package as its project does,
with care: what it documents as cleaning up is done, in `finally`, and what it documents for a second model. A row
without a route is filled with valid ids, spread over the experts, unless the package fills it. Its errors count as
refusals. A package that takes ids alone cannot know their tokens, layers or weights, so checks of those fail. The
fewest tokens are those on which a check says the same, sequences x tokens of each.
"""


if __name__ == "__main__":
    main()
