"""Implements the parts that environments with tools share: the calls in the policy's text, and the tools' schemas."""
