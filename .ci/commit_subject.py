"""Refuses commits whose subject has more than 70 characters.

    python .ci/commit_subject.py FILE   # the message in FILE: the commit-msg hook
    python .ci/commit_subject.py        # every commit after BASE: CI

A subject is the first paragraph of a message, joined to one line, as `git log --format=%s` has it.
Commits up to BASE may be longer. Merge commits are exempt: git and GitHub write their subjects.
A clone without BASE, such as a shallow one, passes unchecked.
"""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
BASE = "9f352c6bbc849cb74bb7a17c945c90f9ecb5dcfe"
MAX_CHARACTERS = 70


def subject_of(message: str) -> str:
    """Return the subject of a message as an editor leaves it, with comment lines."""
    lines = [line.strip() for line in message.splitlines() if not line.startswith("#")]
    text = "\n".join(lines).strip()
    return " ".join(text.partition("\n\n")[0].splitlines())


def subjects_since(base: str, root: Path) -> list[str]:
    """Return the subjects of the commits after `base`, merges aside; [] where `base` is missing."""
    command = ["git", "-C", str(root), "log", "--no-merges", "--format=%s", f"{base}..HEAD"]
    listed = subprocess.run(command, capture_output=True, text=True)
    if listed.returncode != 0:
        print(f"commit subjects not checked: no commit {base} here", file=sys.stderr)
        return []
    return listed.stdout.splitlines()


def main(arguments: Sequence[str]) -> int:
    """Print each subject that is too long; return the exit status."""
    if arguments:
        subjects = [subject_of(Path(arguments[0]).read_text())]
    else:
        subjects = subjects_since(BASE, ROOT)
    long = [subject for subject in subjects if len(subject) > MAX_CHARACTERS]
    for subject in long:
        limit = f"at most {MAX_CHARACTERS}: move details to the body"
        print(
            f"commit subject has {len(subject)} characters, {limit}\n  {subject}", file=sys.stderr
        )
    return 1 if long else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
