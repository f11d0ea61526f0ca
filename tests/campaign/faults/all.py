"""All faults, by name."""

from tests.campaign.faults import clocks, disks, limits, network, rivals, signals
from tests.campaign.faults.base import Fault

FAULTS: dict[str, Fault] = {
    fault.name: fault for module in (signals, network, disks, limits, clocks, rivals) for fault in module.FAULTS
}
