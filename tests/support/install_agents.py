"""Install the agents that are missing, and name those that cannot be installed."""

import subprocess

from tests.support.agent_installs import INSTALLS


def main() -> None:
    for install in INSTALLS.values():
        if install.path.exists():
            continue
        try:
            install.install()
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired, OSError) as error:
            print(f"{install.name} is not installed: {error}", flush=True)
        else:
            print(f"installed {install.name}", flush=True)


if __name__ == "__main__":
    main()
