"""A model served over HTTP by several replicas behind one address.

`make serve`, `python -m scripts.serve`, `slipstream-serve`.

model.* and rollout.* mean what they do in training, serve.* where it listens. The replicas serve the model's own
weights, as version 0.
"""

import asyncio
import logging
import sys
from dataclasses import replace
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from configs.load import check_overrides, load, register
from configs.schema import Config
from configs.validate import ConfigError
from scripts.launch import models
from scripts.train import cancelled_by_sigterm, first_error

logger = logging.getLogger(__name__)
register()


def main() -> None:
    try:
        check_overrides(sys.argv[1:])
    except ConfigError as error:
        sys.exit(f"config error: {error}")
    _hydra_main()


@hydra.main(version_base="1.3", config_path="pkg://configs", config_name="serve")
def _hydra_main(composed: DictConfig) -> None:
    run_dir = Path(HydraConfig.get().runtime.output_dir).resolve()
    try:
        sys.exit(launch(load(composed, needed_files=()), run_dir))
    except ConfigError as error:
        sys.exit(f"config error: {error}")


def launch(config: Config, run_dir: Path) -> int:
    """Serves until Ctrl-C, and returns the exit code: 0, or 1 after an error."""
    from scripts.launch.cluster import resolve_device  # noqa: PLC0415  (a wrong config is refused before Ray is imported)
    from scripts.launch.serving import serve_model  # noqa: PLC0415

    device = resolve_device(config)
    if config.ray.address is not None and config.serve.token is None:
        why = f"with ray.address={config.ray.address} replicas listen on their nodes' addresses, and need a token"
        raise ConfigError(f"serve.token=None: {why}")
    config = replace(config, trainer=replace(config.trainer, num_ranks=0))  # nothing trains, or claims a GPU for it
    if config.dry_run:
        sys.stdout.write(_plan(config, device) + "\n")
        return 0
    try:
        asyncio.run(cancelled_by_sigterm(serve_model(config, device, run_dir)))
    except (KeyboardInterrupt, asyncio.CancelledError):
        sys.stdout.write("stopped\n")
        return 0
    except ConfigError:
        raise
    except Exception as error:
        first = first_error(error)
        logger.error("serving failed", exc_info=error)
        sys.stderr.write(f"failed: {type(first).__name__}: {first}\nlogs are in {run_dir}\n")
    return 1


def _plan(config: Config, device: str) -> str:
    rollout, serve = config.rollout, config.serve
    lines = [
        ("model", models.describe(config.model)),
        ("replicas", f"{rollout.num_replicas} x vLLM {rollout.dtype.value} on {device}"),
        ("gateway", f"http://{serve.host}:{serve.port}, {'with' if serve.token else 'without'} a token"),
    ]
    return "\n".join(f"{name:>11}: {text}" for name, text in lines)


if __name__ == "__main__":
    main()
