"""Secrets in a config: command lines and configs show in `ps`, in the run folder and on W&B's dashboard."""

import re
from collections.abc import Iterator

from configs.checks.problem import Problem, values
from configs.schema import Config
from configs.serve import TOKEN_ENV

NOT_SHOWN = "(not shown)"
_SERVICES = (
    "openai|anthropic|google|gemini|azure|mistral|groq|together|deepseek|openrouter|serper|tavily|brave|wandb|hf"
)
_SECRET_KEY = re.compile(
    r"(^|[._-])(token|passw(or)?d|passphrase|secret|credentials?|authorization|cookies?|bearer|pat|jwt"
    rf"|(api|access|secret|private|auth|{_SERVICES})[_-]?(key|token))$",
    re.I,
)
_SECRET_VALUE = re.compile(
    r"://[^/\s@]+@"  # user:password@ of a URL
    r"|\bBearer\s+(?!\$)[\w.~+/-]{8,}"
    r"|\b(hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|sk-[\w-]{20,}|AKIA[A-Z0-9]{16}|wandb_v1_\w{20,})"
)
_ENTRY = re.compile(r"""["']?([\w.-]+)["']?\s*:\s*(\$\{[^{}]*\}|[^,{}]*)""")
"""One entry of a dict that is given as an argument."""
_ASSIGNED = re.compile(r"""(?:^|[\s;&|("'])(?:--?([\w.-]+)(?:=|\s+)|([\w.-]+)=)["']?(?=[^\s"'$-])""")
"""A variable or an option that a command is given, with a value that is written there: `KEY=x`, `--key x`."""
_FROM_ELSEWHERE = re.compile(r"""["']?\$\{oc\.env:[^{},]*\}["']?|null|""")


def secret_in_argument(key: str, value: str, is_known: bool) -> str | None:
    """Why an argument `key=value` is refused; None when it holds no secret. `is_known`: the key is one of ours."""
    if key == "serve.token":
        return f"the token is given in the environment ({TOKEN_ENV}) or in a file (serve.token_file)"
    if (_names_a_secret(key, value) and not is_known) or _SECRET_VALUE.search(value):
        return "a secret here would show in `ps`, in the run folder and on W&B: give it in the environment"
    return None


def may_be_shown(argument: str) -> bool:
    """Return whether an error may quote an argument, which need not be in Hydra's grammar."""
    key, _, value = argument.partition("=")
    return not (_names_a_secret(key, value) or _SECRET_VALUE.search(value))


def _names_a_secret(key: str, value: str) -> bool:
    entries = [(key, value), *(_ENTRY.findall(value) if value.startswith("{") else [])]
    return any(_SECRET_KEY.search(name) and not _FROM_ELSEWHERE.fullmatch(text.strip()) for name, text in entries)


def secret_problems(config: Config) -> Iterator[Problem]:
    """Yield values that look like keys of services, URLs with a password, what vLLM, an agent or a loader is given
    under a secret's name at any depth, and commands that are given one."""
    allowed = "holds a secret, which the run's files and W&B would show: give it in the environment"
    for key, value in values(config):
        if isinstance(value, str | dict | list | tuple) and _SECRET_VALUE.search(str(value)):
            yield Problem(key, allowed, NOT_SHOWN)
    opaque = {
        "rollout.engine_args": config.rollout.engine_args,
        "rollout.agent_args": config.rollout.agent_args,
        "data.loader_args": config.data.loader_args,
        "data.sources": config.data.sources,
    }
    for key, arguments in opaque.items():
        for name in _secret_names(arguments):
            yield Problem(f"{key}.{name}", allowed, NOT_SHOWN)
    command = config.rollout.agent_command or ""
    if any(_SECRET_KEY.search(option or variable) for option, variable in _ASSIGNED.findall(command)):
        yield Problem("rollout.agent_command", f"{allowed}, as $NAME", NOT_SHOWN)


def _secret_names(value: object, prefix: str = "") -> Iterator[str]:
    """Yield the paths of texts and numbers under a secret's name in dicts and lists."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    for name, entry in items:
        path = f"{prefix}{name}"
        is_number = isinstance(entry, int | float) and not isinstance(entry, bool)
        may_hold_it = isinstance(entry, str) or (is_number and not str(name).endswith("token"))  # eos_token=2
        if entry and may_hold_it and _SECRET_KEY.search(str(name)):
            yield path
        yield from _secret_names(entry, f"{path}.")
