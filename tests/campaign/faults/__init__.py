"""What is done to a run, one file for each kind. A fault is injected at an event, and undone some time later."""
