"""Which model folder a run starts from. The tiny model is made in Ray tasks, so that the driver needs no torch."""

import threading
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING

from configs.schema import Config
from rollout.data.arithmetic import Problem, demonstrations, split_problems

if TYPE_CHECKING:
    from trainer.tiny.warmup import WarmupSpec

NUM_VAL = 256
DATA_SEED = 1234
"""Of the arithmetic problems: one for all runs, so that runs of different seeds are asked the same questions."""
CLEAN_SHARE = 0.8125
"""Of the warm-up: correct worked answers first, which teach the form quickly, then sloppy ones."""
REPORT_EVERY = 50
WARMUP_THREADS = 2
"""Replicas and train workers start beside it, and then wait for it: the second core has nothing else to do."""


def arithmetic_problems(config: Config) -> tuple[list[Problem], list[Problem]]:
    """(train, held-out), disjoint by question."""
    return split_problems(config.data.num_train, NUM_VAL, DATA_SEED)


def untrained_tiny_model(config: Config, folder: Path) -> str:
    """A folder with the tokenizer and architecture of `warm_tiny_model` and random weights: made in a second, so that
    engines can start on it while the warm-up runs. They get the real weights with the first update."""
    from trainer.tiny.model import save_tiny_model  # noqa: PLC0415  (imports torch)

    spec = _warmup_spec(config)
    corpus = [spec.prompt(question) + answer for question, answer in _demonstrations(config)]
    save_tiny_model(folder, corpus, config.seed, spec.size)
    return str(folder)


def warm_tiny_model(config: Config) -> Iterator[tuple[int, float] | str]:
    """Yields (steps done, loss) now and then, and last the folder of the warm model, from the cache if it is there."""
    from trainer.tiny.warmup import ensure_warm_model  # noqa: PLC0415  (imports torch)

    events: SimpleQueue[tuple[int, float] | str | BaseException] = SimpleQueue()

    def work() -> None:
        import torch  # noqa: PLC0415

        torch.set_num_threads(WARMUP_THREADS)
        try:
            folder = ensure_warm_model(
                Path(config.model.cache_dir).expanduser(),
                _warmup_spec(config),
                _demonstrations(config),
                progress=lambda step, loss: events.put((step, loss)) if step % REPORT_EVERY == 0 else None,
            )
            events.put(str(folder))
        except BaseException as error:
            events.put(error)

    threading.Thread(target=work, name="warm-up", daemon=True).start()
    while True:
        event = events.get()
        if isinstance(event, BaseException):
            raise event
        yield event
        if isinstance(event, str):
            return


def _warmup_spec(config: Config) -> "WarmupSpec":
    from trainer.tiny.model import ModelSize  # noqa: PLC0415  (imports torch)
    from trainer.tiny.warmup import WarmupSpec  # noqa: PLC0415

    size = ModelSize(hidden_size=config.model.hidden_size, num_layers=config.model.num_layers)
    return WarmupSpec(
        seed=config.seed,
        size=size,
        prompt_template=config.data.prompt_template,
    )


def _demonstrations(config: Config) -> list[tuple[str, str]]:
    batch_size = _warmup_spec(config).batch_size
    num_clean = int(config.model.warmup_steps * CLEAN_SHARE) * batch_size
    train, _ = arithmetic_problems(config)
    return demonstrations(
        train, num_clean=num_clean, num_sloppy=config.model.warmup_steps * batch_size - num_clean, seed=config.seed
    )
