"""The forms in which vLLM keeps weights and in which updates have been tested to reach them. All others are refused."""

LATENT_ATTENTION = frozenset({"deepseek_v2", "deepseek_v3", "glm4_moe_lite"})
"""The values of `model_type` whose multi-head latent attention can be updated."""
QUANTIZATIONS = frozenset({"fp8_per_channel"})
"""The values of vLLM's `quantization`, of weights that it loads as they are, that can be updated."""
