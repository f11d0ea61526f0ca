"""Publishes weights: what is sent (plan), how it is verified (digest), and between which members (group)."""
