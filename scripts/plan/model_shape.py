"""The sizes of a model from which its memory follows, read without its weights: from its config and the headers of
its files."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open

from configs.model import ALL_LINEAR, names_experts
from configs.schema import Config, ModelKind
from configs.validate import ConfigError
from scripts.launch.model_support import NUM_EXPERTS

TINY_VOCABULARY, TINY_QUERY_HEADS, TINY_KEY_HEADS, TINY_HEAD_SIZE, TINY_EXPERTS_PER_TOKEN = 448, 4, 2, 32, 2
"""The sizes of the models made here (trainer/tiny/model.py): about how many tokens, the heads, and the experts of a
token."""
OTHER_LAYERS = (".mamba.", ".mixer.", ".linear_attn.", ".conv.", ".kv_a_proj")
"""In the names of tensors: recurrent layers, and attention over a latent vector."""
NO_LINEAR_LAYER = re.compile(r"\.(experts|gate|router)\.")
"""In the names of matrices of a mixture of experts, which are none of `nn.Linear` in transformers."""
OF_EXPERTS = re.compile(r"\.experts\.")
"""In the names of what ranks can divide: not of experts that every token passes through."""
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "experts_per_token", "moe_topk", "moe_k")
"""The names by which configs of mixtures say how many experts compute a token."""
Tensors = dict[str, tuple[int, ...]]
"""Shapes by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """One of the decoder's layers, which are all alike: what its activations follow from."""

    hidden: int
    query: int
    """Query heads times their size."""
    key: int
    """Key heads times their size."""
    norms: int
    """Widths of all norms together."""
    feed_forward: int
    """Width of what a token passes through, all of its experts together."""
    is_gated: bool
    experts: int
    """The experts that compute a token; 0 in a dense layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """The experts among which a router chooses."""

    num_experts: int
    """Experts of a layer."""
    per_token: int
    """Experts that a router chooses for a token."""
    num_parameters: int
    """Parameters of the experts of all layers."""
    layer_parameters: int
    """Parameters of the experts of one layer, the one with the most."""
    widths: int
    """Rows and columns of all matrices of experts: the sizes of adapters of rank 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    num_parameters: int
    num_layers: int
    layer_parameters: int
    """Parameters of the largest layer."""
    head_parameters: int
    """Parameters of the output layer; those of the embedding, where they are tied."""
    rest_parameters: int
    """Parameters outside of layers: embedding, head, norm."""
    linear: tuple[tuple[str, int], ...]
    """(name, inputs + outputs) of every linear layer of the decoder."""
    layer: LayerShape | None
    """None for a layer whose activations are not known."""
    mixture: Mixture | None = None
    """None: a dense model, or its config does not say how many experts it has."""

    def adapter_parameters(self, rank: int, targets: list[str]) -> int:
        """Return the number of parameters of adapters. Those of experts are counted as if all of their matrices had
        one; in files with gate and up apart, that is a little more than they have stacked."""
        linear = sum(
            size
            for name, size in self.linear
            if targets == [ALL_LINEAR] or any(name == target or name.endswith(f".{target}") for target in targets)
        )
        return rank * (linear + (self.mixture.widths if self.mixture is not None and names_experts(targets) else 0))

    @property
    def kv_values(self) -> int | None:
        """Keys and values of one token."""
        return None if self.layer is None else 2 * self.num_layers * self.layer.key


def model_shape(config: Config) -> ModelShape | None:
    """None where the model is not on this machine, or not in safetensors. Raises ConfigError for damaged files."""
    model = config.model
    if model.kind is ModelKind.tiny:
        return _tiny_shape(model.hidden_size, model.num_layers, model.num_experts)
    return _shape_at("model.path", model.path or "")


def shape_of(tensors: Tensors, model: dict[str, Any]) -> ModelShape:
    """Return the shape of a model with these parameters, and `model` as its config."""
    named = {f":{name}": shape for name, shape in tensors.items()}
    return _shape(named, _layer_shape(model, named), _experts_of(model))


def teacher_shape(config: Config) -> ModelShape | None:
    """Return the shape of the model that a distillation learns from, as `model_shape` does of the policy."""
    path = config.teacher.path
    return None if path is None else _shape_at("teacher.path", path)


def _shape_at(key: str, path: str) -> ModelShape | None:
    """None for a checkpoint of this project, too: its files are no safetensors."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        try:
            folder = Path(snapshot_download(path, local_files_only=True))
        except (LocalEntryNotFoundError, HFValidationError, HfHubHTTPError):
            return None
    tensors = dict(_headers(key, folder.glob("model*.safetensors")))  # what transformers loads
    file = folder / "config.json"
    model = json.loads(file.read_bytes()) if file.is_file() else {}
    return _shape(tensors, _layer_shape(model, tensors), _experts_of(model)) if tensors else None


def _headers(key: str, files: Iterable[Path]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Read the headers. Raise ConfigError for a file that is damaged, or that is only a pointer of git-lfs."""
    for file in files:
        try:
            with safe_open(file, framework="numpy") as tensors:
                for name in tensors.keys():  # noqa: SIM118
                    yield f"{file.name}:{name}", tuple(tensors.get_slice(name).get_shape())
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{key}={file.parent}: {file.name} cannot be read: {error}") from error


