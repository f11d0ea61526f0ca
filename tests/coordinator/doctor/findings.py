"""What tests of `lockstep doctor` share."""

from services.common.config.run import Config
from services.coordinator.doctor import Finding, Verdict
from tests.coordinator.fake_services import make_config
from tests.support import ROOT

OK, WARN, FAIL = Verdict.OK, Verdict.WARN, Verdict.FAIL


def config_with(**sections: object) -> Config:
    return make_config(model=str(ROOT / "deploy" / "quickstart" / "model"), **sections)


def assert_fails(finding: Finding, verdict: Verdict, found: str, fix: str) -> None:
    assert (finding.verdict, found in finding.result, fix in finding.fix) == (verdict, True, True), finding
