#!/bin/sh
# Makes a certificate authority and a certificate for each container of compose.yaml: make_certificates.sh DIRECTORY.
# Existing certificates are renewed. Services use a new one from the next connection on.
set -eu
cd "$1"
[ -e ca ] || lockstep certs init ca
for role in rollout reward trainer coordinator; do
  if [ -e "$role" ]; then
    lockstep certs renew "$role" --ca ca
  else
    lockstep certs issue "$role" --ca ca --host "$role" --host "$role-gpu" --host localhost --host 127.0.0.1 --out "$role"
  fi
done
