"""Which model a run starts from: the tiny one that the project makes, a Hugging Face model or an exported checkpoint.

Models are made and exported in Ray tasks, so that the driver needs no torch.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from configs.checkpoint import is_checkpoint
from configs.data import Generated
from configs.model import ALL_LINEAR, SERVED_RANKS, LoraServing
from configs.rollout import Speculation, SpeculativeConfig
from configs.runtime.carried import as_raised, carries_errors
from configs.runtime.deadline import within
from configs.runtime.dotted import find
from configs.schema import Config, ModelKind, Staging
from configs.validate import ConfigError
from rollout.agents.solver import TOOLS
from rollout.data import arithmetic, calculator, search_world
from rollout.data.arithmetic import Problem
from rollout.engines.base import EngineSpec, ServedAdapter
from rollout.search.world import Question, World
from scripts.export_hf import checkpoint_at, export
from trainer.checkpoint.store import CheckpointError
from trainer.tracking.console import Console

if TYPE_CHECKING:
    from trainer.tiny.warmup import Demonstration, WarmupSpec

NUM_VAL = 256
DATA_SEED = 1234
"""Seed of the generated problems: the same for all runs, so that runs of different seeds get the same questions."""
CLEAN_SHARE = 0.8125
"""Share of the warm-up that uses correct worked answers, which teach the form quickly; sloppy ones follow."""
REPORT_EVERY = 50
"""Warm-up steps between two lines of progress."""
SEARCH_VOCAB_SIZE = 1088
"""Room for the words of an episode and the syllables of names: a name is as many tokens as it has syllables."""
WARMUP_THREADS = 2
"""Replicas and train workers start during the warm-up and then wait for it, so that two cores are free for it."""


def engine_spec(config: Config, device: str, model_path: str) -> EngineSpec:
    rollout = config.rollout
    return EngineSpec(
        model_path=model_path,
        device=device,
        dtype=rollout.dtype.value,
        max_model_len=config.data.max_prompt_tokens + rollout.max_response_tokens,
        max_position_embeddings=config.model.max_position_embeddings,
        max_num_seqs=rollout.max_num_seqs,
        kv_cache_bytes=None if rollout.kv_cache_mb is None else rollout.kv_cache_mb * 2**20,
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        tensor_parallel_size=rollout.tensor_parallel_size,
        data_parallel_size=rollout.data_parallel_size,
        gpu_share=config.gpu_share,
        enforce_eager=rollout.enforce_eager,
        staging_on_device=config.weight_sync.staging is Staging.device,
        prefill_grace_s=config.weight_sync.prefill_grace_s,
        speculative=_speculative(rollout.speculative),
        engine_args=rollout.engine_args,
    )


def _speculative(chosen: SpeculativeConfig) -> dict[str, Any] | None:
    """In vLLM's words."""
    method = {"method": chosen.method.value, "num_speculative_tokens": chosen.num_tokens}
    match chosen.method:
        case Speculation.none:
            return None
        case Speculation.ngram:
            return method | {"prompt_lookup_min": chosen.min_match, "prompt_lookup_max": chosen.max_match}
        case Speculation.draft_model | Speculation.eagle | Speculation.eagle3:
            return method | {"model": chosen.model}
        case Speculation.suffix | Speculation.mtp:
            return method


def serves_adapter(config: Config) -> bool:
    """Whether replicas compute an adapter beside weights that they load themselves."""
    return config.model.lora.serve is LoraServing.adapter


def adapter_spec(config: Config, device: str, model_path: str) -> EngineSpec:
    """Of a training run's replicas, with `serves_adapter`. `model_path`: what is trained."""
    lora = config.model.lora
    assert lora.rank is not None
    layers = None if lora.targets == [ALL_LINEAR] else tuple({target.rpartition(".")[2]: 0 for target in lora.targets})
    adapter = ServedAdapter(max_rank=min(rank for rank in SERVED_RANKS if rank >= lora.rank), layers=layers)
    return replace(engine_spec(config, device, lora.served_path or model_path), adapter=adapter)


async def boot_model(config: Config, run_dir: Path) -> str:
    """The folder or hub name that engines load: the policy, or for the tiny model an untrained one of its shape."""
    make, path = untrained_tiny_model, run_dir / "untrained_model"
    if config.model.kind is ModelKind.hf:
        assert config.model.path is not None
        if not is_checkpoint(Path(config.model.path).expanduser()):
            return config.model.path
        make, path = _exported_model, run_dir / "exported_model"
    return await made(make, config, path)


async def made(make: Callable[[Config, Path], str], config: Config, folder: Path) -> str:
    """What `make` returns, which is called where torch may be loaded and writes into the folder."""
    shutil.rmtree(folder, ignore_errors=True)  # from an earlier process of a resumed run, maybe half written
    async with within(config.rollout.start_timeout_s, "rollout.start_timeout_s", f"making {folder.name}"):
        task: Any = ray.remote(num_cpus=1)(carries_errors(make))
        return await as_raised(task.remote(config, folder), f"the task that makes {folder.name}")


