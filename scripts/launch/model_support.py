"""Refuses a model that can never run, by its config.json and the names of its files, before anything is loaded.

transformers is read and not imported, which takes seconds.
"""

import ast
import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from configs.checkpoint import is_checkpoint
from configs.checks.problem import Problem
from configs.installed import parsed_source
from configs.model import LoraServing
from configs.schema import Config, ModelKind
from configs.validate import ConfigError
from configs.weight_forms import LATENT_ATTENTION

WEIGHTS = ("model*.safetensors", "pytorch_model*.bin")
"""The files that transformers and vLLM both load."""
UNTESTED_LATENT_ATTENTION = frozenset(
    {
        "axk1",
        "bailing_hybrid",
        "deepseek_v32",
        "glm_moe_dsa",
        "kimi_k2",
        "kimi_linear",
        "longcat_flash",
        "pangu_ultra_moe",
    }
)
"""The types that vLLM computes with multi-head latent attention where they have a `kv_lora_rank`, and of which no
update has been tested. Others that it adds are refused by the replica when it starts."""
NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""The names by which configs of mixtures say how many experts a layer has."""
ADAPTERS_ONLY = "replicas can serve it with an adapter beside it: set model.lora.rank and model.lora.serve=adapter"


def check_model(config: Config, *, trains: bool, updates: bool, device: str | None = None) -> None:
    """Refuse a model.path or teacher.path that the command cannot run.

    Args:
        trains: whether the trainer loads the model.
        updates: whether replicas take its weights from the trainer.
        device: "cpu" or "cuda", on which replicas may serve an adapter. None: they serve none.

    Raises:
        ConfigError: a line for each problem.
    """
    problems: list[Problem] = []
    if device == "cpu" and updates and config.model.lora.serve is LoraServing.adapter and _has_experts(config):
        allowed = (
            "must be merged for a mixture of experts on a CPU, where vLLM has no kernel for adapters beside experts"
        )
        problems.append(Problem("model.lora.serve", allowed))
    if config.model.kind is ModelKind.hf and config.model.path is not None:
        problems += _problems("model.path", config.model.path, trains)
        if updates and config.model.lora.serve is not LoraServing.adapter:
            problems += _update_problems(config.model.path)
        if config.model.replay_routes and _is_dense(config.model.path):
            problems.append(Problem("model.replay_routes", "model.path has no experts: set it to null or false"))
        if trains and config.trainer.expert_parallel:
            problems += _division_problems(config, config.model.path)
    if updates and config.teacher.path is not None:
        problems += _problems("teacher.path", config.teacher.path, trains=False)
    if problems:
        raise ConfigError("\n".join(problem.line(config) for problem in problems))


def is_quantized(config: Config) -> bool:
    """Return whether the weights of model.path are quantized, as far as its config.json is on this machine."""
    if config.model.kind is not ModelKind.hf or config.model.path is None:
        return False
    return _quantization(_model_config("model.path", config.model.path) or {}) is not None


def _quantization(model: Mapping[str, Any]) -> Mapping[str, Any] | None:
    text = model.get("text_config") or model
    return model.get("quantization_config") or text.get("quantization_config") or None


def _problems(key: str, path: str, trains: bool) -> Iterator[Problem]:
    """Yield what keeps the model from being loaded at all; nothing for one that is not on this machine, and for a
    checkpoint of this project."""
    folder = Path(path).expanduser()
    if is_checkpoint(folder):
        return
    model = _model_config(key, path)
    if model is not None:
        yield from _type_problems(key, model, trains)
    if model is not None and folder.is_dir() and not any(file for glob in WEIGHTS for file in folder.glob(glob)):
        yield Problem(key, f"the folder has a config.json and no weights: {' or '.join(WEIGHTS)}")


def _type_problems(key: str, model: Mapping[str, Any], trains: bool) -> Iterator[Problem]:
    """Yield what is wrong with its type. A model that is not trained, vLLM may know by itself."""
    kind, known = model.get("model_type"), causal_types()
    if model.get("is_encoder_decoder"):
        yield Problem(key, f"{kind} is an encoder-decoder: only causal language models (decoders) can be sampled")
    elif kind is None:
        yield Problem(key, "its config.json names no model_type")
    elif trains and known and kind not in known:
        if "AutoModelForCausalLM" in (model.get("auto_map") or {}):
            yield Problem(key, f"{kind} is code in the model's own folder, which is not run")
        else:
            yield Problem(key, f"the installed transformers has no causal language model of model_type={kind}")


def _update_problems(path: str) -> Iterator[Problem]:
    """Yield why replicas cannot take updates of these weights, which a receiver would say after all is loaded."""
    model = _model_config("model.path", path)
    if model is None:
        return
    text = model.get("text_config") or model
    if quantized := _quantization(model):
        method = quantized.get("quant_method", "unknown")
        yield Problem("model.path", f"its weights are quantized ({method}), and updates are not: {ADAPTERS_ONLY}")
    if text.get("model_type") in UNTESTED_LATENT_ATTENTION and text.get("kv_lora_rank") is not None:
        tested = ", ".join(sorted(LATENT_ATTENTION))
        what = f"updates of its multi-head latent attention are untested: they are for {tested}"
        yield Problem("model.path", f"{text['model_type']}: {what}")


def _has_experts(config: Config) -> bool:
    """Return whether the policy is known to be a mixture of experts."""
    if config.model.kind is ModelKind.tiny:
        return config.model.num_experts > 0
    path = config.model.path or ""
    return _model_config("model.path", path) is not None and not _is_dense(path)


def _is_dense(path: str) -> bool:
    """Return whether its config says nothing of experts, as far as it is on this machine."""
    model = _model_config("model.path", path) or {"experts": None}
    return not any("expert" in name for name in model.get("text_config") or model)


def _division_problems(config: Config, path: str) -> Iterator[Problem]:
    """Yield why the ranks cannot divide the model's experts."""
    if _is_dense(path):
        yield Problem("trainer.expert_parallel", "model.path has no experts: set it to false")
        return
    model, ranks = _model_config("model.path", path) or {}, config.trainer.num_ranks
    text = model.get("text_config") or model
    for name in NUM_EXPERTS:
        match text.get(name):
            case int(number) if number % ranks:
                allowed = f"trainer.num_ranks={ranks} must divide the {number} experts of model.path ({name})"
                yield Problem("trainer.expert_parallel", f"{allowed}: change the ranks, or set it to false")


def _model_config(key: str, path: str) -> Mapping[str, Any] | None:
    """Return the model's config.json, from its folder or the cache of the hub; None where it is in neither. Raises
    ConfigError for a damaged one."""
    file = Path(path).expanduser() / "config.json"
    if not file.is_file():
        try:
            cached = try_to_load_from_cache(path, "config.json")
        except HFValidationError:
            return None
        if not isinstance(cached, str):
            return None
        file = Path(cached)
    try:
        model = json.loads(file.read_bytes())
    except ValueError as error:
        raise ConfigError(f"{key}={path}: config.json is no JSON: {error}") from error
    if not isinstance(model, dict):
        raise ConfigError(f"{key}={path}: config.json must be a JSON object, is {type(model).__name__}")
    return model


@cache
def causal_types() -> frozenset[str]:
    """Return the values of `model_type` for which the installed transformers has a causal language model; none where
    its source reads otherwise than expected."""
    for node in parsed_source("transformers", "models", "auto", "modeling_auto.py") or ():
        match node:
            case ast.Assign(
                targets=[ast.Name("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES")], value=ast.Call(args=[ast.List() as pairs])
            ):
                return frozenset(kind for kind, _ in ast.literal_eval(pairs))
    return frozenset()
