"""The coordinator as a daemon: hosts several runs of one directory at a time, for any number of callers."""