async def policy_model(config: Config, boot_path: str, console: Console) -> str:
    """The folder or hub name of what is trained, evaluated or served. Warms the tiny model up."""
    if config.model.kind is ModelKind.hf or config.model.warmup_steps == 0:
        return boot_path
    warm_up, path = ray.remote(num_cpus=1, num_returns="streaming")(warm_tiny_model), boot_path
    with console.during("warm-up of the tiny model") as show:
        async for reference in warm_up.remote(config):  # pyright: ignore[reportGeneralTypeIssues]
            event = await reference
            if isinstance(event, str):
                path = event
            else:
                show(f"{event[0]}/{config.model.warmup_steps} steps, loss {event[1]:.2f}")
    return path


def chat_template(config: Config) -> str | None:
    """In Jinja, for a tiny model whose tokenizer has none: answers end with the end-of-sequence token, and
    data.prompt_template is around what else is said."""
    if config.model.kind is not ModelKind.tiny or config.data.generated is Generated.calculator:
        return None
    before, _, after = (json.dumps(part) for part in config.data.prompt_template.partition("{question}"))
    said = {
        "if message['role'] == 'assistant'": "message['content'] + eos_token",
        "elif message['role'] == 'system'": "message['content'] + '\\n'",
        "else": f"{before} + message['content'] + {after}",
    }
    cases = "".join(f"{{% {case} %}}{{{{ {text} }}}}" for case, text in said.items())
    return f"{{% for message in messages %}}{cases}{{% endif %}}{{% endfor %}}"


def _exported_model(config: Config, folder: Path) -> str:
    return exported("model.path", config.model.path, folder)


def exported(key: str, path: str | None, folder: Path) -> str:
    """Writes a checkpoint of this project, which `key` names, in the form that transformers and vLLM load. Raises
    ConfigError."""
    try:
        export(checkpoint_at(Path(path or "").expanduser()), folder, "float32")
    except CheckpointError as error:
        raise ConfigError(f"{key}={path}: {error}") from error
    return str(folder)


def generated_problems(config: Config) -> tuple[list[Problem], list[Problem]]:
    """Returns (train, held-out), which share no question."""
    made = calculator if config.data.generated is Generated.calculator else arithmetic
    return made.split_problems(config.data.num_train, NUM_VAL, DATA_SEED)


def world_questions(config: Config, world: World) -> tuple[list[Question], list[Question]]:
    """Returns (train, held-out), which need no article in common."""
    return search_world.split_questions(world, config.data.num_train, NUM_VAL, DATA_SEED)


def untrained_tiny_model(config: Config, folder: Path) -> str:
    """Makes a folder with the tokenizer and architecture of `warm_tiny_model` and random weights, within seconds."""
    from trainer.tiny.model import save_tiny_model

    spec = _warmup_spec(config)
    save_tiny_model(folder, spec.tokenizer(_demonstrations(config)), config.seed, spec.size)
    return str(folder)


def warm_tiny_model(config: Config) -> Iterator[tuple[int, float] | str]:
    """Yields (steps done, loss) now and then, and last the folder of the warm model, which may come from the cache."""
    import torch

    from trainer.tiny.warmup import ensure_warm_model

    torch.set_num_threads(WARMUP_THREADS)
    cache_dir = Path(config.model.cache_dir).expanduser()
    for event in ensure_warm_model(cache_dir, _warmup_spec(config), _demonstrations(config)):
        if isinstance(event, Path):
            yield str(event)
        elif event[0] % REPORT_EVERY == 0:
            yield event


def _warmup_spec(config: Config) -> "WarmupSpec":
    from trainer.tiny.model import ModelSize
    from trainer.tiny.warmup import WarmupSpec

    size = ModelSize(hidden_size=config.model.hidden_size, num_layers=config.model.num_layers)
    match config.data.generated:
        case Generated.arithmetic:
            return WarmupSpec(seed=config.seed, size=size)
        case Generated.calculator:
            return WarmupSpec(seed=config.seed, size=size, is_chat=True)
        case Generated.search_world:
            return WarmupSpec(seed=config.seed, size=size, has_eos=False, vocab_size=SEARCH_VOCAB_SIZE)


def _demonstrations(config: Config) -> "list[Demonstration]":
    """What the tiny model is warmed up on: those of data.demonstrations, or right answers and then sloppy ones."""
    batch_size = _warmup_spec(config).batch_size
    if config.data.demonstrations is not None:
        make = find("data.demonstrations", config.data.demonstrations, ("num", "seed"), named=config.data.loader_args)
        pairs = make(config.model.warmup_steps * batch_size, config.seed, **config.data.loader_args)
        return [(config.data.prompt_template.replace("{question}", question), answer) for question, answer in pairs]
    num_clean = int(config.model.warmup_steps * CLEAN_SHARE) * batch_size
    num_sloppy = config.model.warmup_steps * batch_size - num_clean
    numbers = {"num_clean": num_clean, "num_sloppy": num_sloppy, "seed": config.seed}
    if config.data.generated is Generated.search_world:
        world = World()
        episodes = search_world.demonstrations(world, world_questions(config, world)[0], **numbers)
        return [(_prompt(config, question), *rest) for question, *rest in episodes]
    train, _ = generated_problems(config)
    if config.data.generated is Generated.calculator:
        from trainer.tiny.chat import turns

        return [turns(messages, TOOLS) for messages in calculator.demonstrations(train, **numbers)]
    pairs = arithmetic.demonstrations(train, **numbers)
    return [(_prompt(config, question), answer) for question, answer in pairs]


def _prompt(config: Config, question: str) -> str:
    return config.data.prompt_template.replace("{question}", question)
