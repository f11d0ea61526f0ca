"""Runs the coordinator as a daemon, which hosts several runs of one directory at a time, for any number of callers."""
