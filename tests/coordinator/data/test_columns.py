"""Values of columns, as messages."""

import json

import pytest

from services.coordinator.data.reading.columns import as_messages
from services.coordinator.data.reading.record import BadRow

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "one\nline, [two]"}]


@pytest.mark.parametrize("prompt", [json.dumps(MESSAGES), json.dumps(MESSAGES, indent=1), str(MESSAGES)])
def test_a_text_that_is_a_list_of_messages_is_a_bad_row(prompt: str) -> None:
    with pytest.raises(BadRow, match="is the text of a list of messages"):
        as_messages(prompt)


@pytest.mark.parametrize("prompt", ["[{'role': 'user'}] has how many keys?", "[1]", '{"role": "user"}'])
def test_a_text_that_has_a_list_is_a_prompt(prompt: str) -> None:
    assert as_messages(prompt) == [{"role": "user", "content": prompt}]
