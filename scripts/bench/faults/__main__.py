"""What faults cost: injected one after the other into running jobs, and audited by what was trained.

python -m scripts.bench.faults [--injections 100] [--kills 20] [--interval 1] [--seed 0] [--vllm] [--vllm-kills 3]

- simulated engines, virtual clock: replicas die, hang, fall silent or slow down, and agent loops raise or hang.
- simulated engines, real time: the whole job is killed by SIGKILL and resumes from its newest checkpoint.
- with --vllm: processes of whole runs of scripts.train are killed, stopped or slowed down, each in a run of its own;
  and one whole run is killed again and again, also inside saves and weight updates.

The last line of the output is JSON, the sums of the table:

    injected                faults
    lost, twice             prompts that were never trained, or more than once
    restarted               trajectories that started again from their prompt
    descending_versions     trajectories with a token of an older version than the token before
    unbounded_waits         runs that did not end
"""

import argparse
import logging
import tempfile
from pathlib import Path

from scripts.bench.faults.report import show
from scripts.bench.faults.simulated import LOOP_FAULTS, REPLICA_FAULTS, job_kills, part_faults


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--injections", type=int, default=100, help="of each fault of a part, on simulated engines")
    parser.add_argument("--kills", type=int, default=20, help="of the whole job, on simulated engines")
    parser.add_argument("--interval", type=int, default=1, help="weight_sync.interval of the jobs whose parts break")
    parser.add_argument("--vllm", action="store_true", help="whole runs on vLLM too: minutes")
    kills_help = "of a whole run on vLLM, in turns at any moment, inside a save and inside a weight update"
    parser.add_argument("--vllm-kills", type=int, default=3, help=kills_help)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)  # every failed group is a warning
    faults = (*REPLICA_FAULTS, *LOOP_FAULTS)
    rows = [part_faults(fault, options.injections, options.seed, options.interval) for fault in faults]
    with tempfile.TemporaryDirectory() as folder:
        rows.append(job_kills(options.kills, options.seed, Path(folder)))
        if options.vllm:
            from scripts.bench.faults.real import real_rows

            rows += real_rows(options.vllm_kills, options.seed, Path(folder))
    show(rows)


if __name__ == "__main__":
    main()
