"""Rehearse a training run without its GPUs and without its weights: does it fit, and how long would a step take?

slipstream rehearse recipe=gsm8k model.path=FOLDER                  # a folder with a config.json, or a hub name
slipstream rehearse recipe=gsm8k card=H200 trainer.num_ranks=4
slipstream rehearse recipe=gsm8k save=profile.json profile.turn_tokens=400     # for slipstream predict profile=...

    card               A100, H100, H200 or B200 [H100]
    save               the file to write the profile to, for slipstream predict
    profile.FIELD=V    a field of the predictor's profile, such as turn_tokens, tool_s or reward_s, see docs/observe.md
    KEY=V              keys of the config, as in slipstream train

The run's own train worker, layouts, losses and optimizer take a step of rank 0 at the real number of ranks, on tensors
that have shapes and no memory. That shows the memory of a rank by part, what is computed, what goes over the wire, and
every place where the host waits for the GPU. With the data sheet of the GPU it becomes a time, and the predictor
simulates the run and other splits of its GPUs. The last line is JSON. Exit code: 0, or 1 for a config that cannot work,
or cannot fit: the error names the key to change.
"""

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.schema import Config, ModelKind
from configs.validate import ConfigError
from scripts.command.command import Ended
from scripts.command.config_only import ConfigOnly, take

if TYPE_CHECKING:
    from scripts.plan.memory import Memory
    from scripts.plan.model_shape import ModelShape
    from scripts.plan.rehearsal.cards import Card, Reach
    from scripts.plan.rehearsal.rehearsal import Rehearsal

DEFAULT_CARD = "H100"


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """The words of the command line that are not keys of the config."""

    card: str
    save: Path | None
    profile: tuple[str, ...]


def main() -> None:
    ConfigOnly(name="rehearse", description=__doc__, split=split, command=rehearse_run).exit(sys.argv[1:])


def split(words: Sequence[str]) -> tuple[Arguments, list[str]]:
    """Return the words of this command, and the others."""
    own, others = take(words, ("card", "save"))
    profile = tuple(word for word in others if word.startswith("profile."))
    save = Path(own["save"]) if "save" in own else None
    rest = [word for word in others if word not in profile]
    return Arguments(card=own.get("card", DEFAULT_CARD), save=save, profile=profile), rest


def rehearse_run(config: Config, own: Arguments) -> Ended:
    """Rehearse, and write everything. Raises ConfigError for a config that cannot fit."""
    from scripts.launch.cluster import resolve_device
    from scripts.plan.machine import Machine, refusals
    from scripts.plan.model_shape import shape_of
    from scripts.plan.rehearsal.cards import find_card, find_reach
    from scripts.plan.rehearsal.rehearsal import rehearse, rehearsed_memory

    card, device = find_card(own.card), resolve_device(config)
    with tempfile.TemporaryDirectory() as folder:
        path = model_folder(config, Path(folder))
        rehearsal = rehearse(config, device, path)
        shape = shape_of(rehearsal.parameters, rehearsal.model)
    rank = rehearsed_memory(config, shape, rehearsal, device)
    gpu = card.memory if config.ray.gpu_memory_gb is None else config.ray.gpu_memory_gb * 2**30
    show_rehearsal(config, device, shape, rehearsal, rank, gpu)
    machine = Machine(gpu=gpu if device == "cuda" else None, host=None, shared=None)
    if problems := refusals(config, shape, device, machine, rank=rank):
        raise ConfigError("\n".join(problems))
    if device == "cuda":
        show_times(config, own, shape, rehearsal, card, find_reach(card))
    return Ended(exit_code=0)


def model_folder(config: Config, scratch: Path) -> str:
    """Return the folder, or the hub name, of the model. One of model.kind=tiny is made in `scratch`."""
    from configs.checkpoint import is_checkpoint
    from scripts.launch.models import untrained_tiny_model
    from trainer.checkpoint.store import checkpoint_at

    if config.model.kind is ModelKind.tiny:
        return untrained_tiny_model(config, scratch / "model")
    path = config.model.path or ""
    folder = Path(path).expanduser()
    return str(checkpoint_at(folder).model_folder) if is_checkpoint(folder) else path


# -- tables ------------------------------------------------------------------------------------------------------------


