"""Models that are made before a run: a warm-up may take longer than a replica may take to start."""

import asyncio
import io
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from configs.schema import Config, ModelKind
from scripts.launch import models
from tests.support.compose import changed, resolve
from tests.support.fakes import run_virtual
from trainer.tiny import chat
from trainer.tiny.model import EOS_TOKEN_ID
from trainer.tracking.console import PlainConsole

STEP_S = 10.0


class SlowWarmUp:
    """A task of Ray that yields a reference for each step, and then one of the folder."""

    def remote(self, config: Config, kept: object) -> AsyncIterator[Any]:
        async def answer(event: object) -> object:
            return event

        async def steps() -> AsyncIterator[Any]:
            for step in range(1, config.model.warmup_steps + 1):
                await asyncio.sleep(STEP_S)
                yield answer((step, 0.5))
            yield answer("/cache/warm")

        return steps()


@pytest.mark.parametrize("goes_on", [True, False])
@pytest.mark.parametrize("named", ["mine", "other"])
def test_a_run_that_goes_on_keeps_the_checkpoint_that_it_began_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str, goes_on: bool
) -> None:
    """The run of model.path may have newer ones by now. Another model.path is another reference."""
    run_dir, path = tmp_path / "run", tmp_path / named
    (path / "checkpoints").mkdir(parents=True)
    (run_dir / "exported_model").mkdir(parents=True)
    (run_dir / "exported_model" / "exported_from.txt").write_text(str(tmp_path / "mine"))
    made = list[str]()

    async def make(config: Config, folder: Path, exported: Any, key: str, path: str) -> str:
        made.append(path)
        return str(folder)

    monkeypatch.setattr(models, "made", make)
    config = changed(Config(), model__kind=ModelKind.hf, model__path=str(path))
    assert asyncio.run(models.boot_model(config, run_dir, goes_on=goes_on)) == str(run_dir / "exported_model")
    assert made == ([] if goes_on and named == "mine" else [str(path)])


@pytest.mark.parametrize(("timeout_s", "is_made"), [(3600.0, True), (660.0, False)])
def test_a_warm_up_has_a_deadline_of_its_own(monkeypatch: pytest.MonkeyPatch, timeout_s: float, is_made: bool) -> None:
    """Beside other work 1,000 steps took eleven minutes, which were counted against rollout.start_timeout_s."""
    monkeypatch.setattr(models, "driver_task", lambda *_, **__: SlowWarmUp())
    config = changed(Config(), model__warmup_steps=67, model__warmup_timeout_s=timeout_s)
    assert config.rollout.start_timeout_s < config.model.warmup_steps * STEP_S < Config().model.warmup_timeout_s
    making = models.policy_model(config, "untrained", PlainConsole(60, io.StringIO()))
    if is_made:
        assert run_virtual(making) == "/cache/warm"
    else:
        with pytest.raises(TimeoutError, match=r"warm-up of the tiny model took longer than model.warmup_timeout_s="):
            run_virtual(making)


def test_a_model_for_several_sources_is_shown_them_in_turns_by_their_weights() -> None:
    """Each with what ends its turns, in one vocabulary that says all of it."""
    config = resolve("recipe=mixture", "data.sources.search.weight=2", "model.warmup_steps=4")
    shown = models._demonstrations(config)
    assert len(shown) == 4 * 16
    kinds = {"Question": "arithmetic", chat.START: "agent"}
    of = [next((kind for start, kind in kinds.items() if texts[0].startswith(start)), "search") for texts in shown]
    assert of[:4].count("search") == 2 and Counter(of) == {"arithmetic": 16, "agent": 16, "search": 32}
    for kind, texts in zip(of, shown, strict=True):
        assert all(said.endswith(chat.END) == (kind != "search") for said in texts[1::2])
    tokenizer = models._warmup_spec(config).tokenizer(shown)
    assert tokenizer.convert_tokens_to_ids(chat.END) == tokenizer.eos_token_id == EOS_TOKEN_ID
    for text in ("".join(texts) for texts in shown):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer) <= models.MIXED_VOCAB_SIZE + len(chat.TAGS)
