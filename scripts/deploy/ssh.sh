#!/usr/bin/env bash
# Start Ray on several hosts by ssh. Run it on the first of them, in the checkout, which all see at the same path:
#
#   scripts/deploy/ssh.sh 10.0.0.1 10.0.0.2 10.0.0.3 10.0.0.4
#   RAY_ADDRESS=10.0.0.1:6379 .venv/bin/slipstream train device=cuda weight_sync.transport=collective ...
#
# `scripts/deploy/ssh.sh stop HOST...` ends Ray there, and with it everything that runs on it.
set -euo pipefail
on() { ssh -o BatchMode=yes "$1" "cd '$PWD' && .venv/bin/ray ${*:2}"; }
if [ "$1" = stop ]; then
  for host in "${@:2}"; do on "$host" stop; done
  exit
fi
on "$1" start --head --port=6379 --node-ip-address="$1" --disable-usage-stats
for host in "${@:2}"; do on "$host" start --address="$1:6379" --node-ip-address="$host" --disable-usage-stats; done
