"""Do everything that the command does: fit a profile, simulate changes, compare them, advise."""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from scripts.observe.tables import show_table, write_line
from scripts.predict.advice import Advice, Option, advise_from_predictions
from scripts.predict.command import Arguments
from scripts.predict.fit import MeasuredRun, fit, measured_rate, read_run, simulated_rate
from scripts.predict.sweep import Choice, Cost, Marginal, around, costs, cross_axes, marginal, sweep
from scripts.simulate.profile import Profile, read_profile, to_json
from scripts.simulate.setup import Setup
from scripts.simulate.simulate import Prediction, simulate

OTHER_OBJECTIVE = {"group_size", "stale_policy"}
"""The fields of `Setup` that change what is learned from. Changes of these are proposed only if they were asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """The own steps of a run: what it measured, and what is simulated for them, in samples per second."""

    measured: float
    simulated: float

    @property
    def error(self) -> float:
        return self.simulated / self.measured - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The results of the predictor. `figures` are the last line of the command's output."""

    compared: tuple[Compared, ...]
    advice: Advice
    figures: dict[str, Any]


def predict(arguments: Arguments) -> Outcome:
    """Predict what the arguments ask for, and write tables of it. Raises PredictError and OSError."""
    began = time.perf_counter()
    runs = [read_run(folder) for folder in arguments.runs]
    measured = fit(runs) if runs else None if arguments.profile is None else read_profile(arguments.profile)
    profile = arguments.changed(measured)
    if arguments.save is not None:
        arguments.save.write_text(to_json(profile))
    _show_profile(profile)
    compared = tuple(_compare(run, profile) for run in runs)
    figures: dict[str, Any] = {}
    if runs:
        figures["runs"] = [{name: round(rate, 4) for name, rate in asdict(rates).items()} for rates in compared]
    setup = Setup.from_mapping(runs[0].config) if runs else None
    base = arguments.setup(setup)
    if setup is not None and setup.eval_every and not base.eval_every and "eval_every" not in arguments.fixed:
        write_line(f"left out: evaluations, every {setup.eval_every} steps of the run; {base.steps} are simulated\n")
    changes = cross_axes(arguments.axes) if arguments.axes else around(base)
    now = simulate(profile, base)
    choices = list(sweep(profile, base, changes)) if "sweep" in arguments.parts else []
    per_step = f"{base.prompts_per_step} x {base.group_size} samples"
    title = f"{base.num_replicas} replicas, {base.num_ranks} ranks, {per_step} a step"
    show_table(title, HEADER, [_row(choice.name, choice.prediction) for choice in [Choice({}, now), *choices]])
    figures |= {
        "setup": asdict(base),
        "now": _as_figures(now),
        "choices": [{"change": dict(choice.change)} | _as_figures(choice.prediction) for choice in choices],
    }
    options = _options(arguments, base, choices)
    if "marginal" in arguments.parts:
        more = marginal(profile, now)
        _show_marginal(more)
        figures["one_more"] = {"replica": round(more.replica, 4), "rank": round(more.rank, 4)}
        options += [
            Option(change="one more replica", samples_per_s=more.base + more.replica, is_free=False),
            Option(change="one more rank", samples_per_s=more.base + more.rank, is_free=False),
        ]
    dear: list[Cost] = []
    if "costs" in arguments.parts:
        dear = costs(profile, now)
        _show_costs(dear)
        figures["costs_s"] = {cost.name: round(cost.step_s, 4) for cost in dear}
    advice = advise_from_predictions(now, options, dear)
    write_line(advice.text + "\n")
    figures |= {"advice": advice.text, "gain": advice.gain, "seconds": round(time.perf_counter() - began, 1)}
    return Outcome(compared=compared, advice=advice, figures=figures)


