"""The coordinator as a service: runs of one directory, several at a time, for any number of callers."""
