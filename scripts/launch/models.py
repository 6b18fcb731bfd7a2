"""The model that a run starts from: the tiny one that the project makes, a Hugging Face model or an exported
checkpoint.

Models are made and exported in Ray tasks, so that the driver needs no torch.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.checkpoint import EXPORTED_FROM, EXPORTED_MODEL, has_kept, is_checkpoint
from configs.data import Generated
from configs.mixture import longest_source, sources_of
from configs.model import ALL_LINEAR, SERVED_RANKS, LoraServing
from configs.rollout import Speculation, SpeculativeConfig
from configs.runtime.deadline import within
from configs.runtime.dotted import find
from configs.schema import Config, ModelKind, Staging
from configs.validate import ConfigError
from rollout.actors.carried import as_raised, carries_errors
from rollout.data import arithmetic, calculator, search_world
from rollout.data.arithmetic import Problem
from rollout.engines.base import EngineSpec, ServedAdapter
from rollout.environments.search.world import Question, World
from rollout.environments.solver import TOOLS
from rollout.mixture import Turns
from scripts.launch.nodes import driver_task
from trainer.checkpoint.store import CheckpointError, checkpoint_at
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
MIXED_VOCAB_SIZE = 1600
"""Room for the words and names of all that is generated, and for the frames of calls, which are a token each."""
WARMUP_THREADS = 2
"""Replicas and train workers start during the warm-up and then wait for it, so that two cores are free for it."""


def engine_spec(config: Config, device: str, model_path: str) -> EngineSpec:
    rollout = config.rollout
    return EngineSpec(
        model_path=model_path,
        device=device,
        dtype=rollout.dtype.value,
        max_model_len=longest_source(config).context_tokens,
        max_position_embeddings=config.model.max_position_embeddings,
        max_num_seqs=rollout.max_num_seqs,
        kv_cache_bytes=None if rollout.kv_cache_mb is None else rollout.kv_cache_mb * 2**20,
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        tensor_parallel_size=rollout.tensor_parallel_size,
        data_parallel_size=rollout.data_parallel_size,
        gpu_share=config.gpu_share,
        enforce_eager=rollout.enforce_eager,
        staging_on_device=config.weight_sync.staging is Staging.device,
        speculative=_speculative(rollout.speculative),
        replay_routes=config.model.replay_routes,
        transfer_backend=config.weight_sync.vllm_backend,
        engine_args=rollout.engine_args,
        log_stats=config.serve.enabled,  # for /metrics
    )


def _speculative(chosen: SpeculativeConfig) -> dict[str, Any] | None:
    """Return the speculative config in vLLM's words."""
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
    """Return whether replicas compute an adapter beside weights that they load themselves."""
    return config.model.lora.serve is LoraServing.adapter


def adapter_spec(config: Config, device: str, model_path: str) -> EngineSpec:
    """Return the spec of a training run's replicas, with `serves_adapter`. `model_path` is what is trained."""
    lora = config.model.lora
    assert lora.rank is not None
    layers = None if lora.targets == [ALL_LINEAR] else tuple({target.rpartition(".")[2]: 0 for target in lora.targets})
    adapter = ServedAdapter(max_rank=min(rank for rank in SERVED_RANKS if rank >= lora.rank), layers=layers)
    return replace(engine_spec(config, device, lora.served_path or model_path), adapter=adapter)


async def boot_model(config: Config, run_dir: Path, *, goes_on: bool = False) -> str:
    """Return the folder or hub name that engines load: the policy, or for the tiny model an untrained one of its
    shape. `goes_on`: as in `exported_once`."""
    if config.model.kind is ModelKind.tiny:
        return await made(config, run_dir / "untrained_model", untrained_tiny_model, config)
    assert config.model.path is not None
    return await exported_once(config, run_dir / EXPORTED_MODEL, "model.path", config.model.path, goes_on=goes_on)


