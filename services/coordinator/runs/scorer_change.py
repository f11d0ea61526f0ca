"""Notices that a resumed run scores with another version of a scorer or environment than its newest batch."""

import logging
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

log = logging.getLogger(__name__)


def warn_of_other_versions(newest_batch: Path | None, scorer: str, environment: str) -> None:
    """Logs a line for each scorer, and for the environment, whose version is not that of the newest batch.

    Args:
        newest_batch: The batch's file; None if the run has none. A file that cannot be read is ignored here.
        scorer: Name, version and weight of the scorers, as in the batch's column.
        environment: Name and version of the environment, as in the batch's column.
    """
    if newest_batch is None:
        return
    try:
        row = pq.ParquetFile(newest_batch).read_row_group(0, columns=["scorer", "environment"]).slice(0, 1)
    except (OSError, pa.ArrowException, IndexError):
        return
    for what, now in (("scorer", scorer), ("environment", environment)):
        before = row[what][0].as_py() or ""
        for old, new in zip(before.split(" + "), now.split(" + "), strict=False):
            if old != new:
                were = (what, new or "none", old or "none")
                log.warning("%s %s was %s in the newest batch of this run: rewards may differ", *were)
