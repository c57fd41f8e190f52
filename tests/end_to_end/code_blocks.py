"""Code blocks of a page as one program: what a reader does who follows the page to the letter, from top to bottom.

- A `python` block with a `title` is written to the file of that name; any other runs in the page's own interpreter.
- A `console` block runs its lines that begin with `$ ` in a shell. The other lines are output: each has to be printed,
  whatever its numbers; `…` stands for what is left out.
- Other blocks are shown only: `text`, and `py` for fragments of a program that the page does not have.

`python -m tests.end_to_end.code_blocks PAGE [HEADING]` prints the program of a page, up to a heading if one is given.
"""

import re
import sys
from dataclasses import dataclass
from pathlib import Path

FENCE = re.compile(r"^```(?P<kind>\w+)(?: title=\"(?P<title>[^\"]+)\")?\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Block:
    """A code block.

    Attributes:
      kind: its language.
      title: the file that it is; None for one that runs.
      body: its text.
      line: the page's line of its first line.
    """

    kind: str
    title: str | None
    body: str
    line: int


def blocks(page: str) -> list[Block]:
    """The code blocks of a page, in order."""
    return [
        Block(match["kind"], match["title"], match["body"], page.count("\n", 0, match.start()) + 2)
        for match in FENCE.finditer(page)
    ]


def program(page: str) -> str:
    """The page as a Python program, whose tracebacks have the page's lines; run it in an empty folder."""
    parts = ["import re, subprocess\nfrom pathlib import Path\n", SHELL]
    for block in blocks(page):
        if block.title is not None:
            parts.append(f"Path({block.title!r}).write_text({block.body!r})\n")
        elif block.kind == "python":
            code = "\n" * (block.line - 1) + block.body
            parts.append(f"exec(compile({code!r}, 'page.md', 'exec'))\n")
        elif block.kind == "console":
            parts.append(f"_console({block.body!r})\n")
    return "".join(parts)


SHELL = """
def _console(text):
    pieces = re.split(r"^\\$ ", text, flags=re.MULTILINE)[1:]
    for piece in pieces:
        command, _, shown = re.sub(r"\\\\\\n", "", piece).partition("\\n")
        done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, f"{command}: {done.stdout[-3000:]} {done.stderr[-3000:]}"
        said = _plain(done.stdout + done.stderr)
        for line in shown.splitlines():
            for part in _plain(line).split("…"):
                assert part.strip() in said, f"{command} does not print {part.strip()!r} but\\n{said[:4000]}"

def _plain(text):
    return re.sub(r"\\d[\\d.,]*", "0", " ".join(text.split()))
"""


if __name__ == "__main__":
    whole = Path(sys.argv[1]).read_text()
    for heading in sys.argv[2:]:
        whole = whole.partition(f"\n## {heading}\n")[0]
    sys.stdout.write(program(whole))
