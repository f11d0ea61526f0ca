"""The page of all config keys: docs/configuration.md."""

from collections.abc import Iterator

from services.common.config.load import Key, keys
from services.common.config.run import Config
from services.common.config.sft import SftConfig

_HEAD = """# Configuration

Every key of `lockstep run` and, after them, those that `lockstep sft` has apart. YAML files and `key=value` overrides
are merged from left to right; an unknown key is an error that names the nearest known one. This page is written by
`lockstep config --markdown`; `lockstep config` shows the same in a terminal.
"""


def config_page() -> str:
    """The page, as Markdown."""
    run = list(keys(Config))
    known = {(key.path, key.help) for key in run}
    supervised = [key for key in keys(SftConfig) if (key.path, key.help) not in known]
    return "\n".join([_HEAD, "## Runs", *_sections(run), "", "## Supervised runs", *_sections(supervised), ""])


def _sections(found: list[Key]) -> Iterator[str]:
    """A table for each section of the tree, the keys of the root first."""
    sections: dict[str, list[Key]] = {"": []}
    for key in found:
        sections.setdefault(key.path.rpartition(".")[0].partition(".")[0], []).append(key)
    for section, members in sections.items():
        yield from ("", f"### {section or 'Top level'}", "", "| key | type | default | meaning |", "|---|---|---|---|")
        for key in members:
            cells = (f"`{key.path}`", f"`{key.type}`", f"`{key.default}`", key.help)
            yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
