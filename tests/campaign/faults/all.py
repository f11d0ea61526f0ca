"""All faults, by name."""

from tests.campaign.faults import clocks, disks, forgery, limits, network, rivals, signals
from tests.campaign.faults.base import Fault

FAULTS: dict[str, Fault] = {
    fault.name: fault
    for module in (signals, network, disks, limits, clocks, rivals, forgery)
    for fault in module.FAULTS
}
