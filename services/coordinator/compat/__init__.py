"""The coordinator's use of tensorboardX internals; see services.common.compat."""
