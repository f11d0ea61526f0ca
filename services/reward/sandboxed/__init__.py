"""Modules that run inside the sandbox. They import only one another and the standard library: nothing else is there."""