async def exported_once(config: Config, folder: Path, key: str, path: str, *, goes_on: bool) -> str:
    """Return what transformers and vLLM load for the model that `key` names: `path` itself, or `folder`, into which a
    checkpoint of this project is exported.

    Args:
        goes_on: the run goes on in its folder, and takes what it began with. The run that `path` names may have newer
            checkpoints by now, and would be another reference or teacher.
    """
    if not is_checkpoint(Path(path).expanduser()):
        return path
    if goes_on and has_kept(folder, path):
        return str(folder)
    return await made(config, folder, exported, key, path)


async def made(config: Config, folder: Path, make: Callable[..., str], *arguments: Any) -> str:
    """Call `make` with the arguments and a folder to write into, in a Ray task, which may load torch. Return its
    result."""
    shutil.rmtree(folder, ignore_errors=True)  # from an earlier process of a resumed run, maybe half written
    async with within(config.rollout.start_timeout_s, "rollout.start_timeout_s", f"making {folder.name}"):
        task = driver_task(carries_errors(make), config)
        return await as_raised(task.remote(*arguments, folder), f"the task that makes {folder.name}")


async def policy_model(config: Config, boot_path: str, console: Console, kept: Path | None = None) -> str:
    """Return the folder or hub name of what is trained, evaluated or served. Warms the tiny model up.

    Args:
        kept: the folder in which a model that is warmed up stays, whatever becomes of the cache; taken as it is where
            it exists.
    """
    if config.model.kind is ModelKind.hf or config.model.warmup_steps == 0:
        return boot_path
    if kept is not None and kept.is_dir():
        return str(kept)
    warm_up = driver_task(warm_tiny_model, config, num_returns="streaming")
    path = boot_path
    what = "warm-up of the tiny model"
    if config.data.train_files is not None:
        console.message(f"{what}: on problems made here, not on data.train_files; model.warmup_steps=0 leaves it out")
    async with within(config.model.warmup_timeout_s, "model.warmup_timeout_s", what):
        with console.during(what) as show:
            async for reference in warm_up.remote(config, kept):
                event = await reference
                if isinstance(event, str):
                    path = event
                else:
                    show(f"{event[0]}/{config.model.warmup_steps} steps, loss {event[1]:.2f}")
    return path


def chat_template(config: Config) -> str | None:
    """Return a chat template in Jinja, for a tiny model whose tokenizer has none: answers end with the end-of-sequence
    token, and data.prompt_template is around what else is said."""
    if config.model.kind is not ModelKind.tiny or config.data.sources or config.data.generated is Generated.calculator:
        return None
    before, _, after = (json.dumps(part) for part in config.data.prompt_template.partition("{question}"))
    cases = {
        "if message['role'] == 'assistant'": "message['content'] + eos_token",
        "elif message['role'] == 'system'": "message['content'] + '\\n'",
        "else": f"{before} + message['content'] + {after}",
    }
    branches = "".join(f"{{% {case} %}}{{{{ {text} }}}}" for case, text in cases.items())
    return f"{{% for message in messages %}}{branches}{{% endif %}}{{% endfor %}}"


def exported(key: str, path: str, folder: Path) -> str:
    """Export a checkpoint of this project, which `key` names, in the form that transformers and vLLM load. Raises
    ConfigError."""
    import torch

    from trainer.worker.export import export_hf  # takes seconds, as torch does

    try:
        export_hf(checkpoint_at(Path(path).expanduser()), folder, torch.float32)
        (folder / EXPORTED_FROM).write_text(path)
    except CheckpointError as error:
        raise ConfigError(f"{key}={path}: {error}") from error
    return str(folder)


def generated_problems(config: Config) -> tuple[list[Problem], list[Problem]]:
    """Return problems (train, held-out), which share no question."""
    maker = calculator if config.data.generated is Generated.calculator else arithmetic
    return maker.split_problems(config.data.num_train, NUM_VAL, DATA_SEED)


def world_questions(config: Config, world: World) -> tuple[list[Question], list[Question]]:
    """Return questions (train, held-out), which need no article in common."""
    return search_world.split_questions(world, config.data.num_train, NUM_VAL, DATA_SEED)


