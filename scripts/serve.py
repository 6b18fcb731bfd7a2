"""Serves a model over HTTP, from several replicas behind one address, until Ctrl-C or SIGTERM.

`make serve`, `python -m scripts.serve`, `slipstream-serve`.

model.* and rollout.* mean what they do in training, serve.* says where to listen. The replicas serve the model's own
weights, as version 0. Exit code: 0, or 1 after an error.
"""

import asyncio
import sys

from configs.validate import ConfigError
from scripts.launch.command import Invocation, run_async, run_command


def main() -> None:
    run_command("serve", serve, needed_files=())


def serve(given: Invocation) -> int:
    from scripts.launch.cluster import resolve_device, without_trainer
    from scripts.launch.plan import plan
    from scripts.launch.serving import serve_model

    config = without_trainer(given.config)
    device = resolve_device(config)
    if config.ray.address is not None and config.serve.token is None:
        why = f"with ray.address={config.ray.address} replicas listen on their nodes' addresses, and need a token"
        raise ConfigError(f"serve.token=None: {why}")
    if config.dry_run:
        sys.stdout.write(plan("serve", config, device, given.run_dir, ()))
        return 0
    try:
        run_async(serve_model(config, device, given.run_dir))
    except (KeyboardInterrupt, asyncio.CancelledError):
        sys.stdout.write("stopped\n")
    return 0


if __name__ == "__main__":
    main()