def show_rehearsal(
    config: Config, device: str, shape: "ModelShape", rehearsal: "Rehearsal", rank: "Memory", gpu: float
) -> None:
    """Write the memory of a rank and of a replica, and the places where the host waits."""
    from scripts.observe.tables import show_table, write_line
    from scripts.plan.machine import format_bytes, list_parts
    from scripts.plan.memory import kv_tokens, replica_worker_memory, total

    billions, ranks = shape.num_parameters / 1e9, config.trainer.num_ranks
    write_line(
        f"{billions:,.2f}B parameters, rank 0 of {ranks} on {device}: a step over 2 micro-batches of "
        f"{rehearsal.tokens:,} tokens, rehearsed in {rehearsal.seconds:.0f} s\n"
    )
    memory = rank.device or rank.host
    rows = [[part.name, format_bytes(part.num_bytes)] for part in memory]
    show_table("memory of a train worker at its peak", ["part", "size"], [*rows, ["all", format_bytes(total(memory))]])
    if rank.device and rank.host:
        write_line(f"and on the host {list_parts(rank.host)}\n")
    if config.rollout.num_replicas:
        worker = replica_worker_memory(config, shape, device, gpu)
        tokens = kv_tokens(config, shape, worker)
        room = "" if tokens is None else f"; KV cache for {tokens:,} tokens"
        write_line(f"a worker of a replica, by formula: {list_parts((*worker.device, *worker.host))}{room}\n")
    if device == "cuda":
        rows = [[place, str(count)] for place, count in rehearsal.host_reads.most_common()]
        waits = sum(rehearsal.host_reads.values())
        show_table(f"the host waits for the GPU {waits} times in this step", ["line", "times"], rows)


def show_times(
    config: Config, own: Arguments, shape: "ModelShape", rehearsal: "Rehearsal", card: "Card", reach: "Reach"
) -> None:
    """Write rooflines, the predicted run, and the best split of its GPUs. Raises ConfigError for profile.* that cannot
    be."""
    from scripts.observe.tables import show_table, write_json, write_line
    from scripts.plan.rehearsal.roofline import part_times
    from scripts.predict.advice import Option, advise_from_predictions
    from scripts.predict.command import parse
    from scripts.predict.rehearsed import profile_of, setup_of, splits
    from scripts.predict.sweep import sweep
    from scripts.simulate.profile import PredictError, to_json
    from scripts.simulate.simulate import simulate

    rows = []
    for operations in rehearsal.operations:
        for part in part_times(operations, card, config.trainer.num_ranks):
            bound = "wire" if part.wire_s > part.compute_s else "compute"
            numbers = (part.matrix_flops / 1e12, part.attention_flops / 1e12, part.memory_bytes / 1e9)
            cells = [f"{number:,.2f}" for number in (*numbers, part.wire_bytes / 1e9, part.seconds)]
            rows.append([part.name, *cells, bound])
    header = ["part", "matrices TFLOP", "attention TFLOP", "memory GB", "wire GB", "seconds", "bound"]
    show_table(f"rooflines of one rank on {card.name} ({card.source})", header, rows)
    for name, factor in reach.parts.items():
        write_line(f"reached in {name}: {factor.value:.2f} ({factor.source})")
    try:
        profile = profile_of(config, shape, rehearsal, card, reach)
        if own.profile:
            profile = parse(own.profile).changed(profile)
        base = setup_of(config)
        ways = splits(config, shape, card, profile)
        best = min(ways, key=lambda split: split.step_s, default=None)
        is_other = best is not None and best.num_ranks != base.num_ranks
        now, choices = simulate(profile, base), list(sweep(profile, base, [best.change] if best and is_other else []))
    except PredictError as error:
        raise ConfigError(str(error)) from error
    if own.save is not None:
        try:
            own.save.write_text(to_json(profile))
        except OSError as error:
            raise ConfigError(f"save={own.save}: must be a file that can be written: {error}") from error
    for sentence in profile.assumed:
        write_line(f"assumed: {sentence}")
    rows = []
    for each in ways:
        seconds = [f"{seconds:.1f}" for seconds in (each.replicas_s, each.trainer_s, each.step_s)]
        rows.append([str(each.num_replicas), str(each.num_ranks), *seconds])
    header = ["replicas", "ranks", "replicas s", "trainer s", "step s"]
    show_table("\nsplits of the GPUs, by arithmetic: seconds for the work of a step", header, rows)
    rows = []
    for name, each in [("as it is", now), *((choice.name, choice.prediction) for choice in choices)]:
        step_s = each.seconds / len(each.step_s)
        shares = [f"{each.trainer_idle:.0%}", f"{each.replica_idle:.0%}"]
        rows.append([name, f"{step_s:.1f}", f"{each.samples_per_s:.3g}", f"{each.tokens_per_s:,.0f}", *shares])
    header = ["configuration", "step s", "samples/s", "tokens/s", "trainer idle", "replica idle"]
    show_table("simulated", header, rows)
    options = [Option(change=each.name, samples_per_s=each.prediction.samples_per_s) for each in choices]
    advice = advise_from_predictions(now, options)
    write_line(advice.text + "\n")
    write_json(figures(rehearsal, now, advice.text))


def figures(rehearsal: "Rehearsal", now: Any, advice: str) -> dict[str, Any]:
    """Return the last line."""
    return {
        "peak_gb": rehearsal.peak["Total"] / 1e9,
        "host_waits": sum(rehearsal.host_reads.values()),
        "step_s": now.seconds / len(now.step_s),
        "samples_per_s": now.samples_per_s,
        "trainer_idle": now.trainer_idle,
        "replica_idle": now.replica_idle,
        "advice": advice,
        "seconds": rehearsal.seconds,
    }


if __name__ == "__main__":
    main()
