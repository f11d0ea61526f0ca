#!/bin/sh
# Makes a certificate authority and a certificate for each container of compose.yaml: make_certificates.sh DIRECTORY.
# Existing ones are kept.
set -eu
cd "$1"
[ -e ca ] || lockstep certs init ca
for role in rollout reward trainer coordinator; do
  [ -e "$role" ] || lockstep certs issue "$role" --ca ca --host "$role" --host "$role-gpu" --host localhost --host 127.0.0.1 --out "$role"
done
