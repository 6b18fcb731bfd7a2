"""The console command `slipstream`, also `python -m scripts`: one name for all commands.

slipstream COMMAND ...     slipstream COMMAND --help says what a command takes
"""

import importlib
import importlib.metadata
import importlib.util
import sys

COMMANDS = {
    "train": ("train", "train a model by reinforcement learning"),
    "sft": ("sft", "train a model on conversations"),
    "evaluate": ("evaluate", "measure a model on held-out data"),
    "serve": ("serve", "serve a model over HTTP, as OpenAI does"),
    "dashboard": ("dashboard.__main__", "show a run in a browser, live"),
    "predict": ("predict.__main__", "predict other configurations of a run, and say what to change"),
    "replay": ("replay.__main__", "train again on what a run has recorded"),
    "agent-check": ("agent_check", "run an agent once, and say what to know before training it"),
    "rehearse": ("rehearse", "rehearse a run without its GPUs: its memory, and how long a step would take"),
    "audit": ("audit", "check the records of a run"),
    "timeline": ("timeline", "write the timeline of a run for Perfetto"),
    "curve": ("plot_curve", "draw the curve of a run"),
    "export": ("export_hf", "write a checkpoint for transformers and vLLM"),
    "prepare-data": ("prepare_data", "write public data sets as parquet"),
    "retriever": ("retriever", "serve the documents of a corpus to search"),
    "fleet": ("fleet", "show, add and remove replicas of a running run"),
    "wandb-view": ("wandb_view", "make the saved view of a W&B project"),
    "migrate": ("migrate.__main__", "print our command for the script of another framework"),
    "from-verl": ("migrate.__main__", "the same, for verl"),
    "from-skyrl": ("migrate.__main__", "the same, for SkyRL"),
    "from-trl": ("migrate.__main__", "the same, for TRL"),
    "from-prime-rl": ("migrate.__main__", "the same, for prime-rl"),
}
"""The module below `scripts` and a summary of each command."""


def main() -> None:
    name, *arguments = sys.argv[1:] or ["--help"]
    if name == "--version":
        sys.stdout.write(f"slipstream {importlib.metadata.version('slipstream')}\n")
        return
    if name in ("-h", "--help", "help"):
        sys.stdout.write(usage())
        return
    if name not in COMMANDS:
        sys.exit(f"slipstream {name}: there is no such command; there are {', '.join(COMMANDS)}")
    module = f"scripts.{COMMANDS[name][0]}"
    if not _is_here(module):
        sys.exit(f"slipstream {name}: {module} is not in this checkout, which trains without it")
    named = [f"--from={name.removeprefix('from-')}"] if name.startswith("from-") else []
    sys.argv = [f"slipstream {name}", *named, *arguments]
    sys.exit(importlib.import_module(module).main())


def usage() -> str:
    """Return the summaries of all commands."""
    rows = "".join(f"  {name:<13}  {summary}\n" for name, (_, summary) in COMMANDS.items())
    return f"usage: slipstream COMMAND ...\n\n{rows}\nslipstream COMMAND --help says what a command takes.\n"


def _is_here(module: str) -> bool:
    """Return whether a module exists: those of wings may have been deleted."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


if __name__ == "__main__":
    main()
