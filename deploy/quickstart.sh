#!/bin/sh
# Runs the quickstart in the coordinator's container of compose.yaml. Arguments: the addresses of rollout, reward and
# trainer, then config overrides.
set -eu
rollout=$1 reward=$2 trainer=$3
shift 3
lockstep data arithmetic --out runs/data
exec lockstep run deploy/runs/quickstart.yaml \
  trainer.num_ranks=1 data.train=runs/data/train.parquet data.eval.held-out=runs/data/test.parquet \
  --tls /certs --rollout "$rollout" --reward "$reward" --trainer "$trainer" "$@"
