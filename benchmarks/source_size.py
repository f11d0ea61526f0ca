"""Measures the source: how many files, of how many lines, and what these lines are, for each folder of services/.

Run `python -m benchmarks.source_size [ROOT]`; it prints a table in Markdown. ROOT is a checkout, by default this one.
"""

import argparse
import ast
import io
import re
import signal
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median_low

_ANY = re.compile(r"\bAny\b")
# Comments that speak to a tool and not to a reader.
_PRAGMA = re.compile(r"#\s*(noqa|type:|pyright:|fmt:)")
# Folders that are large enough for a row of their own for each of their folders.
_SPLIT = ("common", "coordinator")


@dataclass(frozen=True)
class Size:
    """What one file consists of, in lines."""

    lines: int
    imports: int
    any: int
    comments: int
    """Lines that are a comment; those after code do not count."""


def size_of(source: str) -> Size:
    """Measures the text of a Python module."""
    lines = source.splitlines()
    statements = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import | ast.ImportFrom))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = [token for token in tokens if token.type == tokenize.COMMENT and _is_alone(token)]
    return Size(
        lines=len(lines),
        imports=sum((node.end_lineno or node.lineno) - node.lineno + 1 for node in statements),
        any=sum(1 for line in lines if _ANY.search(line)),
        comments=len(comments),
    )


def _is_alone(comment: tokenize.TokenInfo) -> bool:
    return comment.line.lstrip().startswith("#") and not _PRAGMA.match(comment.string)


def folder_of(path: Path) -> str:
    """Returns the row of the table that a file below services/ is counted in."""
    parts = path.parts[:-1]
    return "/".join(parts[:2] if parts and parts[0] in _SPLIT else parts[:1]) or "."


def table(services: Path) -> Iterable[str]:
    """Yields the lines of the table."""
    folders: dict[str, list[Size]] = defaultdict(list)
    for path in sorted(services.rglob("*.py")):
        folders[folder_of(path.relative_to(services))].append(size_of(path.read_text(encoding="utf-8")))
    yield "| folder | files | lines | median | imports | lines with Any | comments |"
    yield "|---|---|---|---|---|---|---|"
    for folder, sizes in sorted(folders.items()):
        yield _row(folder, sizes)
    yield _row("**all**", [size for sizes in folders.values() for size in sizes])


def _row(name: str, sizes: Sequence[Size]) -> str:
    lines = sum(size.lines for size in sizes)
    imports = 100 * sum(size.imports for size in sizes) / max(1, lines)
    comments = 100 * sum(size.comments for size in sizes) / max(1, lines)
    middle, num_any = median_low([size.lines for size in sizes]), sum(size.any for size in sizes)
    return f"| {name} | {len(sizes)} | {lines} | {middle} | {imports:.1f} % | {num_any} | {comments:.1f} % |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", metavar="ROOT", nargs="?", type=Path, default=Path(__file__).parents[1])
    root: Path = parser.parse_args().root
    if not (root / "services").is_dir():
        parser.error(f"{root} has no services/: give a checkout")
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it without a traceback
    sys.stdout.write("\n".join(table(root / "services")) + "\n")


if __name__ == "__main__":
    main()
