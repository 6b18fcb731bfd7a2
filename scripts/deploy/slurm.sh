#!/usr/bin/env bash
# Run a command of slipstream on the hosts of a Slurm job. Submit it from the checkout, which all hosts see with its .venv:
#
#   sbatch --nodes=4 --gpus-per-node=8 scripts/deploy/slurm.sh train recipe=gsm8k device=cuda weight_sync.transport=collective
#
# The run folder is runs/slurm-JOBID, unless the command names one. Ten minutes before the job's time is over, and when
# it is preempted, the run saves a checkpoint and the job queues again; it then goes on in the same folder.
#SBATCH --job-name=slipstream
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@600
set -euo pipefail
was_warned="" run=""
trap 'was_warned=yes; [ -z "$run" ] || kill -USR1 "$run" || true' USR1 # the warning may come before there is a run
cd "$SLURM_SUBMIT_DIR"

# The address of this host for others: the one of its name in Slurm, which some systems know as 127.0.1.1 themselves.
own_address() {
  local name
  name=$(scontrol show node "$SLURMD_NODENAME" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')
  { { getent ahostsv4 "$name" || true; } | awk '$1 !~ /^127\./ { print $1 }' && hostname -I | tr ' ' '\n'; } | sed -n 1p
}
is_open() { timeout 10 bash -c ': <"/dev/tcp/$1/$2"' - "$1" "$2" 2>/dev/null; }
until_open() { timeout 120 bash -c 'until (: <"/dev/tcp/$1/$2") 2>/dev/null; do sleep 1; done' - "$1" "$2"; }

ray_on_this_host() {
  local began where=(--address="$HEAD_ADDRESS:$HEAD_PORT")
  if [ "$SLURMD_NODENAME" = "$HEAD" ]; then
    where=(--head --port="$HEAD_PORT" --temp-dir="$RAY_TEMP" --include-dashboard=false)
  fi
  for _ in 1 2 3; do # Ray gives its own processes 30 s to start, and a shared disk may be slow
    [ "$SLURMD_NODENAME" = "$HEAD" ] || until_open "$HEAD_ADDRESS" "$HEAD_PORT"
    began=$SECONDS
    .venv/bin/ray start "${where[@]}" --node-ip-address="$(own_address)" --num-cpus="$SLURM_CPUS_ON_NODE" --disable-usage-stats --block &&
      break
    # A head that has run is not followed by another one, which would know nothing of the run.
    [ "$SLURMD_NODENAME" != "$HEAD" ] || [ $((SECONDS - began)) -lt 60 ] || break
  done
}

# Between the ports that Ray gives to workers (to 19999) and those of clients, and another for each job of a host.
HEAD=$SLURMD_NODENAME HEAD_ADDRESS=$(own_address) HEAD_PORT=$((20000 + SLURM_JOB_ID % 10000))
RAY_TEMP=${RAY_TMPDIR:-/tmp}/ray-$SLURM_JOB_ID
RAY_AUTH_MODE=token RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n') # other users of a host cannot connect
export HEAD HEAD_ADDRESS HEAD_PORT RAY_TEMP RAY_AUTH_MODE RAY_AUTH_TOKEN
export -f own_address until_open ray_on_this_host
on_every_host=(srun --export=ALL --overlap --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --cpu-bind=none)
# Ray ends on a host that fails, and not on the others: the run replaces what it lost.
"${on_every_host[@]}" --kill-on-bad-exit=0 --wait=0 bash -c ray_on_this_host &
ray=$!
clean_up() {
  trap - EXIT
  kill "$ray" 2>/dev/null || true
  wait "$ray" || true
  "${on_every_host[@]}" rm -rf "$RAY_TEMP" || true
}
trap clean_up EXIT
until_open "$HEAD_ADDRESS" "$HEAD_PORT"

command=$1
shift
case " $* " in *" hydra.run.dir="*) ;; *) set -- "$@" "hydra.run.dir=runs/slurm-$SLURM_JOB_ID" ;; esac
case " $* " in *" resume="*) ;; *) set -- "$@" resume=auto ;; esac
export RAY_ADDRESS=$HEAD_ADDRESS:$HEAD_PORT
code=130
if [ -z "$was_warned" ]; then
  # Not by srun: that would hand the signals to the processes of Ray as well.
  .venv/bin/python -m scripts "$command" "$@" &
  run=$!
  [ -z "$was_warned" ] || kill -USR1 "$run"
  while kill -0 "$run" 2>/dev/null; do wait "$run" || true; done # a signal ends a wait, and not the run
  code=0
  wait "$run" || code=$?
  [ "$code" != 138 ] || code=130 # by USR1 itself, before the run has heeded it
fi
[ "$code" = 0 ] || sleep 10 # Ray on other hosts may end a little later
ray_has_ended() { ! kill -0 "$ray" 2>/dev/null || ! is_open "$HEAD_ADDRESS" "$HEAD_PORT"; }
# A preemption without a warning begins with the end of Ray on all hosts, and may leave no time to do more than this.
if { [ "$code" = 130 ] && [ -n "$was_warned" ]; } || { [ "$code" != 0 ] && ray_has_ended; }; then
  clean_up
  # Slurm then ends this script. One that has ended by itself by then has failed.
  [ "${SLURM_RESTART_COUNT:-0}" -ge 50 ] || { scontrol requeue "$SLURM_JOB_ID" && sleep 300; }
fi
exit "$code"
