"""Makes certificates for mTLS: a private certificate authority and the certificates that it issues."""
