"""Keeps a line of every call that a coordinator makes: when, where, its ids and hashes, and how it ended."""
