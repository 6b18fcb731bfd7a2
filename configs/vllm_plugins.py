"""Plugins of vLLM, which runs load only for a backend of its weight transfer that is a plugin's."""

from importlib.metadata import entry_points

from configs.weight_sync import VLLM_BACKENDS

VARIABLE = "VLLM_PLUGINS"
"""The environment variable that tells vLLM which plugins to load; empty for none."""
GROUP = "vllm.general_plugins"


def plugin_names() -> list[str]:
    """Return the plugins that are installed besides those that come with vLLM."""
    return sorted({entry.name for entry in entry_points(group=GROUP) if not entry.value.startswith("vllm.")})


def plugin_env(backend: str | None) -> dict[str, str]:
    """Return the environment in which vLLM loads what a backend needs; empty for its own, and for none."""
    return {} if backend is None or backend in VLLM_BACKENDS else {VARIABLE: ",".join(plugin_names())}