def untrained_tiny_model(config: Config, folder: Path) -> str:
    """Make a folder with the tokenizer and architecture of `warm_tiny_model` and random weights, within seconds."""
    from trainer.tiny.model import save_tiny_model

    spec = _warmup_spec(config)
    save_tiny_model(folder, spec.tokenizer(_demonstrations(config)), config.seed, spec.size)
    return str(folder)


def warm_tiny_model(config: Config, kept: Path | None = None) -> Iterator[tuple[int, float] | str]:
    """Yield (steps done, loss) now and then, and last the folder of the warm model, which may come from the cache.
    `kept`: the folder that it gets besides."""
    import torch

    from trainer.tiny.model import keep_model
    from trainer.tiny.warmup import ensure_warm_model

    torch.set_num_threads(WARMUP_THREADS)
    cache_dir = Path(config.model.cache_dir).expanduser()
    for event in ensure_warm_model(cache_dir, _warmup_spec(config), _demonstrations(config)):
        if isinstance(event, Path):
            yield str(event if kept is None else keep_model(event, kept))
        elif event[0] % REPORT_EVERY == 0:
            yield event


def _warmup_spec(config: Config) -> "WarmupSpec":
    from trainer.tiny.model import ModelSize
    from trainer.tiny.warmup import WarmupSpec

    model = config.model
    size = ModelSize(hidden_size=model.hidden_size, num_layers=model.num_layers, num_experts=model.num_experts)
    if config.data.sources:  # what ends a turn is in the demonstrations, as it differs between them
        return WarmupSpec(seed=config.seed, size=size, is_chat=True, has_eos=False, vocab_size=MIXED_VOCAB_SIZE)
    match config.data.generated:
        case Generated.arithmetic:
            return WarmupSpec(seed=config.seed, size=size)
        case Generated.calculator:
            return WarmupSpec(seed=config.seed, size=size, is_chat=True)
        case Generated.search_world:
            return WarmupSpec(seed=config.seed, size=size, has_eos=False, vocab_size=SEARCH_VOCAB_SIZE)


def _demonstrations(config: Config) -> "list[Demonstration]":
    """Return the answers that the tiny model is warmed up on: data.demonstrations, or right answers and then sloppy
    ones."""
    batch_size = _warmup_spec(config).batch_size
    make = _mixed_demonstrations if config.data.sources else _demonstrations_of
    return make(config, config.model.warmup_steps * batch_size, batch_size)


def _mixed_demonstrations(config: Config, count: int, batch_size: int) -> "list[Demonstration]":
    """Return demonstrations of all sources, which take turns by their weights. Where the policy ends a turn by itself,
    it says so by the token that ends the turns of a chat."""
    from trainer.tiny.chat import END

    sources = sources_of(config)
    turns = Turns({source.name: source.weight for source in sources})
    placed: list[tuple[int, Demonstration]] = []
    for source in sources:
        ends = END if source.config.data.generated is not Generated.search_world else ""
        mine = _demonstrations_of(source.config, turns.groups(source.name, count), batch_size)
        for number, texts in enumerate(mine):
            ended = tuple(text + ends if place % 2 else text for place, text in enumerate(texts))
            placed.append((turns.place(source.name, number), ended))
    return [texts for _, texts in sorted(placed, key=lambda entry: entry[0])]


def _demonstrations_of(config: Config, count: int, batch_size: int) -> "list[Demonstration]":
    """Return so many demonstrations of a source, of which whole batches are of right answers."""
    if config.data.demonstrations is not None:
        make = find("data.demonstrations", config.data.demonstrations, ("num", "seed"), named=config.data.loader_args)
        episodes = make(count, config.seed, **config.data.loader_args)
        return [(_prompt(config, question), *rest) for question, *rest in episodes]
    num_clean = int(count // batch_size * CLEAN_SHARE) * batch_size
    numbers = {"num_clean": num_clean, "num_sloppy": count - num_clean, "seed": config.seed}
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
