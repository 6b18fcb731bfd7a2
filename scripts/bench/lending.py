"""The question: what would it save to lend GPUs, ranks that generate while they wait and replicas that train while they
are idle? Three minutes.

python -m scripts.bench.lending [--only gsm8k dapo_math search_r1]

Every recipe is rehearsed with its shape on H100, which says how long its trainer and its replicas take for the work of
a step, for every split of its GPUs that fits. A GPU that is lent works at full speed, in the way of its new role; all
idle time can be lent but the seconds of the two switches, there and back, in which it does nothing. It is lent once in
as many steps as the slots hold batches: rollout.max_staleness + 1. So this is the most that lending could give.

The last line is JSON, with <recipe>_ before each: `shipped_s`, `best_s` and `lent_<seconds of both switches>_s` are the
seconds of a step as the recipe is split, with the best fixed split, and with the best split that lends; `gain_<...>` is
what lending would add to the samples per second of the best fixed split.
"""

from collections.abc import Mapping

from configs.cli.compose import compose_job
from configs.load import load
from scripts.bench.harness import Figures, Runs, make_parser, progress
from scripts.observe.tables import write_json
from scripts.plan.model_shape import shape_of
from scripts.plan.rehearsal.cards import find_card, find_reach
from scripts.plan.rehearsal.rehearsal import rehearse
from scripts.predict.rehearsed import Split, profile_of, splits

RECIPES: Mapping[str, str] = {
    "gsm8k": "Qwen2.5-1.5B-Instruct",
    "dapo_math": "Qwen2.5-Math-7B",
    "search_r1": "Qwen2.5-3B-Instruct",
}
"""Recipe -> the folder in tests/support/model_configs with the shape of its model."""
SWITCHES_S = (0.0, 5.0, 20.0)
"""The seconds of both switches. verl takes each for 10 s before it has measured one."""


def lent_step_s(split: Split, switches_s: float) -> float:
    """Return the seconds of a step if the side that waits is lent to the other one, as far as that pays.

    In a step of x seconds, the side that has more to do, w seconds on its own a GPUs, gets the b GPUs of the other side
    for x - v - c, where v is that side's own work and c the switches: a x + b (x - v - c) = a w.
    """
    ranks, replicas = (split.num_ranks, split.trainer_s), (split.num_replicas, split.replicas_s)
    (busy, work_s), (lent, own_s) = sorted((ranks, replicas), key=lambda side: -side[1])
    together = (busy * work_s + lent * (own_s + switches_s)) / (busy + lent)
    return min(work_s, together)


def measure(recipe: str) -> Figures:
    composed = compose_job("train", [f"recipe={recipe}", f"model.path=tests/support/model_configs/{RECIPES[recipe]}"])
    config = load(composed.config, needed_files=())
    rehearsal, card = rehearse(config, "cuda", config.model.path or ""), find_card("H100")
    shape = shape_of(rehearsal.parameters, rehearsal.model)
    found = splits(config, shape, card, profile_of(config, shape, rehearsal, card, find_reach(card)))
    for each in found:
        progress(f"{recipe}: {each}")
    (shipped,) = (split for split in found if split.num_ranks == config.trainer.num_ranks)
    best_s, batches = min(split.step_s for split in found), config.rollout.max_staleness + 1
    lent = {switches_s: min(lent_step_s(split, switches_s / batches) for split in found) for switches_s in SWITCHES_S}
    return {
        "shipped_s": shipped.step_s,
        "best_s": best_s,
        **{f"lent_{switches_s:g}_s": step_s for switches_s, step_s in lent.items()},
        **{f"gain_{switches_s:g}": best_s / step_s - 1 for switches_s, step_s in lent.items()},
    }


def main() -> None:
    options = make_parser(__doc__, parts=list(RECIPES)).parse_args()
    runs = Runs.exact({recipe: measure(recipe) for recipe in options.only})
    runs.show("seconds of a step, and what lending would add")
    write_json(runs.all_medians())


if __name__ == "__main__":
    main()
