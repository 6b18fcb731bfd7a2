"""vLLM's own OpenAI-compatible app around a running engine, on the same event loop.

Every route goes through GatedLLM.generate, so admission, cache salt, freeze and abort hold for HTTP as well. Names have
moved between vLLM's versions; 0.26 to 0.33 are covered.
"""

from collections.abc import Callable, Iterable
from inspect import isawaitable
from types import SimpleNamespace
from typing import Any

from fastapi import FastAPI
from transformers import PreTrainedTokenizerBase

try:
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app
except ImportError:  # before 0.32
    from vllm.entrypoints.openai.api_server import build_app, init_app_state
try:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
except ImportError:
    try:
        from vllm.entrypoints.common.cli_args import make_arg_parser  # 0.33  # pyright: ignore[reportMissingImports]
    except ImportError:  # before 0.32
        from vllm.entrypoints.openai.cli_args import make_arg_parser  # pyright: ignore[reportMissingImports]
from vllm.utils.argparse_utils import FlexibleArgumentParser

from rollout.chat.end_tokens import end_token_ids
from rollout.engines.vllm.client import GatedLLM

MODEL_NAME = "policy"
"""A name by which clients may call the model, besides its path."""


async def openai_app(llm: GatedLLM, chat_template: str | None = None) -> FastAPI:
    """`chat_template` (Jinja) is for models whose tokenizer has none."""
    model = llm.model_config.model
    args: Any = make_arg_parser(FlexibleArgumentParser()).parse_args([])
    args.model = model
    args.served_model_name = [MODEL_NAME, model]
    args.chat_template = chat_template
    args.disable_log_stats = not llm.log_stats
    tasks = await llm.get_supported_tasks()
    app = build_app(args, tasks, llm.model_config)
    await init_app_state(llm, app.state, args, tasks)
    await stop_where_turns_end(llm, app)
    app.state.server = SimpleNamespace(should_exit=False)  # vLLM's error handlers set it; a replica ends otherwise
    return app


async def stop_where_turns_end(llm: GatedLLM, app: FastAPI) -> None:
    """Let chats end at the tokens that end a turn in this project, besides those that vLLM stops at: in every protocol
    that vLLM serves as a chat, and unless the request says ignore_eos.

    vLLM reads the tokenizer and the generation config. Those of a base model need not know what its chat template
    writes after an answer.
    """
    tokenizer = llm.get_tokenizer()
    if isawaitable(tokenizer):  # before 0.32
        tokenizer = await tokenizer
    if not isinstance(tokenizer, PreTrainedTokenizerBase):  # Mistral's own has no chat template
        return
    ends = end_token_ids(tokenizer, chat=True)
    for handler in vars(app.state)["_state"].values():
        for name in ("create_chat_completion", "create_batch_chat_completion"):
            if hasattr(handler, name):
                setattr(handler, name, _with_ends(getattr(handler, name), ends))


def _with_ends(create: Callable[..., Any], ends: Iterable[int]) -> Callable[..., Any]:
    """Return a handler's method that creates a completion for a request which stops at these tokens too."""

    async def create_with_ends(request: Any, *args: Any, **kwargs: Any) -> Any:
        if not request.ignore_eos:
            request.stop_token_ids = list(dict.fromkeys((*(request.stop_token_ids or ()), *ends)))
        return await create(request, *args, **kwargs)

    return create_with_ends