def _options(arguments: Arguments, base: Setup, choices: Sequence[Choice]) -> list[Option]:
    """Return the choices that may be proposed: all that were asked for, else those that keep the objective."""
    options: list[Option] = []
    for choice in choices:
        setup = choice.prediction.setup
        is_free = setup.num_replicas + setup.num_ranks <= base.num_replicas + base.num_ranks
        may_be_proposed = bool(arguments.axes) or not choice.change.keys() & OTHER_OBJECTIVE
        if may_be_proposed and (is_free or "marginal" not in arguments.parts):
            options.append(Option(change=choice.name, samples_per_s=choice.prediction.samples_per_s, is_free=is_free))
    return options


def _compare(run: MeasuredRun, profile: Profile) -> Compared:
    compared = Compared(measured=measured_rate(run), simulated=simulated_rate(profile, run))
    write_line(
        f"its steps after the first, of {len(run.steps)}: {compared.measured:.4g} samples/s measured, "
        f"{compared.simulated:.4g} simulated ({compared.error:+.1%})\n"
    )
    return compared


# -- tables ------------------------------------------------------------------------------------------------------------

HEADER = ["configuration", "samples/s", "tokens/s", "trainer idle", "replica idle", "staleness p50", "max"]


def _show_profile(profile: Profile) -> None:
    rows = [
        ["decoding step", f"{1e3 * profile.step_s:.3g} ms + {1e3 * profile.step_s_per_request:.3g} ms a request"],
        ["prefill", f"{1e3 * profile.prefill_s_per_token:.3g} ms a token"],
        ["turns", f"{profile.turns.mean:.3g}, 99%: {profile.turns.at(0.99):.3g}"],
        ["tokens of a turn", f"{profile.turn_tokens.mean:.4g}, 99%: {profile.turn_tokens.at(0.99):.4g}"],
        ["tool", f"{profile.tool_s.mean:.3g} s, 99%: {profile.tool_s.at(0.99):.3g} s"],
        ["reward", f"{profile.reward_s.mean:.3g} s, 99%: {profile.reward_s.at(0.99):.3g} s"],
        ["optimizer step", f"{profile.train_s:.3g} s + {1e3 * profile.train_s_per_token:.3g} ms a token"],
        ["update", f"{profile.publish_s:.3g} s publish, {profile.stage_s:.3g} s stage, {profile.swap_s:.3g} s swap"],
        ["cores", f"{profile.cores:g}; an engine asks for {profile.engine_cores:.2f}, a rank {profile.rank_cores:.2f}"],
    ]
    show_table("profile", ["what", "takes"], rows)
    for sentence in profile.assumed:
        write_line(f"assumed: {sentence}")
    write_line("")


def _row(name: str, prediction: Prediction) -> list[str]:
    return [
        name,
        f"{prediction.samples_per_s:.4g}",
        f"{prediction.tokens_per_s:,.0f}",
        f"{prediction.trainer_idle:.0%}",
        f"{prediction.replica_idle:.0%}",
        f"{prediction.staleness_p50:g}",
        str(prediction.staleness_max),
    ]


def _show_marginal(more: Marginal) -> None:
    rows = [
        [name, f"{samples:+.3g}", f"{samples / more.base:+.1%}"]
        for name, samples in (("replica", more.replica), ("rank", more.rank))
    ]
    show_table("one more", ["of", "samples/s", ""], rows)


def _show_costs(costs: Sequence[Cost]) -> None:
    rows = [[cost.name, f"{cost.step_s:+.3f}", f"{cost.wait_s:+.3f}"] for cost in costs]
    show_table("the same run without it: seconds less a step", ["without", "step", "of it wait for a batch"], rows)


def _as_figures(prediction: Prediction) -> dict[str, Any]:
    """Return a prediction for the last line of the output."""
    return {
        "samples_per_s": round(prediction.samples_per_s, 4),
        "tokens_per_s": round(prediction.tokens_per_s, 1),
        "trainer_idle": round(prediction.trainer_idle, 4),
        "replica_idle": round(prediction.replica_idle, 4),
        "staleness_p50": prediction.staleness_p50,
        "staleness_max": prediction.staleness_max,
    }
