"""Everything that the command does: fit, simulate, compare, advise."""

import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from scripts.bench.common import write_line
from scripts.predict.advice import Option, advice
from scripts.predict.command import Arguments
from scripts.predict.counterfactual import Cost, costs
from scripts.predict.files import RunFiles, read_run
from scripts.predict.fit import fit, measured_rate
from scripts.predict.profile import Profile, read_profile, to_json
from scripts.predict.report import as_figures, of_choices, show_choices, show_costs, show_marginal, show_profile
from scripts.predict.setup import Setup
from scripts.predict.simulate import simulate
from scripts.predict.sweep import Choice, around, marginal, of_axes, sweep

OTHER_OBJECTIVE = {"group_size", "stale_policy"}
"""Fields of `Setup` that change what is learned from."""


def predict(arguments: Arguments) -> dict[str, Any]:
    """Show the tables. Returns the figures of the last line."""
    began = time.perf_counter()
    runs = [read_run(folder) for folder in arguments.runs]
    profile = arguments.changed(_profile(arguments, runs))
    if arguments.save is not None:
        arguments.save.write_text(to_json(profile))
    show_profile(profile)
    figures: dict[str, Any] = {"runs": [_compared(run, profile) for run in runs]} if runs else {}
    of_run = Setup.of_mapping(runs[0].config) if runs else None
    base = arguments.setup(of_run)
    if of_run is not None and of_run.eval_every and not base.eval_every and "eval_every" not in arguments.fixed:
        write_line(f"left out: evaluations, every {of_run.eval_every} steps of the run; {base.steps} are simulated\n")
    changes = of_axes(base, arguments.axes) if arguments.axes else around(base)
    now = simulate(profile, base)
    choices = [Choice({}, now)]
    if "sweep" in arguments.parts:
        choices += sweep(profile, base, changes)
    per_step = f"{base.prompts_per_step} x {base.group_size} samples"
    show_choices(f"{base.num_replicas} replicas, {base.num_ranks} ranks, {per_step} a step", choices)
    figures |= {"setup": asdict(base), "now": as_figures(now), "choices": of_choices(choices[1:])}
    options = _options(arguments, base, choices[1:])
    if "marginal" in arguments.parts:
        more = marginal(profile, now)
        show_marginal(more)
        figures["one_more"] = {"replica": round(more.replica, 4), "rank": round(more.rank, 4)}
        options += [
            Option(change="one more replica", samples_per_s=more.base + more.replica, is_free=False),
            Option(change="one more rank", samples_per_s=more.base + more.rank, is_free=False),
        ]
    found: list[Cost] = []
    if "costs" in arguments.parts:
        found = costs(profile, now)
        show_costs(found)
        figures["costs_s"] = {cost.of: round(cost.step_s, 4) for cost in found}
    given = advice(now, options, found)
    write_line(given.text + "\n")
    return figures | {"advice": given.text, "gain": given.gain, "seconds": round(time.perf_counter() - began, 1)}


def _options(arguments: Arguments, base: Setup, choices: Sequence[Choice]) -> list[Option]:
    """Of what was tried, what may be proposed: all that was asked for, else what leaves the objective as it is."""
    options: list[Option] = []
    for choice in choices:
        setup = choice.prediction.setup
        is_free = setup.num_replicas + setup.num_ranks <= base.num_replicas + base.num_ranks
        is_asked = bool(arguments.axes) or not choice.change.keys() & OTHER_OBJECTIVE
        if is_asked and (is_free or "marginal" not in arguments.parts):
            options.append(Option(change=choice.name, samples_per_s=choice.prediction.samples_per_s, is_free=is_free))
    return options


def _profile(arguments: Arguments, runs: Sequence[RunFiles]) -> Profile | None:
    if runs:
        return fit(runs)
    return None if arguments.profile is None else read_profile(arguments.profile)


def _compared(run: RunFiles, profile: Profile) -> dict[str, float]:
    """The run's own steps: what it measured, and what is predicted for them."""
    setup = replace(Setup.of_mapping(run.config), steps=len(run.steps))
    measured, predicted = measured_rate(run), simulate(profile, setup, whole=True).rate_after_first
    write_line(
        f"its {setup.steps} steps after the first: {measured:.4g} samples/s measured, {predicted:.4g} simulated "
        f"({predicted / measured - 1:+.1%})\n"
    )
    return {"measured": round(measured, 4), "simulated": round(predicted, 4)}
