"""Predict how fast other configurations of a run would be, and say what to change.

slipstream predict run=runs/latest                                  # one change at a time around its config
slipstream predict run=runs/latest rollout.max_staleness=0,2,8 rollout.num_replicas=1,2     # all of these
slipstream predict profile.step_s=0.012 profile.turn_tokens="{mean: 900, sigma: 0.8, cap: 8192}" \\
    profile.train_s=20 rollout.num_replicas=512 rollout.max_num_seqs=64 trainer.prompts_per_step=4096   # before renting

    run        the folder of a run with events, live or ended: gives the config, and the profile that is fitted to what
               it recorded; run=A,B fits both: a synchronous run beside an async one tells what each takes by itself
    profile    a file of JSON or YAML in place of a run; profile.FIELD=VALUE replaces a field of either
    save       the file to write the profile to
    only       some of sweep, marginal, costs, separated by commas; base: none of them [all]
    KEY=V,...  keys of the config as in scripts.train, see docs/observe.md; several values of one are swept

The run is simulated with the real scheduler, buffer, router and train loop on a virtual clock. The last line is JSON.
"""

import json
import sys

from scripts.observe.tables import write_line
from scripts.predict.command import parse
from scripts.predict.predict import predict
from scripts.simulate.profile import PredictError


def main() -> None:
    if {"-h", "--help"} & set(sys.argv[1:]):
        sys.stdout.write(__doc__ or "")
        return
    try:
        outcome = predict(parse(sys.argv[1:]))
    except (PredictError, OSError) as error:
        sys.exit(f"predict error: {error}")
    write_line(json.dumps(outcome.figures))


if __name__ == "__main__":
    main()
