"""Predicts how fast other configurations of a run would be, and says what to change.

python -m scripts.predict run=runs/latest                                  # one change at a time around its config
python -m scripts.predict run=runs/latest rollout.max_staleness=0,2,8 rollout.num_replicas=1,2     # all of these
python -m scripts.predict profile.step_s=0.012 profile.turn_tokens="{mean: 900, sigma: 0.8, cap: 8192}" \\
    profile.train_s=20 rollout.num_replicas=512 rollout.max_num_seqs=64 trainer.prompts_per_step=4096   # before renting

    run        folder of a run, live or ended: its config, and the profile that is fitted to what it recorded; with
               run=A,B to both: a synchronous run beside an async one tells what each side takes by itself
    profile    instead of it, a file of JSON or YAML; profile.FIELD=VALUE replaces a field of either
    save       file to write the profile to
    only       some of sweep, marginal, costs, separated by commas; base: none of them [all]
    KEY=V,...  keys of the config as in scripts.train, see docs/observe.md; several values of one are swept

The run is simulated with the real scheduler, buffer, router and train loop on a virtual clock. The last line is JSON.
"""

import json
import sys

from scripts.bench.common import write_line
from scripts.predict.command import parse
from scripts.predict.predict import predict
from scripts.predict.profile import PredictError


def main() -> None:
    if {"-h", "--help"} & set(sys.argv[1:]):
        sys.stdout.write(__doc__ or "")
        return
    try:
        figures = predict(parse(sys.argv[1:]))
    except (PredictError, OSError) as error:
        sys.exit(f"predict error: {error}")
    write_line(json.dumps(figures))


if __name__ == "__main__":
    main()