def _shape(tensors: Tensors, layer: LayerShape | None, experts: tuple[int, int] | None) -> ModelShape:
    """Return the shape. `experts` are the numbers of those of a layer and of a token."""
    per_layer: Counter[str] = Counter()
    experts_per_layer: Counter[str] = Counter()
    linear: list[tuple[str, int]] = []
    widths = 0
    for name, shape in tensors.items():
        match = re.search(r"\.(\d+)\.", name)
        if match is None:
            continue
        per_layer[match[1]] += prod(shape)
        if OF_EXPERTS.search(name):
            experts_per_layer[match[1]] += prod(shape)
            widths += prod(shape[:-2]) * sum(shape[-2:]) if name.endswith((".weight", "_proj")) else 0
        if len(shape) == 2 and name.endswith(".weight") and not NO_LINEAR_LAYER.search(name):
            linear.append((name.partition(":")[2].removesuffix(".weight"), sum(shape)))
    mixture = None
    if experts is not None and any(experts_per_layer.values()):
        mixture = Mixture(
            num_experts=experts[0],
            per_token=experts[1],
            num_parameters=sum(experts_per_layer.values()),
            layer_parameters=max(experts_per_layer.values()),
            widths=widths,
        )
    total = sum(map(prod, tensors.values()))
    tables = [prod(shape) for name, shape in tensors.items() if len(shape) == 2 and not re.search(r"\.\d+\.", name)]
    return ModelShape(
        num_parameters=total,
        num_layers=len(per_layer),
        layer_parameters=max(per_layer.values(), default=0),
        head_parameters=max(tables, default=0),
        rest_parameters=total - sum(per_layer.values()),
        linear=tuple(linear),
        layer=layer,
        mixture=mixture,
    )


def _tiny_shape(width: int, num_layers: int, num_experts: int) -> ModelShape:
    query, key = TINY_QUERY_HEADS * TINY_HEAD_SIZE, TINY_KEY_HEADS * TINY_HEAD_SIZE
    projections = {"q_proj": query, "k_proj": key, "v_proj": key, "o_proj": query}
    sizes = {name: (rows, width) for name, rows in projections.items()}
    if num_experts == 0:
        sizes |= dict.fromkeys(("gate_proj", "up_proj", "down_proj"), (4 * width, width))
    else:
        inner = 4 * width // TINY_EXPERTS_PER_TOKEN
        sizes |= {f"experts.{name}": (num_experts, inner, width) for name in ("gate_proj", "up_proj", "down_proj")}
        sizes["gate"] = (num_experts, width)
    tensors: Tensors = {":embed.weight": (TINY_VOCABULARY, width), ":norm": (width,)}
    for index in range(num_layers):
        tensors |= {f":layers.{index}.{name}.weight": size for name, size in sizes.items()}
        tensors |= {f":layers.{index}.{name}": (width,) for name in ("input_norm", "output_norm")}
        tensors |= {f":layers.{index}.{name}": (TINY_HEAD_SIZE,) for name in ("q_norm", "k_norm")}
    layer = LayerShape(
        hidden=width,
        query=query,
        key=key,
        norms=2 * width + query + key,
        feed_forward=4 * width,
        is_gated=True,
        experts=TINY_EXPERTS_PER_TOKEN if num_experts else 0,
    )
    return _shape(tensors, layer, (num_experts, TINY_EXPERTS_PER_TOKEN) if num_experts else None)


def _experts_of(model: dict[str, Any]) -> tuple[int, int] | None:
    """Return the experts of a layer and of a token; None where the config does not say them."""
    model = model.get("text_config") or model
    number, per_token = _first(model, *NUM_EXPERTS), _first(model, *EXPERTS_PER_TOKEN)
    return (number, per_token) if number and per_token else None


def _layer_shape(model: dict[str, Any], tensors: Tensors) -> LayerShape | None:
    """None for what has no attention with heads and no feed-forward block."""
    model = model.get("text_config") or model
    if any(kind in name for name in tensors for kind in OTHER_LAYERS):
        return None
    hidden, heads = _first(model, "hidden_size", "n_embd"), _first(model, "num_attention_heads", "n_head")
    if not hidden or not heads:
        return None
    width = _first(model, "intermediate_size", "n_inner", "ffn_dim") or 4 * hidden
    head_size = _first(model, "head_dim") or hidden // heads
    experts = _first(model, "num_experts_per_tok") or 0
    if experts:
        shared = _first(model, "shared_expert_intermediate_size") or 0
        width = experts * (_first(model, "moe_intermediate_size") or width) + shared
    query, key = heads * head_size, (_first(model, "num_key_value_heads") or heads) * head_size
    has_normed_heads = any(".q_norm." in name for name in tensors)
    return LayerShape(
        hidden=hidden,
        query=query,
        key=key,
        norms=2 * hidden + (query + key if has_normed_heads else 0),
        feed_forward=width,
        is_gated=any(".gate_" in name or ".w3." in name for name in tensors),
        experts=experts,
    )


def _first(model: dict[str, Any], *names: str) -> int | None:
    """Return the value of the first of these names that the config has."""
    return next((model[name] for name in names if isinstance(model.get(name), int)), None)
