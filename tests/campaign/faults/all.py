"""All faults, by name."""

from tests.campaign.faults import clocks, disks, environments, forgery, limits, network, pairs, rivals, signals
from tests.campaign.faults.base import Fault

FAULTS: dict[str, Fault] = {
    fault.name: fault
    for module in (signals, network, disks, limits, clocks, rivals, forgery, environments, pairs)
    for fault in module.FAULTS
}
