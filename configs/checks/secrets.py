"""Secrets in a config: command lines and configs show in `ps`, in the run folder and on W&B's dashboard."""

import re
from collections.abc import Iterator

from configs.checks.problem import Problem, values
from configs.schema import Config
from configs.serve import TOKEN_ENV

NOT_SHOWN = "(not shown)"
_SECRET_KEY = re.compile(
    r"(^|[._])(token|passw(or)?d|secret|credentials?|(api|access|secret|private|auth)_?(key|token))$", re.I
)
_SECRET_VALUE = re.compile(
    r"://[^/\s@]+@"  # user:password@ of a URL
    r"|\b(hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|sk-[\w-]{20,}|AKIA[A-Z0-9]{16}|wandb_v1_\w{20,})"
)
_ENTRY = re.compile(r"""["']?([\w.]+)["']?\s*:\s*(\$\{[^{}]*\}|[^,{}]*)""")
"""Of a dict in an argument."""
_FROM_ELSEWHERE = re.compile(r"""["']?\$\{oc\.env:[^{},]*\}["']?|null|""")


def secret_in_argument(key: str, value: str, is_known: bool) -> str | None:
    """Why an argument `key=value` is refused; None when it holds no secret. `is_known`: the key is one of ours."""
    if key == "serve.token":
        return f"the token is given in the environment ({TOKEN_ENV}) or in a file (serve.token_file)"
    entries = [(key, value), *(_ENTRY.findall(value) if value.startswith("{") else [])]
    is_given = any(_SECRET_KEY.search(name) and not _FROM_ELSEWHERE.fullmatch(text.strip()) for name, text in entries)
    if (is_given and not is_known) or _SECRET_VALUE.search(value):
        return "a secret here would show in `ps`, in the run folder and on W&B: give it in the environment"
    return None


def secret_problems(config: Config) -> Iterator[Problem]:
    """Values that look like keys of services, or URLs with a password, and what vLLM, an agent or a loader is given
    under a secret's name."""
    allowed = "holds a secret, which the run's files and W&B would show: give it in the environment"
    for key, value in values(config):
        if isinstance(value, str | dict | list | tuple) and _SECRET_VALUE.search(str(value)):
            yield Problem(key, allowed, NOT_SHOWN)
    given = {
        "rollout.engine_args": config.rollout.engine_args,
        "rollout.agent_args": config.rollout.agent_args,
        "data.loader_args": config.data.loader_args,
    }
    for key, arguments in given.items():
        for name, value in arguments.items():
            if _SECRET_KEY.search(name) and isinstance(value, str):
                yield Problem(f"{key}.{name}", allowed, NOT_SHOWN)
