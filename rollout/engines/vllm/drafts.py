"""How many tokens were drafted for an engine, and how many of them it accepted (speculative decoding)."""

from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase


class DraftCounter(StatLoggerBase):
    """vLLM hands it the statistics of every step, of all data-parallel engines. An engine counts from its start on.

    Example: GatedLLM.from_engine_args(arguments, stat_loggers=[drafts.of_engine])
    """

    def __init__(self) -> None:
        self.drafted = self.accepted = 0

    def of_engine(self, vllm_config: Any, engine_index: int = 0) -> "DraftCounter":
        """One counter for all."""
        return self

    def record(self, scheduler_stats: Any, *args: Any, **kwargs: Any) -> None:
        if scheduler_stats is not None and (found := scheduler_stats.spec_decoding_stats) is not None:
            self.drafted += found.num_draft_tokens
            self.accepted += found.num_accepted_tokens

    def log_engine_initialized(self) -> None:
        """Nothing is written down."""
