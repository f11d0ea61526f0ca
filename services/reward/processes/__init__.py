"""Worker processes, which exchange lines of JSON with the reward service and can be killed at any time."""
