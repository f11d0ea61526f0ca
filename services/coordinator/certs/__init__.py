"""Certificates for mTLS: an authority of one's own and what it issues."""
