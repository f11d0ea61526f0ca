"""The environment in which a policy calls tools, and its tools."""
