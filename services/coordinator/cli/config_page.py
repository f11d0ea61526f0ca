"""Generates the page of all config keys, docs/configuration.md."""

from collections.abc import Iterator

from services.common.config.load import Key, keys
from services.common.config.run import Config
from services.common.config.sft import SftConfig

_HEAD = """# Configuration

This page lists every key of `lockstep run`, then the keys that only `lockstep sft` has. YAML files and `key=value`
overrides are merged from left to right; an unknown key is an error that names the nearest known one. `lockstep config
--markdown` generates this page; `lockstep config` shows the same keys in a terminal.
"""


def config_page() -> str:
    """Returns the page as Markdown."""
    run = list(keys(Config))
    known = {(key.path, key.help) for key in run}
    supervised = [key for key in keys(SftConfig) if (key.path, key.help) not in known]
    return "\n".join([_HEAD, "## Runs", *_sections(run), "", "## Supervised runs", *_sections(supervised), ""])


def _sections(found: list[Key]) -> Iterator[str]:
    """Yields the lines of one table per top-level section; keys outside of any section come first."""
    sections: dict[str, list[Key]] = {"": []}
    for key in found:
        sections.setdefault(key.path.rpartition(".")[0].partition(".")[0], []).append(key)
    for section, members in sections.items():
        yield from ("", f"### {section or 'Top level'}", "", "| key | type | default | meaning |", "|---|---|---|---|")
        for key in members:
            cells = (f"`{key.path}`", f"`{key.type}`", f"`{key.default}`", key.help)
            yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
