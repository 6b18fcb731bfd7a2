"""Serves a model over HTTP, from several replicas behind one address, until Ctrl-C or SIGTERM.

`make serve`, `slipstream serve`.

model.* and rollout.* mean what they do in training, serve.* says where to listen. The replicas serve the model's own
weights, as version 0. Exit code: 0, or 1 after an error.
"""

import asyncio
import sys

from configs.serve import TOKEN_ENV
from configs.validate import ConfigError
from scripts.command.command import Ended, Invocation, Main, run_async


def main() -> None:
    MAIN.exit(sys.argv[1:])


def serve(invocation: Invocation) -> Ended:
    from rollout.http.token import configured_token, control_token
    from scripts.command.resume import holds_run
    from scripts.command.run_folder import locked
    from scripts.launch.cluster import resolve_device, without_trainer
    from scripts.launch.model_support import check_model
    from scripts.launch.serving import serve_model
    from scripts.plan.engine import check_engine
    from scripts.plan.plan import plan

    config = without_trainer(invocation.config)
    for key, harness in (("agent", config.rollout.agent), ("agent_command", config.rollout.agent_command)):
        if harness is not None:
            what = "is not run here: harnesses open sessions by themselves (docs/agents.md)"
            sys.stdout.write(f"rollout.{key}={harness} {what}; `make evaluate` runs it over the held-out prompts\n")
    device = resolve_device(invocation.config)
    check_model(config, trains=False, updates=False)
    if config.ray.address is not None and configured_token(config.serve) is None:
        why = f"with ray.address={config.ray.address} replicas listen on their nodes' addresses, and need a token"
        raise ConfigError(f"serve.token_file=None: {why}, in it or in {TOKEN_ENV}")
    check_engine(config)
    if config.dry_run:
        sys.stdout.write(plan("serve", config, device, invocation.run_dir, ()))
        return Ended(exit_code=0)
    try:
        with locked(invocation.run_dir), control_token(config.serve, invocation.run_dir) as token:
            if not holds_run(invocation.run_dir):
                invocation.save_config()
            run_async(serve_model(config, device, invocation.run_dir, token))
    except (KeyboardInterrupt, asyncio.CancelledError):
        sys.stdout.write("stopped\n")
    return Ended(exit_code=0)


MAIN = Main(name="serve", command=serve, needed_files=(), may_sweep=False)

if __name__ == "__main__":
    main()
