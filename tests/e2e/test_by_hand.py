"""Tests that the loop of deploy/by_hand.py, which calls the services directly, is `lockstep run` to the last bit."""

import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from lockstep.types.v1.types_pb2 import PolicyStamp

from deploy.by_hand import require_read, train
from services.common.config.load import load
from services.common.config.run import Config
from services.common.errors import InvalidInput
from services.coordinator.fleet.launch import Addresses
from services.coordinator.observe.report.curves import read_metrics, steps_of
from services.coordinator.runs.reader import LedgerReader
from services.coordinator.runs.record import batch_path, without_answers
from tests.e2e.lockstep_command import Lent, invoke, make_sums
from tests.support import ROOT, raises

NUM_STEPS = 2
QUICKSTART = str(ROOT / "deploy" / "runs" / "quickstart.yaml")


def published(run_dir: Path) -> list[tuple[int, str]]:
    """Returns what was published: the version, and the rest with the digest as JSON."""
    with closing(sqlite3.connect(run_dir / "ledger.sqlite")) as database:
        return database.execute("SELECT version, body FROM decisions WHERE kind = 'published' ORDER BY seq").fetchall()


@pytest.mark.slow
async def test_a_loop_by_hand_is_the_run_to_the_last_bit(
    tmp_path: Path, lent_services: Lent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_sums(tmp_path / "data" / "arithmetic")
    settings = [
        QUICKSTART,
        *(f"model={ROOT / 'deploy' / 'quickstart' / 'model'}", f"num_steps={NUM_STEPS}", "data.prompts_per_step=4"),
        "rollout.completions_per_prompt=4",
        *("rollout.sampling.top_k=8", "rollout.sampling.top_p=0.9"),  # which the loop must pass on, too
        *("evaluation.eval_freq=0", "checkpoint.save_freq=0", "checkpoint.export_at_end=false"),
    ]
    run = invoke("run", *settings, "name=run", *lent_services.options, cwd=tmp_path)
    assert run.returncode == 0, run.stdout + run.stderr

    steps: list[tuple[PolicyStamp, pa.Table]] = []

    def keep(stamp: PolicyStamp, batch: pa.Table, metrics: Mapping[str, float]) -> None:
        assert metrics["grad_norm"] > 0
        steps.append((stamp, batch))

    addresses = lent_services.addresses
    replicas = tuple(address for name, address in addresses.items() if name.startswith("rollout"))
    given = Addresses(rollout=replicas, trainer=addresses["trainer"])
    trained = await train(load(Config, [*settings, "name=by-hand"]), keep, given)

    assert [stamp.version for stamp, _ in steps] == list(range(NUM_STEPS)) and trained.version == NUM_STEPS
    assert len({stamp.digest for stamp in (*(stamp for stamp, _ in steps), trained)}) == NUM_STEPS + 1
    steps_of_report, _ = read_metrics(Path("runs/by-hand/metrics.jsonl"), LedgerReader(Path("runs/by-hand")))
    assert len(steps_of(steps_of_report)) == NUM_STEPS
    assert published(Path("runs/by-hand")) == published(Path("runs/run"))
    for stamp, batch in steps:
        recorded = without_answers(pq.read_table(batch_path(Path("runs/run"), stamp.version)))
        assert batch.equals(recorded), f"step {stamp.version + 1}"
    verified = invoke("verify", "runs/by-hand", cwd=tmp_path)
    assert verified.returncode == 0 and f"{NUM_STEPS} finished steps" in verified.stdout, verified.stdout


@pytest.mark.parametrize(
    ("key", "others"),
    [
        ("advantage.normalize_std=false", ()),
        ("advantage.kind=rloo", ()),
        ("selection.dynamic.enabled=true", ()),
        ("selection.overlong.mask_truncated=true", ()),
        ("trainer.loss.kl_coef=0.1", ()),
        ("trainer.lag.versions=1", ("trainer.loss.old_logprobs=engine",)),
        ("environment={kind: python, path: 'my:Game'}", ()),
        ("teacher={model: m}", ("trainer.loss.distill.coef=0.1",)),
    ],
)
def test_a_key_that_the_loop_would_ignore_is_refused(key: str, others: tuple[str, ...]) -> None:
    name = key.partition("=")[0]
    with raises(InvalidInput, field=name):
        require_read(load(Config, [QUICKSTART, key, *others]))
    require_read(load(Config, [QUICKSTART, "rollout.sampling.top_k=8", "advantage.eps=1e-4"]))
