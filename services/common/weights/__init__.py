"""Publishes weights: the tensors to send (plan), their verification (digest), and the members that take part
(group)."""
