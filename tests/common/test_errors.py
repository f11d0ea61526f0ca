"""docs/operations.md says of every reason of a failure what happened and what to do."""

import re

from services.common.errors import Reason
from tests.support import ROOT

PAGE = ROOT / "docs" / "operations.md"


def test_every_reason_is_in_the_page_once_and_no_other() -> None:
    rows = re.findall(r"^\| `([A-Z_]+)` \| (.+) \| (.+) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(reason for reason, _, _ in rows) == sorted(Reason)
    assert all(len(happened) > 15 and len(fix) > 10 for _, happened, fix in rows)
