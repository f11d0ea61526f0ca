"""The scorers. A new one also needs a config in services/common/config/reward.py and a line in scoring.py."""
