"""Runs whose processes, network, disks and clocks fail, at points that a seed chooses: see docs/protocol-model.md."""
