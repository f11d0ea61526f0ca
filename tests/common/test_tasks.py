"""Pauses between retries."""

from services.common.tasks import backoff_s


def test_pauses_double_up_to_half_a_minute_and_stay_there() -> None:
    for num_retries, longest_s in [(0, 0.5), (1, 1.0), (4, 8.0), (6, 30.0), (5000, 30.0)]:
        assert longest_s / 2 <= backoff_s(num_retries) <= longest_s
